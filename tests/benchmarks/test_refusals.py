"""What would be measured or judged wrongly without a word is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli

from ..calling import status_of

REFUSED = [
    *((["beside", "old", "new", f"--within={bound}"], f"{bound!r} is no bound") for bound in ("-0.1", "nan", "3%")),
    (["beside", "old", "new", "--within=inf"], "'inf' is no bound; give a share of the old time, such as 0.03 for 3 %"),
    *((["parts", "--seconds", s], f"{s!r} is no time; give seconds, such as 20") for s in ("soon", "-1", "inf")),
    (["list", "--suite", "forward", "--seed", "9"], "--seed 9 draws no cell of --suite forward; leave it out, or add"),
]


@pytest.mark.parametrize(
    ("argv", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_done_is_refused(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(cli.main, argv) == cli.USAGE
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
