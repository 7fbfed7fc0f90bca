"""Our outputs and gradients, which are measured."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

import normforge
from normforge.calls import road
from normforge.calls.functions import completed
from normforge.calls.outputs import dtypes_of
from normforge.calls.record import BackwardPass
from normforge.codegen.groups import Span
from normforge.codegen.parameters import GATED
from normforge.dtypes import TORCH_DTYPES
from normforge.families import public
from normforge.families.gated import row as gated
from normforge.families.group import row as group
from normforge.families.operands import GatedSaved, GroupNormGradients, GroupOptions

from ..cases import FULL, Tensors
from .cases import GROUPS, AnyCase, Case, GroupCase, Layout
from .peer import EPS

# Half of the elements, so that others are doubled, which is exact.
_DROPOUT_P, _DROPOUT_RNG = 0.5, (11939, 3)
# Of a packed tensor: so many that are normalised, and as many behind them that are not.
HEADS = 2


def dropout(device: torch.device) -> dict[str, Any]:
    """Return the arguments that say which elements are dropped."""
    return {"dropout_p": _DROPOUT_P, "dropout_rng": torch.tensor(_DROPOUT_RNG, device=device)}


def laid(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(M, N) rows as a call takes them; what lies between heads and is none of them is NaN."""
    if layout is Layout.ADJOINING:
        return rows
    heads = rows.view(-1, HEADS, rows.shape[-1])
    return torch.cat((heads, torch.full_like(heads, torch.nan)), 1)[:, :HEADS]


def _rotated(run: Any, case: Case, given: Tensors, *names: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the rows that come of heads, half of which are queries, and the gradients of weights, if any."""
    heads = [half for name in names for half in given[name].view(-1, HEADS, case.n).chunk(2, 1)]
    # In fp32, so that the sum of two gradients is rounded once.
    weights, turns = [given["weight"].float()] * 2, [given[name][::HEADS] for name in ("cos", "sin")]
    q, k, *totals = run(*heads, *weights, *turns, norm=case.mode.norm, eps=EPS, cast=case.mode.cast)
    return torch.cat((q, k), 1).flatten(0, 1), totals


def _together(case: Case, given: Tensors) -> Tensors:
    """Return the outputs of the second of two norms in one launch."""
    options: dict[str, Any] = {"eps": EPS, "cast": case.mode.cast, "residual": given.get("residual")}
    if case.mode.fquant.quantises:
        options |= {"fquant": case.mode.fquant, "out_dtype": TORCH_DTYPES[case.mode.dtype_out]}
    _, found = normforge.rms_norms([(given["x"], given["weight"], options)] * 2)
    if case.mode.fquant.quantises:
        return {"y_scale": found.y_scale}
    return {"y": found if isinstance(found, torch.Tensor) else found[0]}


def _as_images(case: AnyCase, rows: torch.Tensor) -> torch.Tensor:
    """(M, N) rows as groups, or as the channels of HEADS positions of each sample."""
    if isinstance(case, GroupCase):
        return case.shaped(rows)
    return rows.view(-1, HEADS, rows.shape[-1]).movedim(1, -1).contiguous()


def _rows_of(images: torch.Tensor) -> torch.Tensor:
    return images.movedim(1, -1).flatten(0, 1)


def _options(case: AnyCase) -> GroupOptions:
    if isinstance(case, GroupCase):
        return GroupOptions(GROUPS, EPS, case.mode.activation.value, None)
    return GroupOptions(Span.over(case.mode.norm).num_groups, EPS, "none", None)


def forward(case: AnyCase, given: Tensors) -> Tensors:
    """Return the outputs of a call."""
    if isinstance(case, GroupCase) or case.layout is Layout.CHANNELS:
        y, saved = group.launched(_as_images(case, given["x"]), given["weight"], None, _options(case), saves=True)
        assert saved is not None
        rows = y.reshape(-1, case.n) if isinstance(case, GroupCase) else _rows_of(y)
        return {"y": rows, "mean": saved[0].flatten(), "rstd": saved[1].flatten()}
    if case.layout is Layout.ROTATED:
        return {"y": _rotated(normforge.qk_norm_rope, case, given, "x")[0]}
    if case.layout is Layout.TOGETHER:
        return _together(case, given)
    mode, x = case.mode, laid(given["x"], case.layout)
    if mode.statistics_only:
        found: Any = getattr(normforge, f"{mode.norm.value}_statistics")(x, eps=EPS)
        return {"mean": found[0], "rstd": found[1]} if case.centres else {"rstd": found}
    keywords: dict[str, Any] = {name: given[name] for name in ("weight", "bias", "residual", "gate") if name in given}
    keywords |= {"eps": EPS, "save_mv": mode.save_mv, "fquant": mode.fquant, "out_dtype": TORCH_DTYPES[mode.dtype_out]}
    if mode.gating.gates:
        keywords |= {"activation": mode.gate_activation, "norm_before_gate": not mode.gating.is_before}
    else:
        keywords |= {"fadd": mode.fadd, "cast": mode.cast}
    if mode.dropout:
        keywords |= dropout(x.device)
    if case.layout is Layout.HEADS_IN_PLACE:
        keywords["out"] = x
    if mode.fadd.renorms:
        keywords |= {f"next_{name}": given[name] for name in ("weight", "bias") if name in given}
    prefix = "gated_" * mode.gating.gates + "renormed_" * mode.fadd.renorms
    run: Any = getattr(normforge, f"{prefix}{mode.norm.row.stem}2d_fwd")
    # Not every norm takes what is no choice of it.
    found = run(x, **{name: value for name, value in keywords.items() if name in signature(run).parameters})
    return {name: tensor.flatten(0, x.dim() - 2) for name, tensor in found._asdict().items() if tensor is not None}


def backward(case: AnyCase, given: Tensors, saved: Tensors) -> Tensors:
    """Return the gradients, from the statistics of what is normalised."""
    if isinstance(case, GroupCase) or case.layout is Layout.CHANNELS:
        dy, x, weight = _as_images(case, given["dy"]), _as_images(case, given["x"]), given["weight"]
        means = saved.get("mean", torch.zeros_like(saved["rstd"]))
        statistics, bias = torch.stack([means, saved["rstd"]]).view(2, len(x), -1), torch.zeros_like(weight)
        saved_tensors, due = (x, weight, bias if case.centres else None, statistics), (True, True, case.centres)
        grads = group.launched_backward(BackwardPass(saved_tensors, (_options(case),), dy, None, due))
        made = GroupNormGradients(*grads)._asdict()
        gradients = {name: gradient for name, gradient in made.items() if gradient is not None}
        return gradients if isinstance(case, GroupCase) else gradients | {"dx": _rows_of(gradients["dx"])}
    mode = case.mode
    if mode.gating.gates:
        return _gated(case, given, saved)
    if case.layout is Layout.ROTATED:
        dx, totals = _rotated(normforge.qk_norm_rope_bwd, case, given, "dy", "x")
        return {"dx": dx, "dweight": torch.stack(totals).sum(0).to(dx.dtype)}
    dy, x = (laid(given[name], case.layout) for name in ("dy", "x"))
    shaped = {name: value.view(x.shape[:-1]) for name, value in saved.items()}
    wants = ["dx", "dweight", *(["dbias"] if case.centres else []), *(["ddropped"] if mode.dropout else [])]
    run: Any = getattr(public, f"{mode.norm.row.stem}2d_bwd")
    more = dropout(x.device) if mode.dropout else {}
    cast = {"cast": mode.cast} if mode.norm in FULL else {}
    found = run(dy, x, given["weight"], **shaped, wants=wants, **cast, **more)
    return {name: getattr(found, name).view(-1, x.shape[-1]).squeeze(0) for name in wants}


def _gated(case: Case, given: Tensors, saved: Tensors) -> Tensors:
    mode, (x, gate, weight) = case.mode, (given[name] for name in ("x", "gate", "weight"))
    words = {"gating": mode.gating, "activation": mode.gate_activation, "eps": EPS, "save_mv": True}
    args = completed(GATED.functions[mode.norm], {"x": x, "gate": gate, "weight": weight, **words})
    operands = road.operands_of(gated.CALLS, args)
    told = gated.CALLS.args(road.options_of(gated.CALLS, mode.norm.value, args), dtypes_of(operands))
    kept = GatedSaved(x, gate, weight, None, saved.get("mean"), saved["rstd"])
    # All but that of a bias.
    found = gated.IN_PARTS.gradients(BackwardPass(kept, told, given["dy"], None, (True, True, True, False)))
    return dict(zip(("dx", "dgate", "dweight"), (each for each in found if each is not None), strict=True))
