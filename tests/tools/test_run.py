"""`normforge VERB`: what `run` and `demo` take, print and find wrong, and what they and other verbs refuse."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

import normforge
from normforge.calls.outputs import LayerNormOutput
from normforge.codegen import cli as generator
from normforge.codegen.model import Mode
from normforge.codegen.values import Norm
from normforge.tools import checked_run, group_run, list_instances
from normforge.tools.cli import VERBS, main
from normforge.tools.measured_run import Run
from normforge.tools.problem import Problem, Strides
from normforge.tools.run import PREPARE
from normforge.tools.run_options import parse

from ..calling import Done, Outcome, command, outcome_of, printed, python, there
from ..thorough import THOROUGH

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("run.yaml").read_text())

SMALL = ("run", "-m=3", "-n=48")


def ended(*argv: str) -> Outcome:
    """What a command line came to."""
    return outcome_of(main, argv)


# From what a call returns, and what `out` and `residual_out` held before.
Spoil = Callable[..., LayerNormOutput]


@pytest.fixture
def replace_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Put another kernel call in LayerNorm's place; the reference stays."""

    def replace(spoil: Spoil) -> None:
        def forward(*args: Any, out: torch.Tensor, residual_out: torch.Tensor | None = None, **keywords: Any) -> Any:
            before = out.clone(), None if residual_out is None else residual_out.clone()
            return spoil(normforge.layernorm2d_fwd(*args, out=out, residual_out=residual_out, **keywords), *before)

        monkeypatch.setitem(checked_run._FORWARD, Norm.LAYER, (forward, normforge.reference.layernorm2d_fwd))

    return replace


def test_the_defaults_are_those_of_ck_tiles_example() -> None:
    request = parse([], "run")
    assert request.problem == Problem(3328, 4096, Mode.from_name("ln_fwd_fp16"), eps=1e-5, strides=Strides.all(4096))
    assert (request.validate, request.print_names, request.warmup, request.repeat) == (True, True, 5, 20)
    assert not request.json


def test_an_equals_sign_and_a_space_mean_the_same() -> None:
    options = {"m": "10", "n": "1024", "prec_o": "int8", "fquant": "1", "stride": "-1", "e": "1e-6", "norm": "rms"}
    spaced = [word for name, value in options.items() for word in (f"-{name}", value)]
    joined = [f"-{name}={value}" for name, value in options.items()]
    assert parse(spaced, "run") == parse(joined, "run")


def lines(what: str) -> list[tuple[str, list[str]]]:
    """Return the command lines of a table, and what is expected of each."""
    return [(f"{first} {others}", expected) for first, rows in TABLE[what].items() for others, *expected in rows]


STRIDES = {"x_stride": "x", "xr_stride": "residual", "y_stride": "y", "yr_stride": "residual_out"}


@pytest.mark.parametrize(("argv", "instance", "checked"), [(argv, *expected) for argv, expected in lines("runs")])
def test_a_run_agrees_with_the_reference(argv: str, instance: str, checked: str) -> None:
    done = ended("run", "-json", *argv.split())
    assert done.status == 0
    found = json.loads(done.out)
    assert found["instance"] == instance
    assert list(found["errors"]) == checked.split()
    assert (found["valid"], found["interpreted"], found["gb_per_s"]) == (True, True, None)
    said = dict(word.lstrip("-").split("=") for word in argv.split())
    taken = found["arguments"] | {
        name: found["arguments"]["strides"][of] for name, of in STRIDES.items() if name in said
    }
    for name in ("group_size", "scale_layout", "scale_format", "scale_ub", *STRIDES):
        assert name not in said or str(taken[name]) == said[name]


VERBLESS = [("bench", ["no verb 'bench'", ", ".join(VERBS)]), ("", ["a verb is needed", ", ".join(VERBS)])]


@pytest.mark.parametrize(("argv", "said"), [*lines("refused"), *VERBLESS])
def test_a_request_that_cannot_be_carried_out_says_why(argv: str, said: list[str]) -> None:
    done = ended(*argv.split())
    assert (done.status, done.out) == (2, "")
    assert [fragment for fragment in said if fragment not in " ".join(done.err.split())] == []


def test_ck_tiles_other_spellings(tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    argv = (*SMALL, "-fquant=1", "-prec_sx=bf16", f"-jsonfile={records}")
    printed = "".join(ended(*argv, json_option).out for json_option in ("-json=1", "-json"))
    assert json.loads(printed.splitlines()[0])["arguments"]["prec_sm"] == "bf16"
    # A record is added to those that are there.
    assert records.read_text() == printed
    assert ended(*SMALL, "-json=0", "-jsonfile", str(records)).out.startswith("problem")
    assert [json.loads(line)["valid"] for line in records.read_text().splitlines()] == [True] * 3


@pytest.mark.parametrize("path", [".", "no/such/folder/records.json", "/dev/null/records.json"])
def test_a_record_that_cannot_be_written_is_refused_first(path: str) -> None:
    done = ended(*SMALL, "-jsonfile", path)
    assert (done.status, done.out) == (2, "")
    assert f"-jsonfile {path} cannot be written; name a file" in done.err


def test_without_validation_nothing_is_claimed() -> None:
    done = ended(*SMALL, "-v=0", "-kname=0")
    assert done.status == 0
    assert "not checked" in done.out
    assert not [each for each in ("error", "ln_fwd") if each in done.out]


def test_a_mismatch_exits_1_and_names_the_output(replace_forward: Callable[[Spoil], None]) -> None:
    replace_forward(lambda result, *_: result._replace(rstd=there(result.rstd) * 1.1))
    said, record = (ended(*SMALL, "-save_mv=1", *options) for options in ([], ["-json"]))
    assert said.status == record.status == 1
    assert "no: rstd differ from the reference" in said.out
    assert json.loads(record.out)["valid"] is False


@pytest.mark.parametrize("argv", ["", "-prec_o fp32", "-fquant 2", "-fquant 2 -prec_o fp8", "-fadd 1"])
def test_an_output_left_unwritten_is_a_mismatch(argv: str, replace_forward: Callable[[Spoil], None]) -> None:
    """One output a time is left alone: the sum where there is one."""
    replace_forward(
        lambda result, y, total: result._replace(**({"y": y} if total is None else {"residual_out": total}))
    )
    assert ended(*SMALL, *argv.split()).status == 1


def test_an_element_left_unwritten_is_a_mismatch_where_it_would_be_zero(
    replace_forward: Callable[[Spoil], None],
) -> None:
    def skips_zeros(result: LayerNormOutput, y: torch.Tensor, _: None) -> LayerNormOutput:
        assert (result.y == 0).any()
        return result._replace(y=torch.where(result.y == 0, y, result.y))

    replace_forward(skips_zeros)
    assert ended("run", "-m", "16", "-n", "64", "-fquant", "2").status == 1


def prepared(argv: str) -> Run[Any]:
    problem = parse(argv.split(), "run").problem
    return PREPARE[type(problem)](problem, torch.device("cpu"))


def flip(tensor: torch.Tensor) -> None:
    """Change the last number of a tensor by much; a second flip changes it back."""
    last = tensor[(-1,) * tensor.dim()].reshape(1).view(torch.uint8)
    last[-1] ^= 0x40


@pytest.mark.parametrize("argv", TABLE["spoilt"])
def test_one_wrong_number_of_any_output_is_found(argv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a tensor, where the reference takes rows and samples by turns."""
    for module in (checked_run, group_run):
        monkeypatch.setattr(module, "REFERENCE_ELEMENTS", 1)
    run = prepared(argv)
    outputs = run.call()
    names = {finding.name for finding in run.validate(outputs)}
    assert all(finding.ok for finding in run.validate(outputs))
    found: set[str] = set()
    for tensor in (output for output in outputs if output is not None):
        flip(tensor)
        wrong = {finding.name for finding in run.validate(outputs) if not finding.ok}
        assert wrong
        found |= wrong
        flip(tensor)
    assert found == names


@pytest.mark.parametrize(("argv", "moved"), TABLE["moved"].items())
def test_the_rate_counts_every_tensor_once(argv: str, moved: str) -> None:
    run = prepared(argv)
    assert run.moved(run.call()) == eval(moved)


def test_demo_agrees_with_the_reference_and_fails_with_its_kernels(replace_forward: Callable[[Spoil], None]) -> None:
    done = ended("demo")
    assert done.status == 0
    assert "10 of 10 agree" in done.out
    assert "GB/s" not in done.out
    replace_forward(lambda result, *_: result._replace(y=result.y + 1))
    done = ended("demo")
    assert done.status == 1
    assert "FAIL: y" in done.out


def normforge_command(*argv: str, **environment: str) -> Done:
    """A command line in a process of its own, where no GPU is to be seen and only `environment` speaks of Triton."""
    hidden: dict[str, str | None] = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    code = f"import runpy, sys; sys.argv[1:] = {argv!r}; runpy.run_module('normforge', run_name='__main__')"
    return python(code, **(hidden | environment))


def test_list_takes_globs() -> None:
    every = normforge.instances()
    first, *_, last = every
    lines = ended("list", first.name, last.name).out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == [first.name, last.name]
    assert f"{first.first}..{first.last}" in lines[2]
    assert lines[-1] == f"2 of {len(every)} instances"


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(list_instances, "main", interrupt)
    monkeypatch.setattr(generator, "render_folder", interrupt)
    for argv in (["list"], ["generate", "--manifest", "instances.yaml", "--out", "nowhere"]):
        assert ended(*argv) == (130, "", f"normforge {argv[0]}: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to stand for a full disk")
def test_a_list_onto_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = command(sys.executable, "-m", "normforge", "list", out=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "normforge list: error: [Errno 28] No space left on device; mend that and run again\n"


@THOROUGH
@pytest.mark.parametrize(
    ("environment", "ended", "said"),
    [({}, 0, "Triton's CPU interpreter"), ({"TRITON_INTERPRET": "0"}, 2, "INTERPRET=0")],
)
def test_without_a_gpu_the_interpreter_is_turned_on_unless_it_is_forbidden(
    environment: dict[str, str], ended: int, said: str
) -> None:
    done = normforge_command(*SMALL, **environment)
    assert done.returncode == ended, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "GB/s" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("verb", [["run", "-m=64", "-n=4096", "-json"], ["demo"]], ids=["run", "demo"])
def test_on_a_gpu_kernels_are_compiled_and_timed(verb: list[str]) -> None:
    done = normforge_command(*verb, CUDA_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert "interpreter" not in done.stdout + done.stderr
    if verb[0] == "run":
        assert json.loads(done.stdout)["gb_per_s"] > 0
    else:
        assert "GB/s" in done.stdout


REFUSED = [*([verb, "--nonsense"] for verb in VERBS), *(line.split() for line in TABLE["unread"])]
REFUSED_LATER = [line.split() for line in TABLE["refused later"]]


# Torch takes from 3 seconds to half a minute, and the others tenths of a second.
SLOW = ("torch", "triton", "numpy", "matplotlib", "sympy")
ANSWERED = [*([verb, "-h"] for verb in VERBS), *REFUSED, *REFUSED_LATER]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return status and text of each command of `ANSWERED`, run in one process that can import nothing slow."""
    code = f"""
import contextlib, io, os, pathlib, sys
sys.modules |= dict.fromkeys({SLOW!r})  # Importing them now fails.
sys.argv = ["normforge"]
os.chdir({str(tmp_path_factory.mktemp("answers"))!r})
pathlib.Path("file").touch()
from normforge.tools import cli, driver
driver.is_missing = lambda: True
found = {{}}
for argv in {ANSWERED!r}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = cli.main(argv)
        except SystemExit as stop:
            status = stop.code
    found[str(argv)] = status, said.getvalue()
print(found)
"""
    found: dict[str, tuple[int, str]] = ast.literal_eval(printed(code, TRITON_INTERPRET=None))
    return found


@pytest.mark.parametrize("argv", ANSWERED, ids=str)
def test_help_and_refusals_import_nothing_slow(argv: list[str], answers: dict[str, tuple[int, str]]) -> None:
    status, said = answers[str(argv)]
    assert status == (0 if "-h" in argv else 2), said
    assert (f"normforge {argv[0]}: error: " if argv in REFUSED_LATER else f"usage: normforge {argv[0]}") in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("normforge ", set(VERBS)),
        ("normforge wa", {"warmup"}),
        ("normforge run -prec_i b", {"bf16"}),
        ("normforge tune --res", {"--resume"}),
        ("normforge generate --manifest mi", {"mine.yaml"}),
    ],
)
def test_bash_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    words = line.split(" ")
    asked = f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}"
    script = f"{ended('completion', 'bash').out}\n{asked}\n_shtab_normforge\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    done = command("bash", "-c", script, cwd=tmp_path)
    assert expected <= set(done.stdout.split()), done.stderr
    if words[-1]:
        assert set(done.stdout.split()) == expected
