"""Several RMSNorms in one launch: the results of their own functions, in one launch where one can serve them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import normforge
from normforge.families import several
from normforge.kernels.gpu import Target
from normforge.kernels.obtain import compile_for
from normforge.selection import dispatch
from proving import cases
from proving.cases import LAYOUTS, Case

from ..calling import captured, counted, each_device, each_of, pieces, refusals, same_bits, table_at
from ..kernels.compile_cases import TARGETS, binary_of
from ..launching import launching_nothing
from ..thorough import COSTLY, THOROUGH
from .test_transforms import Call, M, N, alike

pytestmark = pytest.mark.usefixtures("nothing_known")

# The rows, columns and options of each problem.
Sizes = Sequence[tuple[int, int, dict[str, Any]]]
MIXES: Mapping[str, Sizes] = table_at(Path(__file__).with_name("several_cases.yaml"))
each_mix = pytest.mark.parametrize(
    "mix", [pytest.param(mix, marks=THOROUGH) if mix == "four" else mix for mix in MIXES]
)


def problems(sizes: Sizes, device: str = "cpu") -> list[Any]:
    """Draw bf16 rows and weights; the rows are columns of one wide tensor, as those of a projection are."""
    drawn = []
    for m, n, options in sizes:
        shapes = {"rows": (m, n), "columns": (n,), "value": (1,)}
        x, weight = (torch.randn(*size, device=device).bfloat16() for size in ((m, n + 64), (n,)))
        own = [torch.rand(shapes[each], device=device) + 0.5 if each in shapes else each for each in options.values()]
        drawn.append((x[:, :n], weight, dict(zip(options, own, strict=True))))
    return drawn


def alone(x: torch.Tensor, weight: torch.Tensor | None = None, options: Mapping[str, Any] | None = None) -> Any:
    options = dict(options or {})
    if {"fquant", "group_size", "out"}.intersection(options):
        return normforge.quantised_rms_norm(x, weight, **options)
    residual = options.pop("residual", None)
    if residual is not None:
        return normforge.add_rms_norm(x, residual, weight, **options)
    return normforge.rms_norm(x, x.shape[-1:], weight, **options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of several problems at once."""
    return counted(monkeypatch, (several, "_launched", "together"))


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is type(other)
        assert all(map(same_bits, pieces(one), pieces(other)))


@each_device
@pytest.mark.parametrize("case", cases.cases("plain", norm="rms"), ids=str)
def test_outputs_and_gradients(case: Case, device: str) -> None:
    """Of calls like none before and of known ones, against fp64."""

    def run(given: cases.Tensors) -> tuple[torch.Tensor, ...]:
        options = {**given, **case.arguments}
        x, weight = options.pop("x"), options.pop("weight", None)
        options.pop("normalized_shape", None)
        beside = torch.ones(2, 24, device=device)
        for _ in range(2):
            first, second = normforge.rms_norms([(x, weight, options), (beside,)])
        torch.testing.assert_close(second, beside)
        return pieces(first)

    cases.check(case, cases.operands(case, device), run=run)


@COSTLY
@each_device
@each_mix
def test_results_are_those_of_each_function(mix: str, device: str, launches: list[str]) -> None:
    """To the bit, on a GPU under batch invariance: elsewhere a problem may have more warps there."""
    given = problems(MIXES[mix], device)
    found = [normforge.rms_norms(given) for _ in range(2)]
    if device == "cuda":
        graph, found[1] = captured(lambda: normforge.rms_norms(given))
        graph.replay()
    assert_same(*found)
    assert set(launches) == {"together"}
    for one, other in zip(found[0], [alone(*each) for each in given], strict=True):
        for own, its in zip(pieces(one), pieces(other), strict=True):
            if device == "cuda" and own is not None and own.dtype.itemsize > 1:
                torch.testing.assert_close(own, its, rtol=1.6e-2, atol=1.6e-2)
            assert device == "cuda" or same_bits(own, its)
    compiled = torch.compile(normforge.rms_norms, backend="aot_eager", fullgraph=True)
    with normforge.batch_invariant():
        for run in (normforge.rms_norms, compiled):
            assert_same(run(given), [alone(*each) for each in given])


def test_what_one_launch_cannot_serve(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    """Each problem has a launch of its own, then."""
    (q, of_q, groups), kv = problems(MIXES["latents"])
    for first in (
        (q.double(), of_q.double()),
        (LAYOUTS["negated"](q.float()), of_q),
        (q[:0], of_q, groups),
        (q, of_q, {**groups, "out": torch.empty_like(q, dtype=groups["out_dtype"])}),
        (q, of_q, {"residual": q, "dropout_p": 0.5, "dropout_rng": (1, 2)}),
        (torch.randn(8, 131, dtype=torch.bfloat16),),
    ):
        for _ in range(2):
            assert_same(normforge.rms_norms([first, kv]), [alone(*first), alone(*kv)])
    with normforge.batch_invariant():
        # With the warps of the other one, its bits would be others.
        normforge.rms_norms(problems(((2, 96, {}), (2, 8000, {}))))
    normforge.rms_norms([kv])
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    with dispatch.using(dispatch.loaded()):
        normforge.rms_norms(problems(MIXES["added"]))
    assert launches == []


X, WEIGHT = torch.randn(M, N), torch.ones(N)
LEAF = X.clone().requires_grad_()


@each_of(refusals(Path(__file__).with_name("several.yaml"), globals()))
def test_what_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    """Also once good calls are known."""
    for _ in range(2):
        with pytest.raises(error, match=message):
            normforge.rms_norms(**given)
        with torch.no_grad():
            normforge.rms_norms([(X,), (LEAF, None, {"fquant": "dynamic"})])


@each_device
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["vmap", "grad", "jvp", "double backward", "jit.trace", "make_fx of backward"])
def test_transforms(name: str, device: str) -> None:
    weight = torch.randn(N, device=device)
    both: tuple[Call, Call] = (
        lambda x, w=weight, r=None: normforge.rms_norms([(weight.expand(3, N),), (x, w, {"eps": 1e-6})])[1],
        lambda x, w=weight, r=None: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
    )
    both[0](torch.randn(M, N, device=device))
    alike(name, *both, device)


@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS, ids=str)
@each_mix
def test_compile(mix: str, target: Target) -> None:
    with dispatch.using(dispatch.loaded()), launching_nothing(target) as met:
        normforge.rms_norms(problems(MIXES[mix]))
    (together,) = [key for key in met if key.symbol.startswith("several_")]
    assert binary_of(target) in compile_for(together, resolve_name(together.kernel), target).asm
