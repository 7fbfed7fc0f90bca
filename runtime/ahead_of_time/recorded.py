"""The kernels of recorded calls, chosen for a GPU from each kind of call as a call of the kind would choose them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

import torch

from ..call_kinds import FEW, CallKind
from ..codegen.families import Kind as Shape
from ..codegen.groups import AnyMode, GroupMode, mode_named
from ..codegen.parameters import family_of
from ..errors import ConflictError, RecordError
from ..kernels.assembly import Facts, assemble
from ..kernels.gpu import Target
from ..kernels.launcher import Launcher
from ..kernels.strides import misaligned_of_kind, strides_of_kind
from ..selection import dispatch
from ..selection.batch import batch_invariant
from ..selection.recorded import recordings
from ..selection.table import Entry
from .modes_and_sizes import least_groups


def recorded_kinds(paths: Sequence[str | os.PathLike[str]], rows: Collection[str] | None = None) -> list[CallKind]:
    """Return the kinds of call that some recordings keep, in an order that does not depend on the recordings'.

    Args:
        paths: the files.
        rows: classes of M, to have each kind of call at all of these; None is the recorded classes.

    Raises:
        RecordError: a file cannot be read, or keeps no call.
    """
    kinds = recordings(paths).calls
    if not kinds:
        raise RecordError(
            f"{' and '.join(str(path) for path in paths)} keeps no call: nothing was launched while it was recorded; "
            "record a program that calls kernels: NORMFORGE_RECORD=FILE, or normforge.record(FILE)"
        )
    if rows is not None:
        kinds = frozenset(at for kind in kinds for at in kind.at(rows))
    return sorted(kinds)


def launchers_of(kind: CallKind, target: Target) -> list[tuple[Entry, Launcher]]:
    """Return the kernels that a kind of call comes to on a GPU, each with its instance.

    Raises:
        RecordError: no call is of such a kind.
        ConflictError: no kernels of the kind can be launched as the target says.
        MissingInstanceError: no instance serves the kind, and none may be generated.
    """
    # The recording decides, and not this process, whether calls are batch invariant.
    with batch_invariant(kind.invariant):
        try:
            return list(_launchers(kind, mode_named(kind.mode), target))
        except KeyError as error:
            raise RecordError(f"{kind} is no kind of call: no kernel takes {error}; {_ANEW}") from error


def _launchers(kind: CallKind, mode: AnyMode, target: Target) -> Iterator[tuple[Entry, Launcher]]:
    if target.plainly and (isinstance(mode, GroupMode) or (mode.is_backward and mode.shares)):
        raise ConflictError(f"{kind.mode} was recorded and is none of normforge.jax's; leave out --for jax")
    groups = kind.size.get("groups", 1)
    if kind.size.get("channels", 0) % groups:
        channels = kind.size["channels"]
        raise RecordError(f"{kind} is no kind of call: {groups} groups do not divide {channels} channels; {_ANEW}")
    family, n = family_of(mode), kind.n
    dtypes = _dtypes(kind, [row.name for row in family.tensors])
    strides = strides_of_kind(kind, [row.row_stride_slot for row in family.tensors if row.row_stride_slot is not None])
    scales = {row.name: row.scale_stride_slot for row in family.inputs if row.kind is Shape.SCALE}
    # A scale for all rows and a scale per row need the same compilations.
    further = {slot: 1 for name, slot in scales.items() if slot is not None and dtypes[name] is not None}
    described = family, mode, n, target, dtypes, strides, further, misaligned_of_kind(kind)
    facts = Facts(*described, invariant=kind.invariant, sizes=kind.size)
    entry = dispatch.find(mode, n)
    least = least_groups(entry, groups) if isinstance(mode, GroupMode) else entry.least_rows()
    m = least.get(kind.rows, 0)
    if m == 0:
        raise RecordError(f"{kind} is no kind of call: a sample has {groups} groups; {_ANEW}")
    assembly = assemble(facts, entry.choices(m, n, target.arch), m, few=kind.rows == FEW)
    for recipe in (*assembly.walkers, *([assembly.finisher] if assembly.finisher else ())):
        yield entry, Launcher(entry.load(recipe.part), recipe, target, None)


_ANEW = "the recording was changed, or written by another version of normforge; record anew"


def _dtypes(kind: CallKind, names: Sequence[str]) -> dict[str, torch.dtype | None]:
    """Return the dtypes of tensors by name, None for those that the kind lacks; refuse a kind with any other tensor."""
    dtypes = dict(kind.dtypes)
    foreign = [name for name in (*dtypes, *dict(kind.strides), *kind.misaligned) if name not in names]
    if foreign:
        raise RecordError(f"{kind} is no kind of call: it has no {foreign[0]!r}; {_ANEW}")
    for word in dtypes.values():
        if not isinstance(getattr(torch, word, None), torch.dtype):
            raise RecordError(f"{kind} is no kind of call: no tensor of it is of {word!r}; {_ANEW}")
    return {name: getattr(torch, dtypes[name]) if name in dtypes else None for name in names}
