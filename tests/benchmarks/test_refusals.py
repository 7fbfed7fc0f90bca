"""Each command refuses what cannot be done, by status 2 and a line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import cli, profile
from benchmarks.errors import UsageError
from normforge.tools.machine import Machine

SHARES = ("0/4", "5/4", "2", "1/0", "a/b", "-1/2", "1/2/3", "")
REFUSED = [
    *((["beside", "old", "new", f"--within={bound}"], f"{bound!r} is no bound") for bound in ("-0.1", "nan", "3%")),
    (["beside", "old", "new", "--within=inf"], "'inf' is no bound; give a share of the old time, such as 0.03 for 3 %"),
    *((["parts", "--seconds", s], f"{s!r} is no time; give seconds, such as 20") for s in ("soon", "-1", "inf")),
    *(
        (["run", f"--share={share}", "--out", "nowhere"], f"{share!r} is no share; give I/K with I from 1 to K")
        for share in SHARES
    ),
    (["run", "--share", "1/2", "--only", "nothing"], "--share needs --out"),
    (["list", "--suite", "forward", "--seed", "9"], "--seed 9 draws no cell of --suite forward; leave it out, or add"),
    (["models", "--models", "nobody", "--out", "nowhere"], "error: --models nobody names nothing; there are "),
    (["models", "--variants", "nobody", "--out", "nowhere"], "error: --variants nobody names nothing; there are "),
    (["profile"], "torch finds none here; run it on a machine that has one"),
    (["profile", "--only", "nothing"], "--only nothing matches no cell of forward, backward, quant, decode; see"),
    (["profile", "--suite", "tutorial", "--only", "nothing"], "--only nothing matches no cell of tutorial; see"),
    (["profile", "--provider", "nobody"], "nobody names no provider; there are"),
    (["profile", "--suite", "nothing"], "invalid choice: 'nothing'"),
    (["startup"], "the interpreter compiles nothing; run it on a GPU"),
]


@pytest.mark.parametrize(
    ("argv", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_done_is_refused(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = cli.main(argv)
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == cli.USAGE
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_interpreted_kernels_are_nothing_to_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile, "find_machine", lambda: Machine(torch.device("cpu"), "a test", interpreted=True))
    with pytest.raises(UsageError, match="TRITON_INTERPRET keeps kernels off it; unset it"):
        profile.find_gpu("profile")
