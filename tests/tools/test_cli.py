"""The `normforge` command: its arguments, what it prints, and its exit status."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import normforge
from normforge.codegen import cli as generator
from normforge.tools import list_instances
from normforge.tools.cli import VERBS

from ..calling import command, printed, python
from ..thorough import THOROUGH
from .command_line import TABLE, status

SMALL = ["run", "-m", "3", "-n", "48"]


def normforge_command(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, where no GPU is to be seen and only `environment` speaks of Triton."""
    hidden: dict[str, str | None] = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    code = f"import runpy, sys; sys.argv[1:] = {argv!r}; runpy.run_module('normforge', run_name='__main__')"
    return python(code, **(hidden | environment))


def test_list_takes_globs(capsys: pytest.CaptureFixture[str]) -> None:
    every = normforge.instances()
    first, *_, last = every
    assert status("list", first.name, last.name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == [first.name, last.name]
    assert f"{first.first}..{first.last}" in lines[2]
    assert lines[-1] == f"2 of {len(every)} instances"


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(list_instances, "main", interrupt)
    assert status("list") == 130
    assert capsys.readouterr().err == "normforge list: interrupted\n"
    monkeypatch.setattr(generator, "render_folder", interrupt)
    assert status("generate", "--manifest", "instances.yaml", "--out", "nowhere") == 130
    assert capsys.readouterr().err == "normforge generate: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to stand for a full disk")
def test_a_list_onto_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normforge", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
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
def test_bash_completes(line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    assert status("completion", "bash") == 0
    words = line.split(" ")
    asked = f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}"
    script = f"{capsys.readouterr().out}\n{asked}\n_shtab_normforge\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    done = command("bash", "-c", script, cwd=tmp_path)
    assert expected <= set(done.stdout.split()), done.stderr
    if words[-1]:
        assert set(done.stdout.split()) == expected
