"""weight_offset, x_bias and cast of the functional API: outputs and gradients against fp64, however a call is made."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from proving.cases import EPS, Case, Tensors, check, doubled, formula, operands

from ..calling import FUNCTIONS, each_device, pieces, plain
from ..thorough import THOROUGH
from .models import randomised

M, N = 3, 96

# Both norms, and both with a sum and without; all four with time.
each_function = pytest.mark.parametrize(
    "norm", [pytest.param(name, marks=[] if name in ("layer", "add_rms") else THOROUGH) for name in FUNCTIONS]
)


def case_of(
    norm: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (M, N), offset: float = 0.0
) -> Case:
    return plain(norm, x_bias=True, dtype=dtype, shape=shape, weight_offset=offset)


def tensors(norm: str, dtype: torch.dtype, device: str = "cpu", shape: tuple[int, ...] = (M, N)) -> Tensors:
    """Return every tensor that a function takes; x_bias is of another type than x, weight and bias are fp32."""
    given = operands(case_of(norm, dtype, shape), device)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    return given | {"x_bias": given["x_bias"].detach().to(other).requires_grad_()}


def call(norm: str, given: Tensors, **options: Any) -> tuple[torch.Tensor, ...]:
    rest = {} if "add" in norm else {"normalized_shape": (N,)}
    return pieces(case_of(norm).function(**given, **rest, eps=EPS, **options))


def exact(norm: str, given: Tensors, weight_offset: float) -> tuple[Tensors, tuple[torch.Tensor, ...]]:
    """Return fp64 copies, and the formula of them."""
    wide = doubled(given)
    return wide, formula(case_of(norm, offset=weight_offset), wide)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_function
def test_an_offset_and_a_bias_of_x(norm: str, dtype: torch.dtype, device: str) -> None:
    # The second call is known, and of other tensors; the offset is a number of each call.
    for offset in (1.0, 1.0, -0.5, 0.0):
        check(case_of(norm, offset=offset), tensors(norm, dtype, device))


MODULES: dict[str, type[torch.nn.Module]] = {
    "layer": normforge.LayerNorm,
    "rms": normforge.RMSNorm,
    "add_layer": normforge.AddLayerNorm,
    "add_rms": normforge.AddRMSNorm,
    "layer_add": normforge.LayerNormAdd,
    "rms_add": normforge.RMSNormAdd,
}
each_module = pytest.mark.parametrize(
    "norm", [pytest.param(name, marks=THOROUGH if name in ("rms", "add_layer") else []) for name in MODULES]
)


def module_of(norm: str, **options: Any) -> Any:
    return MODULES[norm](N, EPS, **options)


def module_call(module: Any, given: Tensors) -> tuple[torch.Tensor, ...]:
    return pieces(module(*(given[name] for name in ("x", "residual") if name in given)))


@each_module
def test_a_module_is_its_function_with_parameters_of_its_own(norm: str) -> None:
    module = module_of(norm, weight_offset=1.0, x_bias=True, dtype=torch.float32)
    given = {name: tensor for name, tensor in tensors(norm, torch.float32).items() if name in ("x", "residual")}
    # weight + weight_offset is 1 at first, and x_bias 0.
    plain = module_call(MODULES[norm](N, EPS), given)
    assert all(map(torch.equal, module_call(module, given), plain))
    randomised(module)
    given |= dict(module.named_parameters())
    assert set(given) == set(tensors(norm, torch.float32))
    check(case_of(norm, offset=1.0), given, run=partial(module_call, module))
    twin = module_of(norm, weight_offset=1.0, x_bias=True)
    twin.load_state_dict(module.state_dict())
    for other in (twin, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(map(torch.equal, module_call(other, given), module_call(module, given)))
    # Of several dimensions, normalised as one.
    wide = MODULES[norm]((8, N // 8), EPS, weight_offset=1.0, x_bias=True)
    wide.load_state_dict({name: vector.view(8, -1) for name, vector in module.state_dict().items()})
    planes: Tensors = {name: given[name].view(M, 8, -1) for name in ("x", "residual") if name in given}
    assert all(
        torch.equal(a.view(M, N), b) for a, b in zip(module_call(wide, planes), module_call(module, given), strict=True)
    )
    module.reset_parameters()
    assert all(map(torch.equal, module_call(module, given), plain))


@each_module
def test_options_are_shown_and_may_be_changed(norm: str) -> None:
    shown = str(module_of(norm, cast="before_weight", weight_offset=1.0, x_bias=True))
    assert ", cast=before_weight, weight_offset=1.0, x_bias=True" in shown
    module = module_of(norm)
    given = {name: tensor for name, tensor in tensors(norm, torch.bfloat16).items() if name in ("x", "residual")}
    linear = torch.nn.Linear(N, N)
    module.weight_offset, module.cast = 0.5, "before_weight"
    for x_bias in (linear.bias, None):
        module.x_bias = x_bias
        assert ("x_bias" in str(module)) == (x_bias is not None)
        vectors = dict(module.named_parameters())
        assert vectors.get("x_bias") is x_bias
        expected = call(norm, {**given, **vectors}, weight_offset=0.5, cast="before_weight")
        assert all(map(torch.equal, module_call(module, given), expected))


def test_a_patched_norm_takes_options_too() -> None:
    model = torch.nn.Sequential(torch.nn.RMSNorm(N, EPS))
    normforge.patch(model)
    norm: Any = model[0]
    x = torch.randn(M, N)
    plain = model(x)
    norm.weight_offset, norm.x_bias = 1.0, torch.nn.Parameter(torch.randn(N))
    expected = normforge.rms_norm(x, (N,), norm.weight, EPS, weight_offset=1.0, x_bias=norm.x_bias)
    assert torch.equal(model(x), expected)
    assert not torch.equal(expected, plain)


def test_rows_rounded_to_the_product_take_the_other_options() -> None:
    """cast_before_weight gives y the wider type; rows are rounded to x's all the same."""
    module: Any = normforge.RMSNorm(N, EPS, weight_offset=1.0, x_bias=True, cast_before_weight=True)
    torch.nn.init.normal_(module.x_bias)
    x = torch.randn(M, N).bfloat16()
    total = x.float() + module.x_bias
    h = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = module(x)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, h.bfloat16().float() * (module.weight + 1.0), rtol=1e-2, atol=1e-2)
    assert torch.equal(y / (module.weight + 1.0), (y / (module.weight + 1.0)).bfloat16().float())
