"""What importing and calling normforge costs, what it needs, and what its doors say about themselves."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import normforge
from normforge import reference

from .calling import command, printed, python
from .test_house import MOST_MODULES
from .thorough import THOROUGH

# What only a call (triton), a compiled call (torch's), the generator (jinja2, yaml) or a miss (platformdirs) needs.
LATE = ("triton", "torch._dynamo", "torch._inductor", "jinja2", "yaml", "platformdirs", "tabulate")
OURS_LATE = ("normforge.tools", "normforge.ahead_of_time", "normforge.patching", "normforge.selection.recording")


def test_import_and_listing_bring_little_and_nothing_that_only_a_call_needs() -> None:
    """And until a call, the interpreter may be turned on."""
    # Should torch import one of these itself, that is not ours.
    code = """
import json, os, sys, torch
brought = set(sys.modules)
import normforge
ours = [name for name in sys.modules if name.partition(".")[0] == "normforge"]
normforge.instances()
normforge.which(torch.empty(2, 64))
brought = sorted({*sys.modules} - brought)
os.environ["TRITON_INTERPRET"] = "1"
y = normforge.layernorm2d_fwd(torch.tensor([1.0, 3.0]), eps=0).y.tolist()
print(json.dumps([ours, brought, y]))
"""
    ours, brought, y = json.loads(printed(code, TRITON_INTERPRET=None))
    assert y == pytest.approx([-1, 1])
    assert "normforge.calls.native" in ours
    assert [name for name in ours if name.startswith(OURS_LATE)] == []
    assert len(ours) <= MOST_MODULES
    assert {*brought}.isdisjoint(LATE)


@THOROUGH
@pytest.mark.parametrize("first", ["normforge", "torch.distributed.tensor"])
def test_import_leaves_dtensor_to_others_and_operators_have_rules_when_it_is_there(first: str) -> None:
    """It takes a second, and whichever is imported first, nothing waits for the other afterwards."""
    code = f"""
import sys, torch
import {first}
early = "torch.distributed.tensor" in sys.modules
import normforge
import torch.distributed.tensor.parallel
from torch._library.simple_registry import singleton
rules = [singleton.find(f"normforge::{{name}}").torch_dispatch_rules.find(torch.distributed.tensor.DTensor)
         for name in ("layernorm2d_fwd", "rmsnorm2d_fwd_into", "rmsnorm2d_bwd")]
print(early, all(rules), "torch.distributed.tensor" in [getattr(each, "_name", "") for each in sys.meta_path])
"""
    assert printed(code).split() == [str(first != "normforge"), "True", "False"]


@pytest.mark.parametrize("how", ["module", "script"])
def test_the_command_starts_without_torch(how: str, tmp_path: Path) -> None:
    script = tmp_path / "normforge"
    script.write_text("import sys\nfrom normforge.tools.cli import main\nsys.exit(main())\n")
    started = ["-m", "normforge"] if how == "module" else [str(script)]
    process = command(sys.executable, "-X", "importtime", *started, "generate", "--list")
    assert process.returncode == 0
    brought = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "normforge.tools.cli" in brought
    assert not {"torch", "triton"} & brought


@THOROUGH
@pytest.mark.parametrize("module", ["theirs", "theirs.normforge"])
def test_another_program_has_the_operators_though_it_is_started_as_a_module(module: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import normforge\n")
    for name in ("__main__", "normforge"):
        (tmp_path / "theirs" / f"{name}.py").write_text("import torch; print(torch.ops.normforge.rmsnorm2d_fwd)\n")
    process = command(sys.executable, "-m", module, cwd=tmp_path)
    assert process.stdout.strip() == "normforge.rmsnorm2d_fwd", process.stderr


def test_names_are_where_type_checkers_find_them() -> None:
    assert normforge.layer_norm is importlib.import_module("normforge.families.plain_functions").layer_norm
    assert normforge.reference is reference
    with pytest.raises(AttributeError, match="'normforge' has no attribute 'layernorm'"):
        _ = normforge.layernorm  # type: ignore[attr-defined]  # that there is none is the point


# JAX needs Python 3.11 or newer.
DOORS = ["", ".errors", ".parallel", ".reference", *([".jax"] if find_spec("jax") else [])]


@pytest.mark.parametrize("name", DOORS)
def test_public_names_are_in_sight_and_no_others(name: str) -> None:
    module = importlib.import_module(f"normforge{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_every_error_is_in_sight() -> None:
    errors = {name for name, value in vars(normforge.errors).items() if isinstance(value, type)}
    assert errors == set(normforge.errors.__all__)


@THOROUGH
def test_a_call_and_a_list_of_kernels_need_no_generator() -> None:
    code = """
import sys, torch
for name in ("jinja2", "yaml", "platformdirs"):
    sys.modules[name] = None  # Importing it now fails.
import normforge
x = torch.randn(2, 64)
assert torch.allclose(normforge.layernorm2d_fwd(x).y, torch.nn.functional.layer_norm(x, (64,)), atol=1e-5)
try:
    normforge.layernorm2d_fwd(x, x_bias=x[0])
except normforge.errors.MissingInstanceError:
    print("strict", len(normforge.compile_keys([64], ["ln_fwd_bf16"], arch="sm_90")))
"""
    assert printed(code, NORMFORGE_ON_MISS="error") == "strict 3"


@THOROUGH
def test_import_adds_little_to_torchs(tmp_path: Path) -> None:
    """Of a core's time, at one of 20 tries: waiting for a core is not import's, and what else runs slows any one.

    The first of them compiles all files to bytecode, as the first import after an installation does, and the others
    find that. Nor is a collection of garbage import's. It takes another 0.1 s, looks at what torch made, and comes when
    enough was made.
    """
    code = """
import gc, time, torch
gc.disable()
start = time.process_time()
import normforge
print(time.process_time() - start)
"""
    bytecode: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert any(float(printed(code, **bytecode)) < 0.15 for _ in range(20))


@pytest.mark.parametrize("value", [None, *(pytest.param(value, marks=THOROUGH) for value in ("", "0"))])
def test_a_cpu_tensor_without_the_interpreter(value: str | None) -> None:
    code = """
import torch, normforge
try:
    normforge.layernorm2d_fwd(torch.randn(2, 64))
except normforge.errors.DeviceError as error:
    print(error)
print(normforge.which(torch.randn(2, 64)))
"""
    message, name = printed(code, TRITON_INTERPRET=value).splitlines()
    assert message.startswith("x is on cpu and generated kernels run on a GPU; move the tensors to one, or set ")
    assert "set TRITON_INTERPRET=1 before the program starts" in message
    assert name == "ln_fwd_fp32_n128"


@THOROUGH
def test_the_interpreter_turned_on_too_late() -> None:
    code = """
import os, torch, triton, normforge
os.environ["TRITON_INTERPRET"] = "1"
normforge.layernorm2d_fwd(torch.randn(2, 64))
"""
    process = python(code, TRITON_INTERPRET=None)
    assert process.returncode != 0
    assert "DeviceError: TRITON_INTERPRET=1 was set after triton was imported" in process.stderr


@pytest.mark.parametrize("function", ["layernorm2d_fwd", "rmsnorm2d_fwd"])
def test_the_oracle_takes_what_the_call_takes(function: str) -> None:
    """The same arguments with the same defaults, but for where outputs go."""
    ours, theirs = (dict(inspect.signature(getattr(module, function)).parameters) for module in (normforge, reference))
    # The options that both oracles hand on.
    assert theirs.pop("options").kind is inspect.Parameter.VAR_KEYWORD
    shared = inspect.signature(reference.norms._forward).parameters
    theirs |= {name: each for name, each in shared.items() if each.default is not each.empty}
    assert theirs.pop("dtype").default == torch.float64
    # Another norm that keeps the mean, which calls give by the function's name.
    theirs.pop("norm", None)
    # Of a part of a call's rows; and what is drawn it takes as it was drawn.
    assert theirs.pop("first_row").default == 0
    assert theirs["dropout_rng"].default is None
    theirs["dropout_rng"] = ours["dropout_rng"]
    assert {name: parameter for name, parameter in ours.items() if name not in ("out", "residual_out")} == theirs
