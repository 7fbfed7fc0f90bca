"""Render a text once for all modes between which the templates do not decide.

Modules of thousands of modes differ only in a name, a dtype or a largest magnitude. Templates get a `Reader` in place
of a mode. The reader notes each value that a template decides on, and leaves a blank for each value that a template
prints. Modes with the same notes have the same sketch, and fill the blanks with their own words.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from .groups import AnyMode

# No template holds these characters: one marks both ends of a blank, the other replaces the dots of its path.
_BLANK = re.compile("\x01(.+?)\x01")
_DOT = "\x02"
_NAME = re.compile(f"[\\w\x01{_DOT}]+\\(?")


def blank(path: str) -> str:
    """Return the blank for an attribute of a mode ("dtype_out.qmax", say), or for another word."""
    return f"\x01{path.replace('.', _DOT)}\x01"


class _Question(NamedTuple):
    """A template's question to a mode: for an attribute, or how the attribute compares with a value."""

    path: str
    compare: Callable[[Any, Any], bool] | None = None
    other: Any = None

    def ask(self, mode: Any) -> Any:
        """Return a mode's answer."""
        value = attrgetter(self.path)(mode)
        return value if self.compare is None else self.compare(value, self.other)


_Notes = dict[_Question, Any]


class Reader:
    """A mode, or one of its axes, as templates read it."""

    def __init__(self, of: Any, notes: _Notes, path: str = "") -> None:
        self._of = of
        self._notes = notes
        self._path = path

    def __getattr__(self, name: str) -> Any:
        """Read an attribute for the first time."""
        value = getattr(self._of, name)
        path = f"{self._path}.{name}".lstrip(".")
        if callable(value):
            value = partial(value.__func__, self)
        elif isinstance(value, Enum):
            value = Reader(value, self._notes, path)
        elif isinstance(value, (bool, tuple)):
            self._notes[_Question(path)] = value
        else:
            value = _Word(value, self._notes, path)
        setattr(self, name, value)
        return value

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"a {type(self._of).__name__} cannot be compared; compare an attribute of it")

    def __str__(self) -> str:
        raise TypeError(f"a {type(self._of).__name__} cannot be printed; print an attribute of it")


@dataclass(frozen=True, eq=False)
class _Word:
    """A text or a number of a mode: a blank if a template prints it, a note if a template decides on it."""

    value: Any
    notes: _Notes
    path: str

    def __str__(self) -> str:
        return blank(self.path)

    def __bool__(self) -> bool:
        return self._decide(_is_true, None)

    def __eq__(self, other: object) -> bool:
        return self._decide(operator.eq, other)

    def __gt__(self, other: Any) -> bool:
        return self._decide(operator.gt, other)

    def _decide(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        answer = self.notes[_Question(self.path, compare, other)] = compare(self.value, other)
        return answer


def _is_true(value: Any, _: Any) -> bool:
    return bool(value)


class Sketch:
    """A text with blanks.

    Attributes:
        paths: the paths of the blanks, without duplicates.
    """

    def __init__(self, text: str) -> None:
        self._pieces = _BLANK.split(text)
        self._pieces[1::2] = [path.replace(_DOT, ".") for path in self._pieces[1::2]]
        self.paths = tuple(dict.fromkeys(self._pieces[1::2]))
        # Functions where they are called, and constants anywhere.
        names = set(_NAME.findall(text))
        self._names = {name.rstrip("(") for name in names if name.endswith("(") or name.isupper()}

    def fill(self, words: Mapping[str, str]) -> str:
        """Return the text with a word in each blank."""
        pieces = self._pieces.copy()
        pieces[1::2] = [words[path] for path in pieces[1::2]]
        return "".join(pieces)

    def names(self, words: Mapping[str, str]) -> set[str]:
        """Return the functions that the filled text calls, and the constants that it holds."""

        def word(match: re.Match[str]) -> str:
            return words[match[1].replace(_DOT, ".")]

        return {_BLANK.sub(word, name) if "\x01" in name else name for name in self._names}


@dataclass
class Sketches:
    """All sketches so far, found by the templates' decisions, in the order of the decisions.

    Each decision follows from the values before it, so the paths of all modes fork at the same notes.
    """

    ways: dict[Hashable, _Fork | Sketch] = field(default_factory=dict)

    def find(self, mode: AnyMode, start: Hashable, render: Callable[[Reader], str]) -> Sketch:
        """Return the sketch of a mode, and render it if no earlier mode had the same notes.

        Args:
            mode: the mode that a template reads.
            start: identifies the templates.
            render: renders the templates for a reader.
        """
        at = self.ways.get(start)
        while isinstance(at, _Fork):
            at = at.ways.get(at.question.ask(mode))
        return at or self._add(mode, start, render)

    def _add(self, mode: AnyMode, start: Hashable, render: Callable[[Reader], str]) -> Sketch:
        notes: _Notes = {}
        sketch = Sketch(render(Reader(mode, notes)))
        ways, value = self.ways, start
        for question, answer in notes.items():
            fork = ways.setdefault(value, _Fork(question))
            assert isinstance(fork, _Fork)
            ways, value = fork.ways, answer
        ways[value] = sketch
        return sketch


@dataclass
class _Fork:
    """A decision of a template, and the next fork or sketch by its value."""

    question: _Question
    ways: dict[Hashable, _Fork | Sketch] = field(default_factory=dict)
