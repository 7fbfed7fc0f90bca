"""Texts that modes share but for words: rendered once for all modes between which the templates do not decide.

Modules of thousands of modes differ in a name, a dtype or a largest magnitude alone. Templates are given a `Reader` in
place of a mode. The reader notes each value that a template decides on, and leaves a blank for each that a template
prints. Modes of the same notes have the same sketch, and fill the blanks with their own words.
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

# No template holds the characters that stand on either side of a blank, and for the dots of its path.
_BLANK = re.compile("\x01(.+?)\x01")
_DOT = "\x02"
_NAME = re.compile(f"[\\w\x01{_DOT}]+\\(?")


def blank(path: str) -> str:
    """Return the blank for an attribute of a mode ("dtype_out.qmax", say), or for another word."""
    return f"\x01{path.replace('.', _DOT)}\x01"


class _Question(NamedTuple):
    """What a template asks of a mode: for an attribute, or how the attribute compares with a value."""

    path: str
    compare: Callable[[Any, Any], bool] | None = None
    other: Any = None

    def ask(self, mode: Any) -> Any:
        """Return the answer of a mode."""
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
        """Read an attribute, for the first time."""
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
        raise TypeError(f"a {type(self._of).__name__} is compared with nothing; ask for an attribute that says it")

    def __str__(self) -> str:
        raise TypeError(f"a {type(self._of).__name__} is no text; print an attribute of it")


@dataclass(frozen=True, eq=False)
class _Word:
    """A text or a number of a mode: a blank where a template prints the word, a note where a template decides on it."""

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
        paths: the blanks, each once.
    """

    def __init__(self, text: str) -> None:
        self._pieces = _BLANK.split(text)
        self._pieces[1::2] = [path.replace(_DOT, ".") for path in self._pieces[1::2]]
        self.paths = tuple(dict.fromkeys(self._pieces[1::2]))
        # Functions where they are called, constants wherever they stand.
        names = set(_NAME.findall(text))
        self._names = {name.rstrip("(") for name in names if name.endswith("(") or name.isupper()}

    def fill(self, words: Mapping[str, str]) -> str:
        """Return the text with a word in each blank."""
        pieces = self._pieces.copy()
        pieces[1::2] = [words[path] for path in pieces[1::2]]
        return "".join(pieces)

    def names(self, words: Mapping[str, str]) -> set[str]:
        """Return the functions that the filled text calls, and the constants that it holds."""

        def word(found: re.Match[str]) -> str:
            return words[found[1].replace(_DOT, ".")]

        return {_BLANK.sub(word, name) if "\x01" in name else name for name in self._names}


@dataclass
class Sketches:
    """Every sketch that was made, found by what the templates decided on, in the order in which they did.

    Each decision follows from the values of those before it, so that the ways fork at the same notes for all modes.
    """

    ways: dict[Hashable, _Fork | Sketch] = field(default_factory=dict)

    def find(self, mode: AnyMode, start: Hashable, render: Callable[[Reader], str]) -> Sketch:
        """Return the sketch of a mode, rendered if no mode of the same notes was there before.

        Args:
            mode: what a template is to read.
            start: which templates.
            render: renders them for a reader.
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
    """What a template decided on, and the ways on from there by value."""

    question: _Question
    ways: dict[Hashable, _Fork | Sketch] = field(default_factory=dict)
