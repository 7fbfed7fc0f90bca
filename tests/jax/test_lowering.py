"""What programs for an NVIDIA GPU hold, lowered on a machine that has none, and where its kernels come from."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from normforge.errors import AotError, CompileError, DeviceError, FrozenError, JaxError, TargetError
from normforge.kernels.binaries import read
from normforge.tools import cli

from .settled import jax  # first, since it skips

import normforge.jax as norms  # isort: skip
from normforge.jax import launches
from normforge.selection import recording
from normforge.upstream import jaxlib_triton

from ..calling import printed
from ..thorough import THOROUGH

jnp = jax.numpy
ROOT = Path(__file__).resolve().parents[2]

OF_ROWS = ("--n", "1024", "--rows", "many", "--weight", "fp32")
MODES = ("ln_fwd_bf16", "ln_fwd_bf16_mv", "ln_bwd_bf16", "rms_fwd_bf16_addst_mv", "rms_bwd_bf16_addst")
X = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((1024,), jnp.float32)


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_folder", None)
    monkeypatch.setattr(launches, "_codes", {})
    for variable in ("NORMFORGE_FROZEN", "NORMFORGE_AOT"):
        monkeypatch.delenv(variable, raising=False)


def make(out: Path, *asked: str, framework: str = "jax", arch: str = "sm_90", ends: int = 0) -> Path:
    # By one thread: JAX has Python do other work while it collects garbage, and Python 3.11.7 parses in one at a time.
    assert cli.main(["aot", "--for", framework, "--arch", arch, "--out", str(out), "--jobs", "1", *asked]) == ends
    return out


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kernels that JAX launches, made once."""
    return make(tmp_path_factory.mktemp("aot") / "jax", *OF_ROWS, *MODES)


def loss(x: Any, weight: Any, bias: Any) -> Any:
    return jnp.sum(norms.layer_norm(x, weight, bias) ** 2)


def lowered(function: Any, *operands: Any, arch: str = "sm_90") -> str:
    with norms.lower_for(arch):
        text = jax.jit(lambda *o: function(*o)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert isinstance(text, str)
    return text


def calls(text: str) -> list[str]:
    """The kernels that a program launches, in order."""
    return re.findall(rf'custom_call @{jaxlib_triton.TARGET}\(.*?\bname = "(\w+)"', text)


@pytest.mark.compile
def test_a_program_of_a_folder_takes_neither_torch_nor_triton(folder: Path) -> None:
    """Forward and backward, from a process that can import neither, and serialised."""
    lines = printed(
        f"""
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # Importing either now fails.
import jax, jax.numpy as jnp
import normforge.jax as norms
from jax import export
norms.load_aot({str(folder)!r})
x = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16)
w = jax.ShapeDtypeStruct((1024,), jnp.float32)
loss = lambda x, w, b: jnp.sum(norms.layer_norm(x, w, b) ** 2)
with norms.lower_for("sm_90"):
    made = export.export(
        jax.jit(jax.grad(loss, (0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("{jaxlib_triton.TARGET}")],
    )(x, w, w)
print(made.mlir_module().count("{jaxlib_triton.TARGET}"), len(export.deserialize(made.serialize()).out_avals))
print(sorted(name for name in ("torch", "triton", "jinja2", "yaml") if sys.modules.get(name)))
""",
        JAX_PLATFORMS="cpu",
    ).splitlines()
    assert lines == ["3 3", "[]"]


@pytest.mark.compile
def test_launches_take_rows_that_adjoin_and_write_nothing_in_place(folder: Path) -> None:
    norms.load_aot(folder)
    text = lowered(jax.grad(loss, (0, 1, 2)), X, WEIGHT, WEIGHT)
    launches_of = [line for line in text.splitlines() if f"custom_call @{jaxlib_triton.TARGET}(" in line]
    assert len(launches_of) == 3
    for line in launches_of:
        assert "alias" not in line
        assert {*re.findall(r"dense<(.*?)>", line)} <= {"[2, 1, 0]", "[1, 0]", "0"}


@pytest.mark.compile
def test_the_message_has_the_folders_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX is the folder's, to the byte; it neither waits for a launch ahead nor has to run all at once."""
    told: list[bytes] = []
    made = jaxlib_triton.message

    def overheard(*about: Any) -> bytes:
        told.append(made(*about))
        return told[-1]

    norms.load_aot(folder)
    # The first call of a process tries a message out.
    lowered(norms.layer_norm, X, WEIGHT, WEIGHT)
    monkeypatch.setattr(jaxlib_triton, "message", overheard)
    lowered(jax.grad(loss, (0, 1, 2)), X, WEIGHT, WEIGHT)
    texts = [path.read_bytes() for path in folder.glob("*.ptx")]
    assert len(told) == 3
    for message in told:
        assert sum(text in zlib.decompress(message) for text in texts) == 1
    assert all(b"griddepcontrol" not in text for text in texts)
    for path in folder.glob("*-*.json"):
        about = json.loads(path.read_text())
        assert not about["launch_pdl"]
        assert not about["launch_cooperative_grid"]


@pytest.mark.compile
def test_what_a_folder_lacks_is_compiled_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms.load_aot(folder)
    assert calls(lowered(norms.rms_norm, X, WEIGHT))
    monkeypatch.setattr(launches, "_codes", {})
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    with pytest.raises(FrozenError, match=r"forbids compiling .*rms_fwd_bf16_\w+\(.* not in .*normforge aot --for jax"):
        lowered(norms.rms_norm, X, WEIGHT)
    monkeypatch.delenv("NORMFORGE_FROZEN")
    monkeypatch.setattr(launches, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match="Triton, which compiles it, is not installed; install it, or compile it"):
        lowered(norms.rms_norm, X, WEIGHT)


@pytest.mark.compile
def test_a_folder_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    norms.load_aot(make(tmp_path / "torch", *OF_ROWS, "ln_fwd_bf16", framework="torch"))
    # On sm_90 kernels wait for those ahead of them, but for JAX; so these are others, and compiled.
    assert calls(lowered(norms.layer_norm, X, WEIGHT, WEIGHT))
    norms.load_aot(folder)
    with pytest.raises(AotError, match="holds kernels for sm_90, and this GPU is sm_80; compile for it"):
        lowered(norms.layer_norm, X, WEIGHT, WEIGHT, arch="sm_80")
    damaged = make(tmp_path / "damaged", *OF_ROWS, "ln_fwd_bf16")
    for path in damaged.glob("*.ptx"):
        path.write_text("//" + path.read_text())
    norms.load_aot(damaged)
    with pytest.raises(AotError, match=r"\.ptx is damaged: it is not what index\.json says"):
        lowered(norms.layer_norm, X, WEIGHT, WEIGHT)


@pytest.mark.compile
def test_ptx_is_added_to_a_folder_that_has_none(tmp_path: Path) -> None:
    """Of an architecture whose kernels are the same for both."""
    norms.load_aot(make(tmp_path / "aot", *OF_ROWS, "ln_fwd_bf16", arch="sm_80", framework="torch"))
    with pytest.raises(AotError, match=r"without the PTX that JAX launches; compile it again: normforge aot --for jax"):
        lowered(norms.layer_norm, X, WEIGHT, WEIGHT, arch="sm_80")
    out = make(tmp_path / "aot", *OF_ROWS, "ln_fwd_bf16", arch="sm_80")
    assert all(row.ptx_sha256 for row in read(out).rows.values())
    norms.load_aot(out)
    assert calls(lowered(norms.layer_norm, X, WEIGHT, WEIGHT, arch="sm_80"))


@pytest.mark.compile
def test_ptx_is_nvidias(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make(tmp_path / "aot", "--n", "64", "ln_fwd_bf16", arch="gfx942", ends=2)
    assert "--for jax launches PTX, and gfx942 runs none" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_has_to_be_named() -> None:
    with pytest.raises(DeviceError, match=r"finds no NVIDIA GPU .* with normforge\.jax\.lower_for\('sm_90'\)"):
        jax.jit(norms.rms_norm).trace(X).lower(lowering_platforms=("cuda",))
    with pytest.raises(DeviceError, match="arch is 'gfx942', and JAX launches PTX"), norms.lower_for("gfx942"):
        pass
    with pytest.raises(TargetError, match="arch 'sm_9000' is no architecture"), norms.lower_for("sm_9000"):
        pass


@pytest.mark.parametrize("missing", ["TritonKernel", "create_scalar_parameter", "_cuda_triton"])
def test_another_jaxlib_is_refused_with_what_would_do(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.lib import gpu_triton

    monkeypatch.delattr(gpu_triton, missing)
    jaxlib_triton._library.cache_clear()
    try:
        with pytest.raises(
            JaxError, match=rf"jax {re.escape(jax.__version__)}.* is none that normforge knows \(Attr"
        ) as error:
            jaxlib_triton.message("k", "", 1, 0, 90, (1, 1, 1), ())
        assert jaxlib_triton.RANGE in str(error.value)
    finally:
        jaxlib_triton._library.cache_clear()


def test_the_range_is_what_is_installed() -> None:
    assert f'jax = ["jax{jaxlib_triton.RANGE};' in (ROOT / "pyproject.toml").read_text()


def test_without_jax_the_import_says_what_to_install() -> None:
    message = printed(
        """
import sys
sys.modules["jax"] = None
import normforge
try:
    import normforge.jax
except normforge.errors.JaxError as error:
    print(error)
"""
    )
    assert message.startswith(f"normforge.jax needs jax{jaxlib_triton.RANGE}, and ")
    assert "pip install 'normforge[jax]'" in message


@THOROUGH
def test_a_program_of_jaxs_imports_torch_when_it_needs_it() -> None:
    """And then has torch's operators."""
    code = """
import sys, jax, normforge.jax
print("torch" in sys.modules, "triton" in sys.modules)
normforge.layer_norm
import torch
print(torch.ops.normforge.rmsnorm2d_fwd)
"""
    assert printed(code).splitlines() == ["False False", "normforge.rmsnorm2d_fwd"]


def turned(q: Any, weight: Any, table: Any) -> Any:
    return sum(jnp.sum(each**2) for each in norms.qk_norm_rope(q, q[..., :2, :], weight, weight, table, table))


def latents(x: Any, weight: Any) -> Any:
    return sum(jnp.sum(each**2) for each in norms.rms_norms([(x, weight), (x[..., :512],)]))


Q, HEAD = jax.ShapeDtypeStruct((4, 64, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128,), jnp.bfloat16)


def images(x: Any, weight: Any) -> Any:
    return jnp.sum(norms.rms_norm(x[..., :100], weight, dim=1, activation="silu") ** 2)


PROGRAMS = {
    "rows": (jax.grad(loss, (0, 1, 2)), (X, WEIGHT, WEIGHT)),
    "latents": (jax.grad(latents, 1), (X, WEIGHT)),
    "channels": (jax.grad(images, (0, 1)), (X, WEIGHT)),
    "statistics": (lambda x: [norms.layer_statistics(x), norms.rms_statistics(x), norms.l2_norm(x)], (X,)),
    "heads": (jax.grad(turned, (0, 1)), (Q, HEAD, jax.ShapeDtypeStruct((64, 64), jnp.float32))),
}


@pytest.mark.compile
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_was_recorded_is_compiled_ahead(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels and no others: nothing is left to compile."""
    path, (gradient, operands) = tmp_path / "needed.yaml", PROGRAMS[program]
    with recording.record(path):
        before = lowered(gradient, *operands)
    launched = {key.portable for key, _ in launches._codes}
    assert len(launched) == 3
    out = make(tmp_path / "kernels", "--recorded", str(path))
    assert set(read(out).rows) == launched
    monkeypatch.setattr(launches, "_codes", {})
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    norms.load_aot(out)
    assert calls(lowered(gradient, *operands)) == calls(before)


@pytest.mark.compile
def test_kernels_of_channels_are_listed_by_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--shape", "*x1024x100/1", "--weight", "fp32", "crms_fwd_bf16_silu", "crms_bwd_bf16_silu")
    norms.load_aot(make(tmp_path / "aot", *asked))
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    gradient, operands = PROGRAMS["channels"]
    assert len(calls(lowered(gradient, *operands))) == 3


@pytest.mark.compile
def test_a_process_of_jax_alone_records(tmp_path: Path) -> None:
    path = tmp_path / "needed.yaml"
    program = """
import jax, jax.numpy as jnp
import normforge.jax as norms
x = jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16)
with norms.lower_for("sm_90"):
    jax.jit(norms.rms_norm).trace(x).lower(lowering_platforms=("cuda",))
"""
    printed(program, JAX_PLATFORMS="cpu", NORMFORGE_RECORD=str(path))
    (call,) = recording.read(path, path.read_bytes()).calls
    assert (call.mode, call.size, call.rows) == ("rms_fwd_bf16", {"n": 1024}, "few")
