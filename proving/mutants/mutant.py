"""One edit that breaks something on purpose, and the tests that are to fail of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Suite(Enum):
    """How tests are run; the two cannot share a process, since Triton reads the variable when it is imported."""

    INTERPRETER = "interpreter"
    COMPILE = "compile"


class EditError(Exception):
    """An edit that does not fit the text it is for."""


@dataclass(frozen=True)
class Mutant:
    """One edit, what it breaks, and which tests are to notice.

    Attributes:
        name: words joined by dashes; unique in the table.
        breaks: what a user would see of it, or what is lost.
        file: what is edited, from the repository's root.
        old: the text to replace; once in the file, or see `which`.
        new: what takes its place.
        tests: pytest node ids. They hold behaviour: what compares generated text with a copy of it would notice any
            edit, and is not chosen.
        suite: how these are run.
        which: of several places that have the text, the one that is edited, from 0; None where there is one.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    suite: Suite = Suite.INTERPRETER
    which: int | None = None

    def applied(self, text: str) -> str:
        """Return the file's text with the edit made.

        Raises:
            EditError: the text to replace is not there, or in several places and `which` is not given.
        """
        pieces = text.split(self.old)
        found = len(pieces) - 1
        at = self.which or 0
        if self.old == self.new or found <= at or (self.which is None and found > 1):
            raise EditError(
                f"{self.name}: {self.file} has the text to replace {found} times, and which is {self.which}; it takes "
                f"one place, or the number of one of several, and another text: {self.old!r} -> {self.new!r}"
            )
        return self.old.join(pieces[: at + 1]) + self.new + self.old.join(pieces[at + 1 :])
