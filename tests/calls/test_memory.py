"""What a forward pass leaves behind for the backward pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import normforge
from proving.cases import operands

from ..calling import all_plans, backward, each_device, each_float, each_function, each_norm, plain, there
from ..nn import models
from ..nn.models import WIDTH

M, N = 6, 640


def kept(function: Callable[[], object]) -> list[torch.Tensor]:
    """Every tensor that a call saves for its backward pass."""
    tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return tensors


def kept_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(storage.nbytes() for storage in {t.data_ptr(): t.untyped_storage() for t in tensors}.values())


@each_device
@each_float
@each_function
def test_what_is_kept_is_one_tensor_of_xs_size(norm: str, dtype: torch.dtype, device: str) -> None:
    case = plain(norm, shape=(M, N), dtype=dtype)
    given = operands(case, device)
    outputs: list[torch.Tensor] = []
    tensors = kept(lambda: outputs.extend(case.run(given)))
    large = [tensor for tensor in tensors if tensor.numel() >= M * N]
    # Nobody pays for it: the caller holds x, and residual_out is an output.
    normalised = outputs[1] if "residual" in given else given["x"]
    assert [tensor.data_ptr() for tensor in large] == [normalised.data_ptr()]
    # A mean and rstd a row in one tensor, where rstd starts at a multiple of 16 bytes.
    statistics = M if norm.endswith("rms") else -(-M // 4) * 4 + M
    weight = N * 4
    assert kept_bytes(tensors) == M * N * dtype.itemsize + statistics * 4 + weight
    assert len(tensors) == 3


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_device
@pytest.mark.parametrize("cls", [models.LlamaRMSNorm, models.T5LayerNorm], ids=lambda cls: cls.__name__)
def test_a_patched_hugging_face_norm_keeps_x_and_one_statistic_a_row(
    cls: Callable[[], torch.nn.Module], dtype: torch.dtype, weight: torch.dtype, device: str
) -> None:
    """The row that its weight is multiplied with is computed again, and one function does it all."""
    module = cls().to(device, weight)
    normforge.patch(module)
    x = torch.randn(M, WIDTH, device=device).to(dtype).requires_grad_()
    outputs: list[torch.Tensor] = []
    tensors = kept(lambda: outputs.append(module(x)))
    assert {(tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors if tensor.numel() > M} == {
        (x.data_ptr(), (M, WIDTH)),
        (module.get_parameter("weight").data_ptr(), (WIDTH,)),
    }
    assert kept_bytes(tensors) == M * WIDTH * dtype.itemsize + WIDTH * weight.itemsize + M * 4
    assert outputs[0].grad_fn is not None
    assert {type(node).__name__ for node, _ in outputs[0].grad_fn.next_functions} <= {"AccumulateGrad", "NoneType"}


@pytest.mark.parametrize("add", [normforge.add_layer_norm, normforge.add_rms_norm])
def test_the_sum_is_kept_and_not_what_was_summed(add: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    leaf = torch.randn(M, N, requires_grad=True)
    # A product with a number keeps nothing either.
    x, residual = leaf * 2, leaf * 3
    summed = [weakref.ref(x), weakref.ref(residual)]
    outputs = add(x, residual, torch.ones(N, requires_grad=True))
    del x, residual
    gc.collect()
    assert [reference() for reference in summed] == [None, None]
    assert all(output.requires_grad for output in outputs)


@each_norm
def test_a_copy_of_x_is_made_once_and_kept(norm: str) -> None:
    x = torch.randn(N, M, requires_grad=True).T
    tensors = kept(lambda: plain(norm, shape=(M, N)).run({"x": x}))
    (copy,) = [tensor for tensor in tensors if tensor.numel() == M * N]
    assert copy.is_contiguous()
    assert torch.equal(copy, x)


@pytest.mark.parametrize("grad", [False, True])
@each_function
def test_nothing_is_kept_where_no_gradient_is_due(norm: str, grad: bool) -> None:
    case = plain(norm, shape=(M, N))
    given = operands(case)
    for tensor in given.values():
        tensor.requires_grad_(not grad)
    outputs: list[torch.Tensor] = []
    with torch.set_grad_enabled(grad):
        assert kept(lambda: outputs.extend(case.run(given))) == []
    assert not any(output.requires_grad for output in outputs)


@pytest.mark.usefixtures("nothing_known")
@each_function
def test_statistics_are_not_computed_where_no_gradient_is_due(norm: str) -> None:
    case = plain(norm, shape=(M, N))
    given = operands(case)
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            case.run(given)
    assert [plan.dtypes[-1] is not None for plan in all_plans()] == [True, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    norms = torch.nn.Sequential(normforge.LayerNorm(N), torch.nn.Linear(N, N), normforge.RMSNorm(N))
    x = torch.randn(M, N, requires_grad=True)
    (wanted,) = torch.autograd.grad(norms(x).square().sum(), x)
    result = torch.utils.checkpoint.checkpoint(norms, x, use_reentrant=reentrant)
    # Not autograd.grad, which the re-entrant kind refuses.
    backward(result.square().sum())
    assert torch.equal(there(x.grad), wanted)
