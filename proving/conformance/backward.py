"""A backward pass of a case, and the errors of its outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

import normforge
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd

from . import forward, low_precision, oracle
from .case import RESIDUAL_OUT, Case, Close, Norm, Y
from .judge import OWN, OWN_SUM, BesideTally, CloseTally, ExactTally
from .outcome import Book
from .rows import Tensors, blocks, exact, flat, rows_of

_PLAIN: dict[Norm, Callable[..., torch.Tensor]] = {Norm.LAYER: normforge.layer_norm, Norm.RMS: normforge.rms_norm}
_ADDING: dict[Norm, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    Norm.LAYER: normforge.add_layer_norm,
    Norm.RMS: normforge.add_rms_norm,
}
# Gradients that have a row for each of x's, and those that are sums over rows.
_BY_ROW, _SUMMED = ("dx", "dresidual"), ("dweight", "dbias")


def judge(case: Case, given: Tensors, book: Book) -> None:
    """Run the forward and backward pass, and hold what comes of both against the oracle's."""
    outputs, gradients = _direct(case, given) if _is_direct(case) else autograd(case, given)
    device = given["x"].device
    got = {**outputs, **gradients}
    names: list[str] = [name for name in ("x", "residual", "weight", "bias") if name in given]
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"y": (case.shape, case.y)}
    for name in names:
        # Without a gradient of y, those of weight and bias are zero, and may be left out.
        if Y in case.arriving or name in ("x", "residual") or f"d{name}" in got:
            wanted[f"d{name}"] = (tuple(given[name].shape), given[name].dtype)
    if case.residual is not None:
        wanted["residual_out"] = (case.shape, case.residual)
    has = {name: book.expects(name, got.get(name), like) for name, like in wanted.items()}
    theirs = low_precision.run(case, given) if case.tolerance.beside_torch else {}

    def tally(name: str) -> CloseTally | BesideTally:
        tolerance = case.tolerance
        close = tolerance.y if name == "y" else tolerance.dx if name in _BY_ROW else tolerance.parameters
        return BesideTally(close.atol, device) if tolerance.beside_torch else CloseTally(close, device)

    suite = {name: tally(name) for name in wanted if name != "residual_out"}
    own = {}
    for name in suite:
        dtype = wanted[name][1]
        about = torch.finfo(dtype)
        # Half a step of the smallest numbers: fp16 has them from 6e-5 down.
        least = Close(about.smallest_normal * about.eps / 2, OWN[dtype].rtol)
        own[name] = CloseTally(OWN[dtype] if name == "y" else least, device)
    to_the_bit = ExactTally(device)
    rows = flat(case, given)
    sums: dict[str, dict[str, torch.Tensor]] = {"exact": {}, "magnitudes": {}}
    open_dweight: torch.Tensor | float = 0.0
    for part in blocks(case):
        want = exact(case, given, rows, part)
        if has["y"]:
            ours = rows_of(got["y"], case.n)[part]
            _add(suite["y"], ours, want.z, theirs, "y", part, case.n, want.open)
            own["y"].add(ours, want.z, want.open)
        if want.residual_out is not None and has["residual_out"]:
            to_the_bit.add(rows_of(got["residual_out"], case.n)[part], want.residual_out)
        exactly = _oracle_backward(case, given, rows, part, want)
        for name in _BY_ROW:
            if has.get(name):
                ours = rows_of(got[name], case.n)[part]
                _add(suite[name], ours, exactly.dx, theirs, name, part, case.n)
                own[name].add(ours, exactly.dx, OWN_SUM * exactly.magnitudes["dx"])
        open_dweight = open_dweight + exactly.open
        for name in _SUMMED:
            for key, term in (("exact", getattr(exactly, name)), ("magnitudes", exactly.magnitudes[name])):
                sums[key][name] = sums[key].get(name, 0.0) + term
    for name in _SUMMED:
        if has.get(name):
            zero = torch.zeros(case.n, dtype=torch.float64, device=device)
            total, magnitudes = (sums[key].get(name, zero) for key in ("exact", "magnitudes"))
            either = open_dweight if name == "dweight" else 0.0
            _add(suite[name], got[name], total, theirs, name, slice(None), case.n, either)
            own[name].add(got[name], total, OWN_SUM * magnitudes + either)
    for name in suite:
        if has[name]:
            book.open(name, suite[name], own[name])
    if has.get("residual_out"):
        book.open("residual_out", to_the_bit)


def _add(
    tally: CloseTally | BesideTally,
    ours: torch.Tensor,
    want: torch.Tensor,
    theirs: Tensors,
    name: str,
    part: slice,
    n: int,
    extra: torch.Tensor | float = 0.0,
) -> None:
    if isinstance(tally, CloseTally):
        tally.add(ours, want, extra)
    else:
        tally.add(ours, want, theirs[name] if theirs[name].dim() == 1 else rows_of(theirs[name], n)[part])


def _oracle_backward(case: Case, given: Tensors, rows: Tensors, part: slice, at: oracle.Forward) -> oracle.Backward:
    return oracle.backward(
        at.s,
        at.mean,
        at.rstd,
        centres=case.norm is Norm.LAYER,
        dy=rows["dy"][part] if "dy" in rows else None,
        dresidual_out=rows["dresidual_out"][part] if "dresidual_out" in rows else None,
        weight=given.get("weight"),
        weight_offset=case.weight_offset,
        rounds_first=case.rounds_first,
    )


def _is_direct(case: Case) -> bool:
    """Return True if autograd cannot make the call: it casts dy to y's dtype, and its functions return x's."""
    return case.y is not case.x or case.dy not in (None, case.y)


def _direct(case: Case, given: Tensors) -> tuple[Tensors, Tensors]:
    saved = forward.call(case, given, save_mv=True)
    assert saved.rstd is not None
    names = ["x", *(name for name in ("weight", "bias") if name in given)]
    wants = tuple(f"d{name}" for name in names)
    dy, x, weight = given["dy"], given["x"], given.get("weight")
    if case.norm is Norm.LAYER:
        assert saved.mean is not None
        found = layernorm2d_bwd(dy, x, weight, mean=saved.mean, rstd=saved.rstd, cast=case.cast, wants=wants)
    else:
        found = rmsnorm2d_bwd(
            dy, x, weight, rstd=saved.rstd, weight_offset=case.weight_offset, cast=case.cast, wants=wants
        )
    return {"y": saved.y}, {name: getattr(found, name) for name in wants}


def autograd(case: Case, given: Tensors) -> tuple[Tensors, Tensors]:
    """Return the outputs and the gradients of a case that autograd records."""
    names = [name for name in ("x", "residual", "weight", "bias") if name in given]
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    parameters = [leaves.get("weight"), *([leaves.get("bias")] if case.norm is Norm.LAYER else [])]
    outputs: Tensors = {}
    more = {"cast": case.cast, "weight_offset": case.weight_offset}
    if case.residual is None:
        outputs["y"] = _PLAIN[case.norm](leaves["x"], (case.n,), *parameters, case.eps, **more)
    else:
        rows = (leaves["x"], leaves["residual"])
        outputs["y"], outputs["residual_out"] = _ADDING[case.norm](*rows, *parameters, case.eps, **more)
    roots = [outputs[name] for name in case.arriving]
    arriving = [given[{Y: "dy", RESIDUAL_OUT: "dresidual_out"}[name]] for name in case.arriving]
    unused = Y not in case.arriving
    gradients = torch.autograd.grad(roots, list(leaves.values()), arriving, allow_unused=unused)
    found = {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    return {name: output.detach() for name, output in outputs.items()}, found
