"""What recordings hold, what is compiled from them for other GPUs, which are refused, and those of random calls."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import normforge
from normforge.ahead_of_time.compile_keys import recorded_keys_for
from normforge.calls import plan
from normforge.errors import AotError, ConflictError, FrozenError, RecordError
from normforge.kernels import binaries
from normforge.kernels.gpu import integer_type, named_target
from normforge.kernels.strides import RowStride, RowWalk, kind_of, row_alignment, strides_of_kind
from normforge.selection import dispatch
from normforge.selection.recording import read
from normforge.tools import cli
from proving.cold_warm.compare import changed, subjects
from proving.cold_warm.functions import one_of
from proving.cold_warm.outcome import Subject
from proving.cold_warm.session import Session, forgotten

from ..calling import table_at
from ..launching import SomeTable, launching_nothing
from ..thorough import COSTLY, first_of_each
from .calls import BF16, N, ones, rows

TABLES: dict[str, Any] = table_at(Path(__file__).with_name("recorded.yaml"))
STRIDES: dict[str, list[RowStride]] = {
    name: [RowWalk(*each) if isinstance(each, list) else each for each in alike]
    for name, alike in TABLES["alike"].items()
}


@pytest.mark.parametrize("alike", STRIDES.values(), ids=STRIDES)
def test_strides_are_told_by_what_compilations_depend_on(alike: list[RowStride]) -> None:
    """Alignment, 32 bits or 64 and how many there are: no more, so that recordings do not grow with batches."""

    def seen(stride: RowStride) -> tuple[object, ...]:
        types = stride.types("i32") if isinstance(stride, RowWalk) else integer_type(stride)
        return row_alignment(stride), types

    kinds = set()
    for stride in alike:
        kind = kind_of("ln_fwd_bf16", {"n": 4096}, 0, {"x": BF16, "y": BF16}, {"x_row_stride": stride}, ())
        kinds.add(kind)
        assert seen(strides_of_kind(kind, ["x_row_stride"])["x_row_stride"]) == seen(stride)
    assert len(kinds) == 1


def test_a_recording_says_nothing_of_m_but_its_class(tmp_path: Path) -> None:
    path = tmp_path / "needed.yaml"
    for m, heads in ((2, 2), (3, 4), (9, 3)):
        with normforge.record(path):
            packed = torch.zeros(m, heads * 2, N, dtype=BF16)
            normforge.rmsnorm2d_fwd(packed[:, :heads])
            normforge.rmsnorm2d_fwd(packed.flatten(0, 1))
    assert len(read(path, path.read_bytes()).calls) == 2


def test_a_call_that_is_refused_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a frozen server met can be compiled for the next one."""
    monkeypatch.setattr(plan, "Launcher", Mock(side_effect=FrozenError("refused")))
    path = tmp_path / "needed.yaml"
    with normforge.record(path), pytest.raises(FrozenError):
        normforge.rmsnorm2d_fwd(rows())
    monkeypatch.undo()
    assert len(normforge.recorded_keys(path, arch="sm_90")) == 1


def test_a_quantised_call_of_unaligned_rows_under_batch_invariance(tmp_path: Path) -> None:
    """The kernel is that of a family without some of the call's outputs, which a recording may not name."""
    path = tmp_path / "calls.yaml"
    with normforge.record(path), normforge.batch_invariant():
        normforge.quantised_layer_norm(torch.randn(2, 301), fquant="dynamic")
    (key,) = normforge.recorded_keys(path, arch="sm_90")
    assert key.key.symbol.startswith("ln_fwd_fp32_int8_dq_")


def test_classes_of_rows_that_were_not_met(tmp_path: Path) -> None:
    path = tmp_path / "needed.yaml"
    with normforge.record(path):
        normforge.rmsnorm2d_fwd(rows(), ones())
    assert [key.rows for key in normforge.recorded_keys(path, arch="sm_90")] == [("few",)]
    both = normforge.recorded_keys(path, arch="sm_90", rows=["few", "some", "many"])
    assert {key.key for key in both} == {key.key for key in normforge.compile_keys([N], ["rms_fwd_bf16"], arch="sm_90")}
    with pytest.raises(ConflictError, match="rows has 'all'; it takes some of few, some, many, most"):
        normforge.recorded_keys(path, arch="sm_90", rows=["all"])


def test_recordings_are_taken_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "0.yaml", tmp_path / "1.yaml"]
    for path, dtype in zip(files, (BF16, torch.float16), strict=True):
        with normforge.record(path):
            normforge.rmsnorm2d_fwd(rows(dtype=dtype))
            normforge.rmsnorm2d_fwd(rows(dtype=torch.float32))
    assert len(normforge.recorded_keys(files, arch="sm_90")) == 3
    assert cli.main(["warmup", "--list", "--arch", "sm_90", *[f"--recorded={path}" for path in files]]) == 0
    assert capsys.readouterr().out.endswith("\n3 compilations\n")


@pytest.mark.compile
def test_several_architectures_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "needed.yaml", tmp_path / "kernels"
    path.write_text(of_kind(dtypes={"x": "float32", "y": "float32"}))
    command = ["aot", "--recorded", str(path), "--out", str(out), "--arch", "sm_90", "--arch", "gfx942"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    for arch in ("sm_90", "gfx942"):
        (row,) = binaries.read(out / arch).rows.values()
        (key,) = normforge.recorded_keys(path, arch=arch)
        assert row.key == key.key.portable
        assert f"1 kernels for {arch} in {out / arch}: 1 compiled, 0 unchanged, 0 removed\n" in said
    with pytest.raises(AotError, match=r"no index\.json .*; name the folder in it that is for the GPU: gfx942, sm_90"):
        normforge.load_aot(out)
    with pytest.raises(SystemExit):
        cli.main([*command, "--multiprocessors", "3"])
    assert "--multiprocessors is of one GPU" in capsys.readouterr().err


OLD: str = TABLES["instances"]


def of_kind(**different: Any) -> str:
    """A recording of one kind of call, with other properties."""
    kind = json.dumps({"mode": "rms_fwd_fp32", "n": 64, "rows": ["few"]} | different)
    return f"{OLD}calls:\n  - {kind}\n"


DAMAGED = {
    "a manifest": (OLD.partition("DIR\n")[2], "is no recording .*; record a program: NORMFORGE_RECORD=FILE"),
    **{name: (OLD + behind, message) for name, (behind, message) in TABLES["damaged"].items()},
    **{name: (of_kind(**different), message) for name, (different, message) in TABLES["of a kind"].items()},
}


@pytest.mark.parametrize(("text", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_tells_no_calls_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "needed.yaml"
    path.write_text(text)
    with pytest.raises(RecordError, match=message) as raised:
        normforge.recorded_keys(path, arch="sm_90")
    assert str(path) in str(raised.value) or "is no kind of call" in str(raised.value)
    assert cli.main(["warmup", "--list", "--arch", "sm_90", "--recorded", str(path)]) == 2
    assert str(raised.value) in capsys.readouterr().err


def test_warmup_takes_recordings_alone() -> None:
    with pytest.raises(ConflictError, match="n was passed beside recorded, and recordings say what calls bring"):
        normforge.warmup([64], recorded="needed.yaml")
    with pytest.raises(ConflictError, match="weight_dtypes was passed beside recorded"):
        normforge.warmup(recorded="needed.yaml", weight_dtypes=[None])


FAMILIES = ("functional", "forward", "backward", "modulated", "gated", "quantised", "group", "heads", "several")
# Rows that start anywhere are among these sizes, and rows for every pipeline and of every class.
SIZES = {
    "n": one_of(*(16, 32, 64) * 2, 33, 100, 1024, 2053, 4096, 5137, 9001, 17000),
    "lead": one_of(*((3,), (2, 9), (2, 3, 2)) * 2, (30, 11), (260,), ()),
}
CALLS = 40


CASES = first_of_each(
    [(arch, family) for arch in ("sm_90", "gfx942", "sm_80", "sm_100") for family in FAMILIES],
    lambda case: case[1],
    "-".join,
)


@COSTLY
@pytest.mark.usefixtures("random_calls")
@pytest.mark.parametrize("case", CASES)
def test_a_recording_comes_to_what_random_calls_launch(case: tuple[str, str], tmp_path: Path) -> None:
    arch, family = case
    random, target, session = Random(f"{arch} {family}"), named_target(arch), Session(by_address=False)
    among = [subject._replace(draws={**subject.draws, **SIZES}) for subject in subjects(family)]
    current = {subject.name: subject.defaults for subject in among}
    launched = 0
    for number in range(CALLS):
        subject: Subject = random.choice(among)
        call = changed(random, subject, current[subject.name])
        path, table = tmp_path / f"{number}.yaml", dispatch.loaded()
        with dispatch.using(SomeTable(table) if number % 4 == 3 else table), forgotten():
            with launching_nothing(target) as met, normforge.record(path):
                subject.outcome(session, call, False)
            found = {key.key.portable for key in recorded_keys_for(path, target, None)} if met else set()
        assert found == {key.portable for key in met}, (call, path.read_text())
        # Calls that are refused, or of tensors without memory, launch nothing.
        current[subject.name] = call if met else current[subject.name]
        launched += len(met)
    assert launched >= CALLS / 4
