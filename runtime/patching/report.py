"""The report of `patch`, which prints as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..families.replaced import name_of


class LeftAloneError(Exception):
    """A module that `patch` leaves as it is; the text says why."""


class Swapped(NamedTuple):
    """A module whose class was changed.

    Attributes:
        path: where it stands in the model; for a module that stands in several places, the first.
        old: the class it had.
        new: the class it has.
    """

    path: str
    old: type[torch.nn.Module]
    new: type[torch.nn.Module]


class _Left(NamedTuple):
    """A module that `patch` has something to say about.

    Attributes:
        path: where it stands in the model; the first of several places.
        cls: its class.
        reason: why it was left unchanged, or when it bypasses its norms; and what to do about that.
    """

    path: str
    cls: type[torch.nn.Module]
    reason: str


class Skipped(_Left):
    """A norm that was left as it is; the reason says why it was not swapped."""


class Bypassed(_Left):
    """A module that does not always call its norms; the reason says when, and what to do about it."""


class Fused(NamedTuple):
    """A block whose sums are computed together with norms, or norms with their modulation or rotary embedding.

    Attributes:
        path: where it stands in the model; the first of several places.
        cls: its class, from which the one that it has now is derived.
        norms: the names of the block's own norms that are computed together with the sum before them.
        modulated: the names of the block's own norms that it scales and shifts, and that are computed together with it.
        gradients: the names of the block's own norms whose input is added again, as a residual, and whose backward
            kernel adds the residual's gradient.
        added: the names of the block's own norms that are computed together with the sum of their result.
        rotated: the names of the block's own norms of queries and keys that are computed together with their rotary
            embedding.
    """

    path: str
    cls: type[torch.nn.Module]
    norms: tuple[str, ...]
    modulated: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    rotated: tuple[str, ...] = ()

    def __str__(self) -> str:
        phrases = {
            "sums with {}": self.norms,
            "gradients of residuals with those of {}": self.gradients,
            "{} with the modulation": self.modulated,
            "{} with the sum behind": self.added,
            "{} with the rotary embedding": self.rotated,
        }
        return "; ".join(phrase.format(", ".join(names)) for phrase, names in phrases.items() if names)


class Unfused(_Left):
    """A block that adds as it did, although it holds norms of ours; the reason says why none of its sums was fused."""


class Patch(NamedTuple):
    """The report of `patch`; its string is a table.

    Attributes:
        swapped: the modules that are ours now.
        skipped: the modules that look like norms and are not ours.
        bypassed: the modules that hold norms of ours and compute them without a call in some modes: encoder layers,
            by torch's fast path.
        fused: the blocks whose residual adds, or modulations, are fused with norms.
        unfused: the blocks whose adds were left alone.
    """

    swapped: tuple[Swapped, ...]
    skipped: tuple[Skipped, ...]
    bypassed: tuple[Bypassed, ...] = ()
    fused: tuple[Fused, ...] = ()
    unfused: tuple[Unfused, ...] = ()

    def __str__(self) -> str:
        rows = [("swapped", each.path, each.old.__name__, f"-> {name_of(each.new)}") for each in self.swapped]
        rows += [("fused", each.path, each.cls.__name__, str(each)) for each in self.fused]
        for state, left in (("skipped", self.skipped), ("unfused", self.unfused), ("bypassed", self.bypassed)):
            rows += [(state, each.path, each.cls.__name__, each.reason) for each in left]
        return _table(rows) or "nothing to swap or to fuse"


def _table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Return a line for all rows that differ in their paths alone, with the first path, in the order of the rows.

    Args:
        rows: the state of a module, its path, the name of its class, and its replacement or the reason for none.
    """
    paths: dict[tuple[str, str, str], list[str]] = {}
    for state, path, cls, what in rows:
        paths.setdefault((state, cls, what), []).append(path or "the model")
    lines = [(state, f"{len(at)} x {cls}", f"{what} [{at[0]}]") for (state, cls, what), at in paths.items()]
    widths = [max((len(line[column]) for line in lines), default=0) for column in (0, 1)]
    return "\n".join(f"{state:<{widths[0]}}  {modules:<{widths[1]}}  {what}" for state, modules, what in lines)
