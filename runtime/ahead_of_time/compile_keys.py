"""The kernels that a deployment touches, as a finite list of compilations.

The code that derives the kernels of calls derives the list: each entry is the key of a call of stand-ins for tensors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..call_kinds import MOST, MOST_ROWS_IN_I32, ROTARY, ROWS, USUAL_ROWS, CallKind
from ..codegen.axes import SAME
from ..codegen.groups import AnyMode, GroupMode, mode_named
from ..codegen.parameters import family_of
from ..codegen.values import Direction
from ..errors import ConflictError, DeviceError, RecordError
from ..kernels import rotary
from ..kernels.assembly import Assembly, Facts, assemble, join
from ..kernels.gpu import KernelKey, Target, named_target, target_of
from ..kernels.launcher import Launcher
from ..kernels.strides import misaligned_of_kind, strides_of_kind
from ..selection import dispatch
from ..selection.batch import batch_invariant
from ..selection.recording import recordings
from ..selection.table import Entry
from .modes_and_sizes import GroupShape, Pair, least_groups, listed, pairs_of, refuse_others
from .stand_ins import Asked, Deployment, Kind, plans


@dataclass(frozen=True)
class CompileKey:
    """One compilation, and the calls that need the compilation.

    Attributes:
        key: all that the compilation depends on besides the GPU.
        n: row length; of GroupNorm, how many elements a group has.
        instances: the instances that launch the kernel; several share the kernel that adds up partial sums.
        rows: the classes of numbers of rows, or of groups: "few", "some", "many" or "most".
        function: the `triton.JITFunction` that is compiled.
    """

    key: KernelKey
    n: int
    instances: tuple[str, ...]
    rows: tuple[str, ...]
    function: Any = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{', '.join(self.instances)} with N = {self.n} and {' or '.join(self.rows)} rows: {self.key}"


def compile_keys(
    n: Iterable[int] = (),
    modes: Iterable[str | AnyMode] | None = None,
    *,
    shapes: Iterable[str] = (),
    arch: str | None = None,
    multiprocessors: int | None = None,
    device: torch.device | str | int | None = None,
    weight_dtypes: Iterable[Kind] = (SAME,),
    bias_dtypes: Iterable[Kind] | None = None,
    residual_dtypes: Iterable[Kind] = (SAME,),
    smooth_dtypes: Iterable[Kind] = (torch.float32,),
    dy_dtypes: Iterable[Kind] = (SAME,),
    wants: Iterable[Collection[str]] | None = None,
    row_strides: Iterable[Asked] = (None,),
    misaligned: Iterable[Collection[str]] = ((),),
    rows: Iterable[str] = USUAL_ROWS,
    y_dtypes: Iterable[Kind] = (SAME,),
) -> list[CompileKey]:
    """List every compilation that calls of some modes and row lengths come to, whatever their number of rows.

    The defaults are the common deployment: weight and bias in x's dtype, rows that adjoin, tensors that start at
    multiples of 16 bytes, as torch allocates them. Where there are several values, there is a key for each combination.
    x_bias, dx and dresidual_out have x's dtype, and so have scale, shift and gate of modulated norms, which are one for
    each sample of several rows, or for each row where row_strides names them; of grouped norms rows are the groups of a
    token, and N is their length. Nothing is compiled; an instance that the
    table lacks is generated, as by a call.

    Kernels of GroupNorm depend on channels, groups and positions, which no row length says: its modes (`gn_fwd_bf16`)
    are listed for shapes. Where a backward mode is asked for too, its forward mode comes with the kernels that save
    statistics.

    Args:
        n: row lengths.
        modes: names of modes, as instances begin (`ln_fwd_bf16`), globs of such, and `Mode`s. None is every mode of
            the table in use that serves n, or one of the shapes.
        shapes: of GroupNorm, those of x with how many groups a sample has: "2x320x64x64/32". "*x320x64x64/32" is an x
            of any number of samples, compiled for each class of `rows`, which counts the groups in all samples.
        arch: what to compile for, "sm_90" or "gfx942" say; no GPU need be here. None is that of device.
        multiprocessors: of such a GPU, if they are not the usual number.
        device: the GPU, if not the current one.
        weight_dtypes: weight's: dtypes, "same" for x's (beside an fp8 x y's, or bf16 where y is quantised), None for no
            weight.
        bias_dtypes: bias's dtypes, by the same words; None is weight's. RMSNorm has none.
        residual_dtypes: residual's: dtypes, or "same".
        smooth_dtypes: smooth_scale's: dtypes, or "same".
        dy_dtypes: dtypes of the gradient that a backward pass takes, or "same".
        y_dtypes: dtypes of GroupNorm's y, or "same": fp32 under torch.autocast.
        wants: which gradients are asked of a backward pass, of "dx", "dweight", "dbias", "dx_bias" and "ddropped";
            gradients that the call has no tensor for are left out. None is all, as autograd asks where everything is
            trained.
        row_strides: elements from one row of x to the next; None is N. Of rows on several strides, these with the
            rows between them: (6144, 32, 128) of 32 heads of 48. Of other arguments ("dy", "out", ...) too: a mapping
            from their names to such; rows of those that are not named adjoin.
        misaligned: the arguments that start at no multiple of 16 bytes, one collection per combination.
        rows: classes of M: "few" (at most the table's SMALL_M), "some" (at most its SOME_M), "many", and "most" (more
            than 2**31 - 2**21).

    Returns:
        The keys, each once, in the order of modes and lengths.

    Raises:
        ConflictError: an argument that has a word it does not take, or is empty; or modes and sizes do not go together.
        ShapeError: n has what is no row length, or shapes what is none.
        MissingInstanceError: there is no such mode, or the table lacks it under NORMFORGE_ON_MISS=error.
        TargetError: there is no such architecture.
        DeviceError: there is no GPU, and arch does not say what to compile for.
    """
    dtypes = weight_dtypes, bias_dtypes, residual_dtypes, smooth_dtypes, dy_dtypes
    deployment = Deployment(*dtypes, wants, row_strides, misaligned, rows, y_dtypes)
    return keys_of(pairs_of(n, modes, shapes), find_target(arch, multiprocessors, device), deployment)


def find_target(
    arch: str | None, multiprocessors: int | None = None, device: torch.device | str | int | None = None
) -> Target:
    """Return the GPU that the arguments name; see `compile_keys`."""
    if arch is not None:
        if device is not None:
            raise ConflictError(f"arch {arch!r} and device {device!r} were both passed; pass one of them")
        return named_target(arch, multiprocessors)
    if multiprocessors is not None:
        raise ConflictError(f"multiprocessors={multiprocessors} was passed without arch, and a device has its own")
    return target_of(gpu(device))


def gpu(device: torch.device | str | int | None) -> torch.device:
    """Return a GPU by its index or name; None is the current GPU.

    Raises:
        DeviceError: the device is no GPU, or kernels are interpreted.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU was found to compile for; name an architecture instead: compile_keys(..., arch='sm_90'), or "
            "normforge aot --arch sm_90 ..., whose folder the machine with the GPU loads"
        )
    gpu_device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if gpu_device.type != "cuda":
        raise DeviceError(f"device is {device!r}, and kernels are compiled for GPUs; pass one, 'cuda:0' say")
    gpu_device = torch.device("cuda", torch.cuda.current_device() if gpu_device.index is None else gpu_device.index)
    if not target_of(gpu_device).compiles:
        raise DeviceError("TRITON_INTERPRET=1 has kernels interpreted, and nothing is compiled; unset it")
    return gpu_device


def keys_of(pairs: Sequence[Pair], target: Target, deployment: Deployment) -> list[CompileKey]:
    """Return the keys of modes at row lengths and shapes; see `compile_keys`."""
    keys: dict[str, CompileKey] = {}
    groups = [mode for mode, _ in pairs if isinstance(mode, GroupMode)]
    # Calls of a forward mode save statistics if its backward mode is listed too.
    trained = {replace(mode, direction=Direction.FORWARD) for mode in groups if mode.is_backward}
    for mode, size in pairs:
        if isinstance(mode, GroupMode) and mode.span.is_group and target.plainly:
            raise ConflictError(f"{mode.name} is GroupNorm's, which normforge.jax has not; leave it out of modes")
        for plan in plans(mode, size, target, deployment, saves=mode in trained):
            entry = plan.facts.entry
            ms = entry.least_rows()
            if isinstance(size, GroupShape):
                ms = size.least_groups(entry, deployment.rows)
            for word in (word for word in deployment.rows if word in ms):
                for launcher in plan.prepared(ms[word]).launchers:
                    _add(keys, launcher, plan.n, entry.name, word)
    return list(keys.values())


def recorded_keys(
    recorded: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    arch: str | None = None,
    multiprocessors: int | None = None,
    device: torch.device | str | int | None = None,
    rows: Iterable[str] | None = None,
) -> list[CompileKey]:
    """List every compilation that the recorded calls of a program come to.

    The list has the kernels that the program launched, or for another GPU, the kernels that the program would launch
    there: tiles are chosen anew. The recording holds all that calls bring. Nothing is compiled; an instance that the
    table lacks is generated, as by a call.

    Args:
        recorded: what `normforge.record` or NORMFORGE_RECORD wrote, a file or several.
        arch: see `compile_keys`.
        multiprocessors: see `compile_keys`.
        device: see `compile_keys`.
        rows: classes of M, as of `compile_keys`, to list every recorded call at each class. None is the recorded
            classes: a program that was recorded with batches of 3 rows launches other kernels for 3000.

    Returns:
        The keys, each once, in an order that does not depend on the order of the calls.

    Raises:
        RecordError: a recording cannot be read, keeps no call, or was written by a version that kept none.
        ConflictError: rows has a word that it does not take, or is empty.
        MissingInstanceError: the table lacks an instance under NORMFORGE_ON_MISS=error.
        TargetError: there is no such architecture.
        DeviceError: there is no GPU, and arch does not say what to compile for.
    """
    return recorded_keys_for(recorded, find_target(arch, multiprocessors, device), rows)


def recorded_keys_for(
    recorded: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], target: Target, rows: Iterable[str] | None
) -> list[CompileKey]:
    """Return `recorded_keys` for a known GPU."""
    files = listed("recorded", [recorded] if isinstance(recorded, (str, os.PathLike)) else recorded)
    classes = None if rows is None else listed("rows", rows)
    refuse_others("rows", classes or (), ROWS)
    kinds = recordings(files).calls
    if not kinds:
        raise RecordError(
            f"{' and '.join(str(path) for path in files)} keeps no call: nothing was launched while it was recorded; "
            "record a program that calls kernels: NORMFORGE_RECORD=FILE, or normforge.record(FILE)"
        )
    if classes is not None:
        kinds = frozenset(kind.with_rows(word) for kind in kinds for word in classes)
    keys: dict[str, CompileKey] = {}
    for kind in sorted(kinds):
        for entry, launcher in launchers_of(kind, target):
            _add(keys, launcher, kind.n, entry.name if entry else kind.mode, kind.rows)
    return list(keys.values())


def _add(keys: dict[str, CompileKey], launcher: Launcher, n: int, instance: str, rows: str) -> None:
    # Two tables in use, the committed one and one that grew on demand, have a copy each of what all modes share.
    known = keys.get(launcher.key.portable) or CompileKey(launcher.key, n, (), (), launcher.kernel)
    instances, classes = dict.fromkeys((*known.instances, instance)), dict.fromkeys((*known.rows, rows))
    keys[launcher.key.portable] = replace(known, n=n, instances=tuple(instances), rows=tuple(classes))


def launchers_of(kind: CallKind, target: Target) -> list[tuple[Entry | None, Launcher]]:
    """Return the kernels that a kind of call comes to on a GPU, each with its instance, if it is one of a table.

    Raises:
        RecordError: no call is of such a kind.
        ConflictError: no kernels of the kind can be launched as the target says.
        MissingInstanceError: no instance serves the kind, and none may be generated.
    """
    # The recording decides, and not this process, whether calls are batch invariant.
    with batch_invariant(kind.invariant):
        try:
            return list(_launchers(kind, target))
        except KeyError as error:
            raise RecordError(f"{kind} is no kind of call: no kernel takes {error}; {_ANEW}") from error


def _of_heads(kind: CallKind, target: Target) -> Iterator[tuple[None, Launcher]]:
    slots = rotary.STRIDES[kind.mode]
    dtypes, strides = _dtypes(kind, (*rotary.NAMES[kind.mode], *slots, "table")), strides_of_kind(kind, slots)
    m = MOST_ROWS_IN_I32 + 1 if kind.rows == MOST else 1
    facts = kind.mode, kind.size, dtypes, strides, misaligned_of_kind(kind), m, target
    for name, recipe in rotary.assemble(*facts, invariant=kind.invariant):
        yield None, Launcher(rotary.kernel_named(name), recipe, target, None)


def _launchers(kind: CallKind, target: Target) -> Iterator[tuple[Entry | None, Launcher]]:
    mode = None if kind.mode in ROTARY else mode_named(kind.mode)
    is_group = isinstance(mode, GroupMode) and mode.span.is_group
    if target.plainly and (is_group or (mode and mode.is_backward and mode.shares)):
        raise ConflictError(f"{kind.mode} was recorded and is none of normforge.jax's; leave out --for jax")
    if mode is None:
        yield from _of_heads(kind, target)
        return
    assembled = [_assembled(each, target) for each in (kind, *kind.beside)]
    recipes = [assembly.walkers[0] for _, assembly in assembled]
    modes = [each.mode for each in (kind, *kind.beside)]
    shared = join(modes, recipes, invariant=kind.invariant) if kind.beside else None
    for entry, assembly in assembled:
        if shared is not None:
            yield entry, Launcher(dispatch.several(shared[0]).load(), shared[1], target, None)
            continue
        # On this GPU the problems may share no launch.
        for recipe in assembly.recipes:
            yield entry, Launcher(entry.load(recipe.part), recipe, target, None)


def _assembled(kind: CallKind, target: Target) -> tuple[Entry, Assembly]:
    mode = mode_named(kind.mode)
    groups, channels = kind.size.get("groups", 1), kind.size.get("channels", 0)
    if channels % groups:
        raise RecordError(f"{kind} is no kind of call: {groups} groups do not divide {channels} channels; {_ANEW}")
    family = family_of(mode)
    dtypes = _dtypes(kind, [row.name for row in family.tensors])
    strides = strides_of_kind(kind, [row.row_stride_slot for row in family.tensors if row.row_stride_slot is not None])
    entry = dispatch.find(mode, kind.n)
    facts = Facts(entry, family, mode, kind.n, kind.size, target, dtypes, strides, misaligned_of_kind(kind))
    least = least_groups(entry, groups) if isinstance(mode, GroupMode) else entry.least_rows()
    m = least.get(kind.rows, 0)
    if m == 0:
        raise RecordError(f"{kind} is no kind of call: a sample has {groups} groups; {_ANEW}")
    return entry, assemble(facts, m)


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
