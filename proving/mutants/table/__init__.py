"""The mutants, a file per kind of what they break, each edit as a diff."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..mutant import Mutant, Suite


def read(text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file: blocks of lines with empty lines between.

    A line says one thing of a mutant, `breaks: rows are shifted` for example; `which`, `suite` and more than one `test`
    may be left out. The lines of the text to replace begin with `-`, those of the text that takes its place with `+`.
    Lines that begin with `#` are comments.
    """
    for block in text.split("\n\n"):
        said: dict[str, list[str]] = {"-": [], "+": [], "test": [], "which": [], "suite": []}
        for line in block.splitlines():
            if line.startswith(("-", "+")):
                said[line[0]].append(line[1:])
            elif not line.startswith("#"):
                word, _, rest = line.partition(": ")
                said.setdefault(word, []).append(rest)
        if "name" in said:
            yield Mutant(
                name=said["name"][0],
                breaks=said["breaks"][0],
                file=said["file"][0],
                old="\n".join(said["-"]),
                new="\n".join(said["+"]),
                tests=tuple(said["test"]),
                suite=Suite(*said["suite"] or ["interpreter"]),
                which=next(map(int, said["which"]), None),
            )


MUTANTS = tuple(
    mutant for path in sorted(Path(__file__).parent.glob("*.diff")) for mutant in read(path.read_text(encoding="utf-8"))
)
