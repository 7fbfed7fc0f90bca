"""Read a YAML file as nodes, so that every error can name the file and the line."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .errors import ManifestError, NormforgeError
from .words import nearest, one_of, printable, shortened, unknown

_STRING, _BOOLEAN, _NULL, _INTEGER = (f"tag:yaml.org,2002:{tag}" for tag in ("str", "bool", "null", "int"))
_MERGE = "tag:yaml.org,2002:merge"
_MAPPING, _SEQUENCE = (f"tag:yaml.org,2002:{tag}" for tag in ("map", "seq"))
_KINDS = {
    _INTEGER: "the whole number",
    "tag:yaml.org,2002:float": "the number",
    "tag:yaml.org,2002:timestamp": "the date",
    _MERGE: "the merge key",
}


# The manifest of every legal mode is smaller than 1 MiB. PyYAML takes about 10 s per MiB.
_MOST_BYTES = 16 << 20
# Python refuses to convert very long decimals; no number in a document needs this many digits.
_MOST_DIGITS = 18


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document, as errors describe it."""

    noun: str
    shape: str
    where: str
    error: type[NormforgeError]


MANIFEST = DocumentKind(
    "manifest", "a manifest is groups of axis: value", "name one with --manifest FILE", ManifestError
)


class Pair(NamedTuple):
    """One `key: value` of a mapping, as nodes."""

    key: Node
    value: Node


def compose(path: Path, kind: DocumentKind = MANIFEST, text: str | None = None, *, own: bool = False) -> Node | None:
    """Read a YAML file as nodes; return None for an empty file.

    Args:
        path: the file.
        kind: the kind of document.
        text: the file's text, if it is known already.
        own: whether the file comes with the generator, so that libyaml may read it.

    Raises:
        NormforgeError: the kind's error; the file cannot be read, or is not YAML.
    """
    text = _read(path, kind) if text is None else text
    try:
        # libyaml takes a fifth of PyYAML's 0.2 s for the generator's own tables, but names fewer causes of errors and
        # crashes on deep nesting.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if own else yaml.SafeLoader
        return yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        before = mark.index if mark else 0
        problem = ", ".join(part for part in (error.context, error.problem) if part)
    except yaml.reader.ReaderError as error:
        before = error.position
        problem = f"{error.reason} (character {error.character:#x})"
    except RecursionError:
        before = 0
        problem = "it is nested too deeply"
    line = 1 + text.count("\n", 0, before)
    raise kind.error(f"{path}:{line}: this is not valid YAML: {printable(problem)}; {kind.shape}")


def _read(path: Path, kind: DocumentKind) -> str:
    try:
        data = _contents(path, kind)
        return data.decode()
    except FileNotFoundError:
        raise kind.error(f"{path}: there is no such {kind.noun}; {kind.where}") from None
    except OSError as error:
        raise kind.error(
            f"{path}: the {kind.noun} cannot be read: {error.strerror}; mend that and try again"
        ) from error
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise kind.error(f"{path}:{line}: the {kind.noun} is not UTF-8 text; save it as UTF-8") from error


def _contents(path: Path, kind: DocumentKind) -> bytes:
    """Return the bytes of a regular file, or of a pipe or terminal that another process hands to this one."""
    try:
        # Opening a named pipe would block until another process writes to the pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        # The path holds a NUL, which no system call accepts.
        raise kind.error(f"{str(path)!r} is no path ({error}); {kind.where}") from error
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        is_handed_over = stat.S_ISFIFO(mode) and str(path).startswith(("/dev/", "/proc/"))
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(mode) or is_handed_over):
            raise kind.error(
                f"{path}: the {kind.noun} is no regular file, and might never end; {kind.where}, or pipe it in "
                "as /dev/stdin"
            )
        os.set_blocking(handle, True)
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise kind.error(f"{path}: the {kind.noun} is longer than {_MOST_BYTES >> 20} MiB; split it in several")
    return data


def line_of(node: Node) -> int:
    """Return the line that a node starts on, counted from 1."""
    return node.start_mark.line + 1


@dataclass(frozen=True)
class Section:
    """A labelled part of a document that reads nodes as an expected type or raises an error at their line."""

    path: Path
    label: str = ""
    kind: DocumentKind = MANIFEST

    def error(self, node: Node, problem: str) -> NormforgeError:
        """Return the error for a problem at a node of this section."""
        label = f" {self.label}:" if self.label else ""
        return self.kind.error(f"{self.path}:{line_of(node)}:{printable(label)} {printable(problem)}")

    def mapping(self, node: Node, expected: str) -> dict[str, Pair]:
        """Read a mapping whose keys are distinct words."""
        if not isinstance(node, MappingNode) or node.tag != _MAPPING:
            raise self.error(node, f"expected {expected}, not {_describe(node)}")
        pairs: dict[str, Pair] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                raise self.error(
                    key,
                    "YAML's merge key << is not supported; write the lines out, or put what all groups share "
                    "under defaults:",
                )
            word = self.string(key, "a key", "a word")
            if word in pairs:
                first = line_of(pairs[word].key)
                raise self.error(key, f"{word} is given twice, first on line {first}; keep one of the two")
            pairs[word] = Pair(key, value)
        return pairs

    def words(self, node: Node, what: str, legal: Sequence[str]) -> tuple[str, ...]:
        """Read one or more of the legal words, without duplicates."""
        return self.once(what, [(item, self.word(item, what, legal)) for item in self.items(node, what)])

    def booleans(self, node: Node, what: str, values: Mapping[str, bool]) -> tuple[str, ...]:
        """Read one or more booleans, without duplicates, as the words true and false."""
        word_of = {value: word for word, value in values.items()}
        return self.once(what, [(item, word_of[self._boolean(item, what)]) for item in self.items(node, what)])

    def is_number(self, node: Node) -> bool:
        """Return True if YAML reads a node as an integer."""
        return node.tag == _INTEGER

    def is_string(self, node: Node) -> bool:
        """Return True if YAML reads a node as a string."""
        return isinstance(node, ScalarNode) and node.tag == _STRING

    def string(self, node: Node, what: str, expected: str, meant: str | None = None) -> str:
        """Read a scalar that YAML reads as a string."""
        if not self.is_string(node):
            hint = f"; did you mean {meant}?" if meant else ""
            raise self.error(node, f"{what} takes {expected}, not {_describe(node)}{hint}")
        return str(node.value)

    def integer(self, node: Node, what: str, expected: str) -> int:
        """Read an integer in plain decimals."""
        is_plain = isinstance(node, ScalarNode) and node.tag == _INTEGER and node.value.isascii()
        if not is_plain or not node.value.isdecimal() or len(node.value) > _MOST_DIGITS:
            raise self.error(node, f"{what} takes {expected}, not {_describe(node)}")
        if node.value != "0" and node.value.startswith("0"):
            # YAML 1.1 reads 010 as 8, YAML 1.2 as 10.
            decimal = node.value.lstrip("0") or "0"
            raise self.error(
                node, f"{what} takes {expected}, not {node.value}, which YAML may read as octal; write {decimal}"
            )
        return int(node.value)

    def word(self, node: Node, what: str, legal: Sequence[str]) -> str:
        """Read one of the legal words; a word that is a number may be quoted or not."""
        if (self.is_number(node) or self.is_string(node)) and node.value in legal:
            return str(node.value)
        word = self.string(node, what, one_of(legal), _meant(node, legal))
        raise self.error(node, unknown(what, word, legal))

    def _boolean(self, node: Node, what: str) -> bool:
        value = _boolean_of(node)
        if value is None:
            raise self.error(node, f"{what} takes true or false, unquoted, not {_describe(node)}")
        return value

    def items(self, node: Node, what: str) -> Sequence[Node]:
        """Return the items of a list, or a single value as one item; refuse an empty list."""
        if not isinstance(node, SequenceNode) or node.tag != _SEQUENCE:
            return [node]
        if not node.value:
            raise self.error(node, f"{what} is an empty list, which makes no instance; give it a value or leave it out")
        items: Sequence[Node] = node.value
        return items

    def once(self, what: str, items: Iterable[tuple[Node, str]]) -> tuple[str, ...]:
        """Return the words that were read at nodes, and refuse duplicates."""
        words: list[str] = []
        for node, word in items:
            if word in words:
                raise self.error(node, f"{what} lists {word} twice, which makes every instance twice; keep one")
            words.append(word)
        return tuple(words)


def _boolean_of(node: Node) -> bool | None:
    if not isinstance(node, ScalarNode) or node.tag != _BOOLEAN:
        return None
    return yaml.SafeLoader.bool_values.get(node.value.lower())


def _meant(node: Node, legal: Sequence[str]) -> str | None:
    if "none" in legal and (node.tag == _NULL or _boolean_of(node) is False):
        return "none"
    return nearest(node.value, legal) if isinstance(node, ScalarNode) else None


def _describe(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "a mapping" if node.tag == _MAPPING else f"a mapping tagged {node.tag}"
    if isinstance(node, SequenceNode):
        return "a list" if node.tag == _SEQUENCE else f"a list tagged {node.tag}"
    if node.tag == _NULL:
        return "an empty value"
    if node.tag == _STRING:
        return f"the word {shortened(node.value)!r}"
    value = _boolean_of(node)
    if value is not None:
        spelling = str(value).lower()
        read = "" if node.value == spelling else f" (YAML reads {node.value} so)"
        return f"the boolean {spelling}{read}"
    return f"{_KINDS.get(node.tag, node.tag)} {shortened(node.value)}"
