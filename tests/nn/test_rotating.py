"""Attention whose norms of queries and keys `patch` computes together with their rotary embedding."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

import normforge
from normforge.errors import FrozenError, PatchError
from normforge.patching import modulating, rotating

from ..thorough import COSTLY
from .models import Counted, GemmaRMSNorm, LlamaRMSNorm, assert_same_results, copies, randomised, twins, written

pytestmark = pytest.mark.usefixtures("fused")

SAMPLES, TOKENS, WIDTH, COLUMNS = 2, 5, 48, 8

Pair = tuple[torch.Tensor, torch.Tensor]


def halves(x: torch.Tensor) -> torch.Tensor:
    """Return what columns are turned towards, as Llama's rotate_half."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotate all columns, as Llama does."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def rotate_some(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotate as many columns as the tables have, as GPT-NeoX does."""
    columns = cos.shape[-1]
    turned = rotate(q[..., :columns], k[..., :columns], cos, sin)
    passed = q[..., columns:], k[..., columns:]
    return torch.cat((turned[0], passed[0]), -1), torch.cat((turned[1], passed[1]), -1)


def rotate_pairs(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotate columns that adjoin by the first half of the tables, as GLM does."""
    cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for each in (cos, sin))
    q_beside, k_beside = (torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k))
    return q * cos + q_beside * sin, k * cos + k_beside * sin


def rotate_wide_tables(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotate by tables in fp32, and return the rows' dtype, as OLMo 2 does."""
    turned = rotate(q, k, cos, sin)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


def rotate_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
    """Rotate one tensor, as Gemma 4 does."""
    return x * cos.unsqueeze(unsqueeze_dim) + halves(x) * sin.unsqueeze(unsqueeze_dim)


def rotate_back(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Rotate the other way round."""
    return rotate(q, k, cos, -sin)


def rotate_once(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Rotate, and leave other tables behind."""
    rotated = rotate(q, k, cos, sin)
    cos.mul_(2)
    return rotated


def clear(rows: torch.Tensor) -> None:
    """Write to rows where no text shows it."""
    rows.zero_()


class Attention(torch.nn.Module):
    """What attention with norms of queries and keys holds; two heads of keys serve four of queries."""

    norms: Any = LlamaRMSNorm
    sizes = (COLUMNS, COLUMNS)

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(WIDTH, 4 * COLUMNS)
        self.k_proj = torch.nn.Linear(WIDTH, 2 * COLUMNS)
        self.q_norm, self.k_norm = (self.norms(size) for size in self.sizes)
        self.on = True


SIGNATURE = "def forward(self, x, cos, sin):"
RETURNED = "return torch.cat((q, k), 1).flatten(1)"
TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("rotating.yaml").read_text())
PROJECTED, TRANSPOSED, NORMALISED, ROTATED = TABLE["steps"].values()


def forwards(kind: str) -> dict[str, tuple[str, ...]]:
    """Return the lines of forwards, of which several may be steps that others have too."""
    each = {name: ([step] if isinstance(step, str) else step for step in body) for name, body in TABLE[kind].items()}
    return {name: tuple(chain.from_iterable(steps)) for name, steps in each.items()}


FUSED, WHOLE, ALONE, LEFT = map(forwards, ("fused", "whole", "alone", "left"))


def attention(body: tuple[str, ...], **attributes: Any) -> Any:
    """Return a module with a forward of these lines."""
    base = type("Attention", (Attention,), attributes)
    return randomised(written(base, "Written", SIGNATURE, *body, RETURNED, names=globals())())


def _attention_of(name: str, **attributes: Any) -> Any:
    """Return a module with a forward that is fused."""
    sizes = {"sizes": (4 * COLUMNS, 2 * COLUMNS)} if name in WHOLE else {}
    return attention({**FUSED, **WHOLE, **ALONE}[name], **sizes, **attributes)


# Pickles find a class by its name.
Pickled = written(Attention, "Pickled", SIGNATURE, *FUSED["norms_in_place_of_rows"], RETURNED, names=globals())


def inputs(samples: int = 1, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, and tables whose two halves differ; of one sample, they serve all."""
    angles = torch.randn(samples, TOKENS, COLUMNS)
    return torch.randn(SAMPLES, TOKENS, WIDTH, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@COSTLY
@pytest.mark.parametrize("name", [*FUSED, *WHOLE, *ALONE])
@pytest.mark.parametrize("norm", [LlamaRMSNorm, GemmaRMSNorm, torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norms_are_computed_with_their_rotation(name: str, norm: Any, fused: Counted) -> None:
    # A LayerNorm's bias has no place in the kernel.
    norms = (lambda n: torch.nn.LayerNorm(n, bias=False)) if norm is torch.nn.LayerNorm else norm
    model, calls = _attention_of(name, norms=staticmethod(norms)), 2 if name in ALONE else 1
    patched = twins(model)[1]
    for samples in (1, SAMPLES):
        assert_same_results(patched, model, *inputs(samples))
    assert fused.counts() == {"rotations": 2 * calls}
    bf16 = [each.bfloat16() for each in (patched, model)]
    assert_same_results(*bf16, *inputs(dtype=torch.bfloat16), tolerance=4e-2)
    assert fused.counts() == {"rotations": calls}


def test_the_report_names_them_and_copies_keep_them(fused: Counted) -> None:
    model, patched = twins(randomised(Pickled()))
    given = inputs()
    for each in (patched, *copies(patched)):
        assert "q_norm, k_norm with the rotary embedding" in repr(each)
        assert_same_results(each, model, *given)
    assert fused.counts() == {"rotations": 3}
    normforge.unpatch(patched)
    assert type(patched) is type(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_are_of_the_dtype_that_a_function_takes(dtype: torch.dtype, fused: Counted) -> None:
    lines = (*PROJECTED, *TRANSPOSED, *NORMALISED, "q, k = rotate_wide_tables(q, k, cos, sin)")
    model, ours = (each.to(dtype) for each in twins(attention(lines)))
    x, *tables = inputs()
    assert_same_results(ours, model, x.to(dtype), *tables, tolerance=2e-5 if dtype is torch.float32 else 4e-2)
    assert fused.counts() == {"rotations": 1}
    assert_same_results(ours, model, *inputs(dtype=dtype), tolerance=2e-5 if dtype is torch.float32 else 4e-2)
    assert fused.counts() == ({"rotations": 1} if dtype is torch.float32 else {})


@pytest.mark.parametrize("name", ["rows_that_are_viewed", "norms_in_place_of_rows", "one_by_one"])
def test_norms_that_differ_or_do_more_are_called(name: str, fused: Counted) -> None:
    """A norm with a hook, and one with another epsilon; but one norm may serve both."""
    model = _attention_of(name)
    given, seen = inputs(), []
    hooked, shared = (copy.deepcopy(model) for _ in range(2))
    shared.k_proj, shared.k_norm = torch.nn.Linear(WIDTH, shared.q_proj.out_features), shared.q_norm
    ours = [twins(each)[1] for each in (model, hooked, shared)]
    ours[1].q_norm.register_forward_hook(lambda module, args, y: seen.append(args[0].shape))
    ours[0].q_norm.variance_epsilon = model.q_norm.variance_epsilon = 0.5
    for each, wanted in zip(ours, (model, hooked, shared), strict=True):
        assert_same_results(each, wanted, *given)
    assert seen == [(SAMPLES, TOKENS, *((4 * COLUMNS,) if name in WHOLE else (4, COLUMNS)))]
    # A rotation of one tensor needs no other's norm.
    assert fused.counts() == {"rotations": 5 if name in ALONE else 1}
    for tables in ((given[1].clone().requires_grad_(), given[2]), (given[1].double(), given[2].double())):
        torch.testing.assert_close(ours[2](given[0], *tables), shared(given[0], *tables), rtol=2e-6, atol=2e-6)
    assert fused.counts() == {}


@pytest.mark.parametrize("name", LEFT)
def test_other_forwards_are_left_alone(name: str) -> None:
    model = attention(LEFT[name])
    ours = twins(model)[1]
    assert type(ours) is type(model)
    assert_same_results(ours, model, *inputs())


def test_calls_that_no_kernel_serves_are_computed_as_before(fused: Counted) -> None:
    model, ours = twins(attention(FUSED["norms_of_transposed_rows"]))
    x, cos, sin = inputs()
    for tables in (
        (cos.clone().requires_grad_(), sin),
        (cos.double(), sin.double()),
        (cos[:, :1], sin[:, :1]),
        (cos[..., :1], sin[..., :1]),
    ):
        torch.testing.assert_close(ours(x, *tables), model(x, *tables), rtol=2e-6, atol=2e-6)
    assert fused.counts() == {}


def test_few_rows_without_gradients_are_rotated_apart(fused: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel would take the host longer, and batch invariance lets no row depend on how many there are."""
    model, ours = twins(attention(FUSED["pairs"]))
    given = inputs()
    elements = SAMPLES * TOKENS * model.q_proj.out_features
    for least, counts in ((elements, {"rotations": 1}), (elements + 1, {}), ("", {})):
        monkeypatch.setenv("NORMFORGE_FUSE_FROM", str(least))
        with torch.no_grad():
            torch.testing.assert_close(ours(*given), model(*given), rtol=2e-6, atol=2e-6)
        assert fused.counts() == counts
    with torch.no_grad(), normforge.batch_invariant():
        ours(*given)
    assert fused.counts() == {"rotations": 1}


def test_where_no_kernel_is_loaded_both_are_left_apart(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(rotating, "qk_norm_rope", Mock(side_effect=FrozenError("no kernel here")))
    model, ours = twins(attention(FUSED["pairs"]))
    for _ in range(2):
        assert_same_results(ours, model, *inputs())
    assert [record.message for record in caplog.records] == [
        "a rotary embedding and LlamaRMSNorm are left two kernels: no kernel here"
    ]


@pytest.mark.parametrize("write", ["rows.mul_(2)", "rows[0] = 2", "rows += 2", "torch.mul(rows, 2, out=rows)"])
def test_forwards_that_write_to_tensors_are_left_alone(write: str) -> None:
    body = (*PROJECTED, *TRANSPOSED, "rows = q", *NORMALISED, write, ROTATED)
    model, ours = twins(attention(body))
    assert type(ours) is type(model)


@pytest.mark.parametrize("change", ["clear(rows)", "torch.set_grad_enabled(True)"])
def test_what_changes_while_a_norm_waits_is_an_error(change: str) -> None:
    body = (*PROJECTED, "rows = q", *TRANSPOSED, *NORMALISED, change, ROTATED)
    ours = twins(attention(body))[1]
    with torch.no_grad(), pytest.raises(PatchError, match=r"^rows were written to, or grad mode .*; .* fuse=False"):
        ours(*inputs())


# Rotations that no kernel does.
OTHERS: dict[str, Any] = {
    "the other way round": rotate_back,
    "keys without a gradient": lambda q, k, cos, sin: rotate(q, k.detach(), cos, sin),
    "several tokens alone": lambda q, k, cos, sin: (q, k) if q.shape[2] == 1 else rotate(q, k, cos, sin),
    "tables of each sample alone": lambda q, k, cos, sin: rotate(q, k, cos, sin) if len(cos) == len(q) else (q, k),
    "queries of fp32": lambda q, k, cos, sin: rotate(2 * q if q.dtype == torch.float32 else q, k, cos, sin),
    "tables written to": rotate_once,
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=list(OTHERS))
def test_functions_that_do_not_only_rotate_are_told_apart(function: Any) -> None:
    assert rotating.formula_of(rotate) is not None
    assert rotating.formula_of(function) is None
    assert modulating.formula_of(rotate_one, 2, (), (("unsqueeze_dim", 2),)) is not None
    assert modulating.formula_of(rotate_one, 2, (), (("unsqueeze_dim", 0),)) is None
