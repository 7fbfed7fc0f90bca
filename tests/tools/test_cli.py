"""The `normforge` command: its arguments, what it prints, and its exit status."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import normforge
from normforge.codegen import cli as generator
from normforge.tools import list_instances
from normforge.tools.cli import VERBS

from ..calling import printed
from ..thorough import THOROUGH
from .command_line import status

SMALL = ["run", "-m", "3", "-n", "48"]


def command(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, where no GPU is to be seen and only `environment` speaks of Triton."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "normforge", *argv],
        env=inherited | hidden | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_and_the_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("-h") == 0
    assert capsys.readouterr().out.startswith("usage: normforge")
    assert status("--version") == 0
    assert capsys.readouterr().out == f"{normforge.__version__}\n"


def test_list_prints_every_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("list") == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if " " in line}
    assert {entry.name for entry in normforge.instances()} <= listed


def test_list_takes_globs(capsys: pytest.CaptureFixture[str]) -> None:
    every = normforge.instances()
    first, *_, last = every
    assert status("list", first.name, last.name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == [first.name, last.name]
    assert f"{first.first}..{first.last}" in lines[2]
    assert lines[-1] == f"2 of {len(every)} instances"


@pytest.mark.parametrize("arch", ["foo", "sm90", "h200", "", "sm_90\n"])
def test_list_takes_no_architecture_that_is_none(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = normforge.instances()[0].name
    assert status("list", "--arch", arch, name) == 2
    assert "is no architecture; write one like sm_90 or gfx942, or leave --arch out" in capsys.readouterr().err
    for known in ("sm_90", "sm_80", "gfx942", "any"):
        assert status("list", "--arch", known, name) == 0


TWICE = {
    "out": ["generate", "--out", "a", "--out", "b"],
    "arch": ["list", "--arch", "sm_90", "--arch", "sm_80"],
    "m": ["run", "-m", "3328", "-m=3"],
    # The first is the default, and none the less given.
    "v": ["run", "-v=1", "-v", "0"],
}


@pytest.mark.parametrize(("name", "argv"), TWICE.items(), ids=TWICE)
def test_an_option_given_twice_is_refused(name: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*argv) == 2
    dashes = "-" if argv[0] == "run" else "--"
    assert capsys.readouterr().err.endswith(f"error: argument {dashes}{name}: it is given twice; keep one of the two\n")


def interrupt(*_: object, **__: object) -> int:
    raise KeyboardInterrupt


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(list_instances, "main", interrupt)
    assert status("list") == 130
    assert capsys.readouterr().err == "normforge list: interrupted\n"
    monkeypatch.setattr(generator, "render_folder", interrupt)
    assert status("generate", "--manifest", "instances.yaml", "--out", "nowhere") == 130
    assert capsys.readouterr().err == "normforge generate: interrupted\n"


@THOROUGH
def test_ctrl_c_waits_for_no_compilation(tmp_path: Path) -> None:
    """Each takes seconds; here a stand-in for a compilation takes a minute."""
    code = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # Whatever started the tests may ignore it.
sys.argv = ["normforge", "aot", "--arch", "gfx942", "--n", "64", "--jobs", "2", "--out", "kernels", "ln_fwd_bf16"]
from normforge.ahead_of_time import build
def slow(*_):
    sys.stdout.write("compiling\\n")  # In one piece: print() writes the end of a line by itself, and threads mix.
    sys.stdout.flush()
    time.sleep(60)
build._compile = slow
from normforge.tools.cli import main
sys.exit(main())
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["compiling\n"] * 2
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
        assert time.monotonic() - start < 5
    assert process.returncode == 130
    assert complaint.endswith("normforge aot: interrupted\n")
    assert "Traceback" not in complaint
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["index.json"]
    assert json.loads((tmp_path / "kernels" / "index.json").read_text())["kernels"] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to stand for a full disk")
def test_a_list_onto_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normforge", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "normforge list: error: [Errno 28] No space left on device; mend that and run again\n"


def test_list_into_a_reader_that_stops_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "normforge", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (0, b"")


@THOROUGH
@pytest.mark.parametrize(
    ("environment", "ended", "said"),
    [({}, 0, "Triton's CPU interpreter"), ({"TRITON_INTERPRET": "0"}, 2, "INTERPRET=0")],
)
def test_without_a_gpu_the_interpreter_is_turned_on_unless_it_is_forbidden(
    environment: dict[str, str], ended: int, said: str
) -> None:
    done = command(*SMALL, **environment)
    assert done.returncode == ended, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "GB/s" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("verb", [["run", "-m=64", "-n=4096", "-json"], ["demo"]], ids=["run", "demo"])
def test_on_a_gpu_kernels_are_compiled_and_timed(verb: list[str]) -> None:
    done = command(*verb, CUDA_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert "interpreter" not in done.stdout + done.stderr
    if verb[0] == "run":
        assert json.loads(done.stdout)["gb_per_s"] > 0
    else:
        assert "GB/s" in done.stdout


REFUSED = [
    *([verb, "--nonsense"] for verb in VERBS),
    ["run", "-norm", "group", "-groups", "7"],
    ["warmup"],
    ["warmup", "--n", "64", "--row-stride", "weight=80"],
    ["aot", "--n", "64", "--out", "kernels"],
    ["aot", "--n", "64", "--arch", "sm_90"],
    ["aot", "--n", "64", "--arch", "sm_90", "--out", "kernels", "--weight", "fp61"],
    ["list", "nonsense"],
    ["hub", "file"],
    ["backendbench", "file"],
]
# Arguments that the parser takes, and a table, a file or an architecture refuses.
AOT = ["aot", "--out", "kernels", "--arch"]
REFUSED_LATER = [
    [*AOT, "sm_9000000000", "--n", "64"],
    [*AOT, "sm_90", "--n", "64", "--multiprocessors", "0"],
    [*AOT, "gfx942", "--n", "64", "--for", "jax"],
    [*AOT, "sm_90", "--n", "64", "nonsense"],
    [*AOT, "sm_90", "--n", "64", "--manifest", "no.yaml"],
    [*AOT, "sm_90", "--n", "64", "--instances", "none"],
    [*AOT, "sm_90", "--recorded", "no.yaml"],
    ["warmup", "--list", "--arch", "nonsense", "--n", "64"],
    ["warmup", "--n", "64", "gn_fwd_bf16"],
    ["warmup", "--shape", "2x3/7"],
    ["warmup", "--n", "64"],
    ["tune"],
    ["merge", "no.yaml", "--out", "merged.yaml"],
    ["generate", "--manifest", "no.yaml"],
    ["aot", "--out", "file", "--arch", "sm_90", "--n", "64"],
]


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
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert expected <= set(done.stdout.split()), done.stderr
    if words[-1]:
        assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("completion", shell) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)


def test_what_is_near_no_name_has_no_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("list", "nonsense*") == 2
    assert capsys.readouterr().err.endswith(
        "no instance matches 'nonsense*'; normforge list without a glob prints every name\n"
    )
