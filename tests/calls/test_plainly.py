"""A call that is plain is one that `check_normalised` passes: compiled code asks nothing else of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from normforge.calls import road
from normforge.calls.check import check_normalised
from normforge.codegen.values import Cast
from normforge.families.plain import CALLS
from normforge.families.plainly import is_plain

M, N = 3, 64


def operands(*, dtype: torch.dtype = torch.bfloat16, vectors: torch.dtype = torch.float32, adds: bool = False) -> Any:
    x, residual = torch.zeros(2, M, N, dtype=dtype)
    vector = torch.nn.Parameter(torch.zeros(N, dtype=vectors))
    return [x, vector, vector, residual if adds else None, vector.detach()]


def checked(given: Any, shape: Any, options: Any) -> tuple[int, ...]:
    passed = road.named(CALLS, given, options)
    if options[:2] == ("rms", None):
        del passed["eps"]
    return check_normalised(CALLS.functions[options[0]], passed, shape, kernel=True)


@pytest.mark.parametrize(
    ("norm", "eps", "offset", "cast"),
    [
        ("layer", 1e-5, 0.0, "after_weight"),
        ("layer", 0.0, 0.0, "before_weight"),
        ("rms", None, 0.0, "after_weight"),
        ("rms", 1e-6, 1.0, "before_weight"),
    ],
)
def test_what_models_call_is_plain(norm: str, eps: float | None, offset: float, cast: str) -> None:
    floats = (torch.float16, torch.bfloat16, torch.float32)
    for dtype, vectors, adds, shape in product(floats, floats, (False, True), ((N,), [N], torch.Size((N,)))):
        given = operands(dtype=dtype, vectors=vectors, adds=adds)
        options = (norm, eps, offset, None, cast)
        assert is_plain(given, shape, options)
        assert checked(given, shape, options) == (N,)


def test_it_is_as_plain_to_whoever_follows_the_call() -> None:
    """TorchDynamo knows less of some values in some releases of torch, and what it does not know is not plain."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(N))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
            weight, options = self.weight, ("rms", self.eps, 0.0, None, "before_weight")
            return x + 1, is_plain((x, weight, None, x, None), weight.shape, options)

    torch._dynamo.reset()
    _, plain = torch.compile(Module(), backend="eager", fullgraph=True)(torch.zeros(M, N))
    assert plain


def with_(at: int, value: Any) -> Callable[[list[Any]], None]:
    def change(given: list[Any]) -> None:
        given[at] = value

    return change


def nothing(given: list[Any]) -> None:
    pass


OPTIONS = ("rms", 1e-5, 1.0, None, "after_weight")
SPARSE = torch.zeros(M, N).to_sparse()
NESTED = torch.nested.nested_tensor([torch.zeros(N)] * M)
# What has to be looked at, or left to torch: some of it is wrong.
OTHER: dict[str, tuple[Callable[[list[Any]], None], Any, Any]] = {
    "no tensor": (with_(0, [1.0] * N), (N,), OPTIONS),
    "nothing": (with_(0, None), (N,), OPTIONS),
    "a weight that is none": (with_(1, [1.0] * N), (N,), OPTIONS),
    "a subclass": (with_(0, torch.zeros(M, N).as_subclass(type("Own", (torch.Tensor,), {}))), (N,), OPTIONS),
    "sparse": (with_(0, SPARSE), (N,), OPTIONS),
    "nested": (with_(0, NESTED), (N,), OPTIONS),
    "integers": (with_(0, torch.zeros(M, N, dtype=torch.int32)), (N,), OPTIONS),
    "fp8": (with_(0, torch.zeros(M, N, dtype=torch.float8_e4m3fn)), (N,), OPTIONS),
    "float64": (with_(1, torch.zeros(N, dtype=torch.float64)), (N,), OPTIONS),
    "another device": (with_(2, torch.zeros(N, device="meta")), (N,), OPTIONS),
    "a scalar": (with_(0, torch.zeros(())), (N,), OPTIONS),
    "another N": (nothing, (N + 1,), OPTIONS),
    "two dimensions": (nothing, (M, N), OPTIONS),
    "none": (nothing, (), OPTIONS),
    "an integer": (nothing, N, OPTIONS),
    "a float": (nothing, (float(N),), OPTIONS),
    "no columns": (with_(0, torch.zeros(M, 0)), (0,), OPTIONS),
    "a longer weight": (with_(1, torch.zeros(N + 1)), (N,), OPTIONS),
    "a weight of rows": (with_(1, torch.zeros(M, N)), (N,), OPTIONS),
    "a residual of other rows": (with_(3, torch.zeros(M + 1, N)), (N,), OPTIONS),
    "an eps below 0": (nothing, (N,), ("rms", -1e-5, *OPTIONS[2:])),
    "an eps of nan": (nothing, (N,), ("rms", float("nan"), *OPTIONS[2:])),
    "an eps of True": (nothing, (N,), ("rms", True, *OPTIONS[2:])),
    "no eps": (nothing, (N,), ("layer", None, 0.0, *OPTIONS[3:])),
    "an offset that LayerNorm lacks": (nothing, (N,), ("layer", 1e-5, 1.0, *OPTIONS[3:])),
    "an offset of a weight that is not there": (with_(1, None), (N,), OPTIONS),
    "an offset of nan": (nothing, (N,), (*OPTIONS[:2], float("nan"), *OPTIONS[3:])),
    "no such cast": (nothing, (N,), (*OPTIONS[:4], "sideways")),
    "a cast of another class": (nothing, (N,), (*OPTIONS[:4], Cast.BEFORE_WEIGHT)),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_has_to_be_looked_at_is_not(name: str) -> None:
    change, shape, options = OTHER[name]
    given = operands()
    assert is_plain(given, (N,), OPTIONS)
    change(given)
    assert not is_plain(given, shape, options)
