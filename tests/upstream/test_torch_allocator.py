"""Memory without values: what torch's own way gives, also where the short one is missing, another, or elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normforge.upstream import dynamo_guards
from normforge.upstream.dynamo_guards import INNER, Empty, allocator, contiguous_strides

SHAPES = ((), (5,), (1,), (3, 4), (1, 4), (4, 1), (2, 3, 4), (2, 1, 4, 5), (0, 4), (2, 0, 4))
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_as_asked(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = allocator(CPU)(shape, contiguous_strides(shape), dtype)
    assert (made.shape, made.stride(), made.dtype, made.device) == (shape, torch.empty(shape).stride(), dtype, CPU)


def public(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def raising(*_: object) -> torch.Tensor:
    raise RuntimeError("PyTorch compiled without support for the specified device.")


# What a release to come may have under the name, and whether it will do.
FOUND: dict[str, tuple[Any, bool]] = {
    "the same": (public, True),
    "none for this device": (raising, False),
    "one of other arguments": (lambda: pytest.fail("called"), False),
    "one without strides": (lambda size, stride, dtype: torch.empty(size, dtype=dtype), False),
    "one of fp32": (lambda size, stride, dtype: torch.empty_strided(size, stride), False),
    "one elsewhere": (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta"), False),
    "one that gives no tensor": (lambda size, stride, dtype: (size, stride, dtype), False),
}


@pytest.mark.parametrize(("inner", "will_do"), FOUND.values(), ids=FOUND)
def test_the_short_way_is_tried_before_it_is_trusted(
    inner: Any, will_do: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (usual(inner, monkeypatch) is inner) == will_do


def usual(inner: object, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> Empty:
    """What allocates on a GPU, on a machine that has some, and this function in torch."""
    monkeypatch.setattr(torch._C._dynamo.guards, INNER, inner)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(dynamo_guards, "_public", lambda device: public)
    return allocator.__wrapped__(CUDA)


def test_where_the_short_way_is_missing_the_public_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    usual(public, monkeypatch)
    monkeypatch.delattr(torch._C._dynamo.guards, INNER)
    assert allocator.__wrapped__(CUDA) is public
    monkeypatch.delattr(torch._C._dynamo, "guards")
    assert allocator.__wrapped__(CUDA) is public


def test_with_several_devices_the_current_one_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def inner(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(size)
        return public(size, stride, dtype)

    empty = usual(inner, monkeypatch, devices=2)
    asked.clear()
    for current in (0, 1, 0):
        monkeypatch.setattr(dynamo_guards, "current_device", lambda current=current: current)
        assert empty((current + 1, 4), (4, 1), torch.int8).shape == (current + 1, 4)
    assert asked == [(1, 4), (1, 4)]


@pytest.mark.gpu
def test_a_card_takes_the_short_way() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    empty = allocator(device)
    if torch.cuda.device_count() == 1:
        assert empty is getattr(torch._C._dynamo.guards, INNER)
    for size, dtype in (((3, 4096), torch.bfloat16), ((7,), torch.float32), ((0, 8), torch.int8)):
        made, expected = empty(size, contiguous_strides(size), dtype), torch.empty(size, dtype=dtype, device=device)
        assert (type(made), made.shape, made.stride()) == (torch.Tensor, expected.shape, expected.stride())
        assert (made.dtype, made.device) == (expected.dtype, expected.device)
        assert made.data_ptr() % 16 == 0
        assert not made.requires_grad
