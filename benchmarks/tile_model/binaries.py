"""Resources of a compiled kernel, and how much it loads at once, read from its binary without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from normforge.kernels.gpu import Target


@dataclass(frozen=True)
class Usage:
    """The resources of a kernel.

    Attributes:
        threads: of a program.
        registers: of a thread.
        spilled_bytes: of a thread, in memory: the whole stack of NVIDIA's kernels, which use it for nothing else.
        shared_bytes: of a program.
        loading_bytes: the most that a thread has on its way at once.
    """

    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loading_bytes: int


def usage_of(compiled: Any, target: Target) -> Usage:
    """Read a `triton.CompiledKernel`.

    Args:
        compiled: for the target, loaded or not.
        target: the GPU.
    """
    threads, shared = compiled.metadata.num_warps * target.warp_size, compiled.metadata.shared
    if target.is_nvidia:
        report = _resources(compiled.asm["cubin"])
        registers, stack, local = (_number(report, name) for name in ("REG", "STACK", "LOCAL"))
        return Usage(threads, registers, stack + local, shared, most_loading(_sass(compiled.asm["sass"])))
    text = compiled.asm["amdgcn"]
    registers = _number(text, ".vgpr_count")
    return Usage(threads, registers, _number(text, ".private_segment_fixed_size"), shared, most_loading(_amdgcn(text)))


def _resources(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(text: str, name: str) -> int:
    found = re.search(rf"(?<!\w){re.escape(name)}:\s*(\d+)", text)
    if found is None:
        raise ValueError(f"a binary's text states no {name}")
    return int(found[1])


@dataclass(frozen=True)
class Event:
    """A step of a thread: what is waited for, then what is begun.

    Attributes:
        done: tags of what has come.
        tag: of what is begun; None begins nothing.
        bytes: that it loads; 0 of a store, which AMD's counter counts too.
        left: of AMD's counter, how many may still be under way; None waits for nothing.
    """

    done: frozenset[int] = frozenset()
    tag: int | None = None
    bytes: int = 0
    left: int | None = None


def most_loading(events: Iterable[Event]) -> int:
    """Return the most bytes that a thread has on their way at once, with instructions in program order.

    A loop is walked once: what its round loads for the next one is begun, and nothing is waited for twice.
    """
    under_way: list[tuple[int, int]] = []
    most = 0
    for event in events:
        if event.left is not None:
            under_way = under_way[len(under_way) - min(event.left, len(under_way)) :]
        under_way = [(tag, size) for tag, size in under_way if tag not in event.done]
        if event.tag is not None:
            under_way.append((event.tag, event.bytes))
            most = max(most, sum(size for _, size in under_way))
    return most


# Triton's disassembly: barriers that an instruction waits for, the one that its reads free, the one that its result
# sets, whether it yields, and its stall, joined by colons.
_SASS = re.compile(r"^(--|[0-9a-f]{2}):[^:]*:(-|\d):[^:]*:\S+\s+(?:@!?\w+\s+)?(\S+)", re.MULTILINE)
_SASS_BITS = re.compile(r"\.(U?8|S8|U16|S16|64|128|256)(?=\.|$)")
_DEFAULT_BYTES = 4


def _sass(text: str) -> Iterator[Event]:
    for waits, sets, name in _SASS.findall(text):
        mask = 0 if waits == "--" else int(waits, 16)
        done = frozenset(bit for bit in range(6) if mask >> bit & 1)
        # A copy to shared memory sets no such barrier: all that are begun in a round count, one round too many.
        is_load = name.startswith(("LDG.", "LDGSTS."))
        if not (done or is_load):
            continue
        bits = _SASS_BITS.search(name)
        size = _DEFAULT_BYTES if bits is None else int(bits[1].lstrip("US")) // 8
        tag = (-1 if sets == "-" else int(sets)) if is_load else None
        yield Event(done, tag, size if is_load else 0)


_AMDGCN = re.compile(r"^\s*(?:(?:global|buffer|flat)_(load|store|atomic)_(\w+)|s_waitcnt\s+(.*))", re.MULTILINE)
_AMDGCN_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def _amdgcn(text: str) -> Iterator[Event]:
    for kind, width, waits in _AMDGCN.findall(text):
        counted = re.search(r"vmcnt\((\d+)\)", waits)
        if counted is not None:
            yield Event(left=int(counted[1]))
        elif kind:
            size = _AMDGCN_BYTES.get(width, 1 if "byte" in width else 2) if kind == "load" else 0
            yield Event(tag=0, bytes=size)
