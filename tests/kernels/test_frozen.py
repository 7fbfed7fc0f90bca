"""NORMFORGE_FROZEN=1: what Triton's cache holds is loaded, and nothing is compiled, however a kernel is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from normforge.ahead_of_time.compile_keys import CompileKey, compile_keys
from normforge.ahead_of_time.warmup import build
from normforge.errors import CacheError, FrozenError
from normforge.kernels.assembly import Recipe
from normforge.kernels.gpu import named_target
from normforge.kernels.launcher import Launcher
from normforge.kernels.obtain import compile_for, obtain
from normforge.upstream import triton_launcher

from ..calling import check, python
from ..stand_in_driver import driving
from ..thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("nothing_compiled", "nothing_known")

TARGET = named_target("sm_90")


def a_key() -> CompileKey:
    """A small kernel for an H200."""
    return compile_keys([64], ["rms_fwd_bf16"], arch="sm_90", rows=["few"])[0]


def binaries(cache: Path) -> list[Path]:
    return list(cache.rglob("*.cubin"))


def test_the_interpreter_compiles_nothing_that_could_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    check("layer", torch.randn(2, 64))


@pytest.mark.compile
def test_a_compilation_is_refused_by_name(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = a_key()
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    with driving(), pytest.raises(FrozenError) as raised:
        obtain(key.key, key.function, TARGET, 0)
    message = str(raised.value)
    assert f"forbids compiling {key.key} for sm_90, and Triton's cache does not hold it; " in message
    assert "compile it before with normforge.warmup, `normforge warmup` or `normforge aot` and N = 64" in message
    assert "unset NORMFORGE_FROZEN" in message
    assert not binaries(cold_cache)
    # And a refusal is not remembered, but what was obtained before.
    monkeypatch.delenv("NORMFORGE_FROZEN")
    with driving():
        warm = obtain(key.key, key.function, TARGET, 0)
        monkeypatch.setenv("NORMFORGE_FROZEN", "1")
        assert obtain(key.key, key.function, TARGET, 0) is warm
    assert len(binaries(cold_cache)) == 1


@pytest.mark.compile
def test_a_cache_that_cannot_be_written(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = a_key()
    # As on a read-only disk, for root too.
    cold_cache.touch()
    with driving(), pytest.raises(CacheError, match=r"Triton cannot write .* TRITON_CACHE_DIR and TMPDIR$"):
        obtain(key.key, key.function, TARGET, 0)
    with pytest.raises(CacheError, match="Triton cannot write"):
        build([key], TARGET, cold_cache.with_name("out"), jobs=1, progress=False)
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    with driving(), pytest.raises(FrozenError, match="forbids compiling"):
        obtain(key.key, key.function, TARGET, 0)


@pytest.mark.compile
def test_what_tritons_cache_holds_is_loaded(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = a_key()
    before = compile_for(key.key, key.function, TARGET)
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    # Triton compiles its driver too: a disk that is full then is no miss.
    full = Mock(side_effect=OSError("a full disk"))
    with patch("normforge.kernels.obtain._start_driver", full), pytest.raises(CacheError, match="a full disk"):
        obtain(key.key, key.function, TARGET, 0)
    # As a process that starts later would: of this one nothing is kept but the folder.
    with driving() as driver:
        obtain(key.key, key.function, TARGET, 0)
    assert driver.loaded == [(key.key.symbol, before.asm["cubin"], before.metadata.shared)]


@pytest.mark.compile
def test_a_cache_that_moves_leaves_kernels_behind_to_load(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor and vLLM set TRITON_CACHE_DIR in a process when they compile a model."""
    key = a_key()
    before = compile_for(key.key, key.function, TARGET)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cold_cache.with_name("inductor")))
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    assert compile_for(key.key, key.function, TARGET).asm["cubin"] == before.asm["cubin"]


@THOROUGH
@pytest.mark.compile
def test_a_kernel_has_one_hash_whatever_was_hashed_before_it() -> None:
    """Triton's own changes with that; its cache is looked through by it."""

    def hashed(step: int, launched: bool = False) -> list[str]:
        code = f"""
from normforge.upstream import triton_hashes
from normforge.ahead_of_time.compile_keys import compile_keys
for key in compile_keys([96, 4099, 131072], ["ln_*_bf16*", "rms_fwd_bf16"], arch="sm_90")[::{step}]:
    # As Triton's own launch asks for it.
    if {launched}:
        key.function.cache_key
    triton_hashes.settle(key.function)
    print(key.key.symbol, key.function.cache_key)
"""
        return sorted(set(python(code).stdout.splitlines()))

    forward = hashed(1)
    assert len(forward) > 10
    assert hashed(-1) == forward
    assert hashed(1, launched=True) == forward


@pytest.mark.compile
def test_a_cache_that_is_not_to_be_used_serves_nothing(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = a_key()
    compile_for(key.key, key.function, TARGET)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    with pytest.raises(FrozenError):
        compile_for(key.key, key.function, TARGET)


@pytest.mark.compile
@pytest.mark.parametrize(("mode", "n"), [("rms_fwd_bf16", 64), ("ln_bwd_bf16", 16384)])
def test_a_key_says_all_that_triton_makes_of_a_launch(mode: str, n: int, cold_cache: Path) -> None:
    """What is compiled from it is, but for the hash, what Triton's own launch compiles from the arguments."""
    for key in compile_keys([n], [mode], arch="sm_90", rows=["many"]):
        pointers = {"*bf16:16": torch.zeros(64, dtype=torch.bfloat16), "*fp32:16": torch.zeros(64)}
        stands_for = pointers | {"*i64:16": torch.zeros(8, dtype=torch.int64), "i32": 7, "fp32": 0.5}
        arguments = [stands_for[value] if isinstance(value, str) else value for _, value in key.key.arguments]
        with driving():
            theirs = key.function.warmup(*arguments, grid=(1,), **dict(key.key.options))
        ours = compile_for(key.key, key.function, TARGET)
        assert ours.asm["ptx"] == theirs.asm["ptx"]
        assert ours.metadata._replace(hash="") == theirs.metadata._replace(hash="")


@pytest.mark.compile
def test_the_public_launch_compiles_nothing_more(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton's inner launcher is another, kernels are launched with tensors, and are those of the key."""
    key = a_key()
    monkeypatch.setattr(triton_launcher, "bind", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    names = list(dict(key.key.arguments))
    types = {name: kind for name, kind in key.key.arguments if isinstance(kind, str) and not name.endswith("_stride")}
    integers = {name: 64 for name in names if name.endswith("_stride")}
    constants = {name: value for name, value in key.key.arguments if isinstance(value, int)}
    x, weight, y = torch.zeros(2, 64), torch.zeros(64), torch.zeros(2, 64)
    given: dict[str, Any] = {"x_ptr": x, "weight_ptr": weight, "y_ptr": y, "M": 2, "eps": 1e-5, "weight_offset": 0.0}
    with driving() as driver:
        recipe = Recipe(
            part=None,
            types=types,
            strides=integers,
            constants=constants,
            warps=1,
            options={},
            grid=lambda m, programs: (m, 1, 1),
        )
        launcher = Launcher(key.function, recipe, TARGET, torch.device("cuda", 0))
        assert launcher.key == key.key
        monkeypatch.setenv("NORMFORGE_FROZEN", "1")
        launcher.launch_tensors((2, 1, 1), tuple(given[name] for name in types))
    ((name, *grid, stream, function, _, _, _, _), arguments) = driver.launched[0][:10], driver.launched[0][10:]
    assert (name, grid, stream, function) == (key.key.symbol, [2, 1, 1], 1000, "a function")
    in_order = given | integers | constants
    assert all(ours is theirs for ours, theirs in zip(arguments, [in_order[name] for name in names], strict=True))
    assert len(binaries(cold_cache)) == 1
