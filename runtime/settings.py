"""The environment variables that normforge reads, and the paths that they and calls name.

A variable is checked and refused here. It is read where it matters and not before, so that a program may set it once it
runs. Paths are absolute from the start, wherever the process goes.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from .errors import AotError, CacheError, NormforgeError, RecordError, SettingError, TableError

# None if the folder is gone; a relative path is then an error where one is used.
_START: Path | None = None
with suppress(OSError):
    _START = Path.cwd()
# Inductor and vLLM set the variable when they compile a model; a warm-up has filled the folder that it named before.
TRITON_CACHE = os.environ.get("TRITON_CACHE_DIR")


def instances() -> Path | None:
    """NORMFORGE_INSTANCES: the folder of generated kernels that the process uses in place of normforge's own."""
    return _path("NORMFORGE_INSTANCES", TableError)


def cache() -> Path | None:
    """NORMFORGE_CACHE: where kernels that are generated on demand are kept, if not in the user's cache folder."""
    return _path("NORMFORGE_CACHE", CacheError)


def recording() -> Path | None:
    """NORMFORGE_RECORD: the file that what the process asks for is written to, with %p and %r in its name replaced.

    Raises:
        RecordError: there can be no such path, or something else follows a %, or RANK is asked for and not set.
    """
    return _path("NORMFORGE_RECORD", RecordError, _PLACEHOLDER.sub(_of_process, os.environ.get("NORMFORGE_RECORD", "")))


_PLACEHOLDER = re.compile(r"%(.?)", re.DOTALL)


def _of_process(placeholder: re.Match[str]) -> str:
    """Return the replacement of a letter behind a % in NORMFORGE_RECORD."""
    letter, name = placeholder[1], os.environ["NORMFORGE_RECORD"]
    values = {"p": str(os.getpid()), "r": os.environ.get("RANK"), "%": "%"}
    if letter not in values:
        raise RecordError(
            f"NORMFORGE_RECORD={name!r} has {placeholder[0]!r}; it takes %p (the process's id), %r (its RANK) and %%"
        )
    value = values[letter]
    if not value:
        raise RecordError(
            f"NORMFORGE_RECORD={name!r} has '%r', and RANK, which torchrun sets, is not set; write %p, the process's id"
        )
    return value.replace("/", "_")


def compiled_ahead() -> Path | None:
    """NORMFORGE_AOT: the folder of kernels compiled ahead of time that the process takes them from."""
    return _path("NORMFORGE_AOT", AotError)


def generates() -> bool:
    """NORMFORGE_ON_MISS: whether an instance that the table lacks is generated, or else an error."""
    policy = os.environ.get("NORMFORGE_ON_MISS") or "generate"
    if policy not in ("generate", "error"):
        raise SettingError(f"NORMFORGE_ON_MISS={policy!r} is no policy; set it to 'generate' (the default) or 'error'")
    return policy == "generate"


def frozen() -> bool:
    """NORMFORGE_FROZEN: whether nothing may be compiled."""
    return _is_on("NORMFORGE_FROZEN", "compile nothing")


def native_launcher() -> bool:
    """NORMFORGE_NATIVE_LAUNCHER: whether calls may be found and launched by normforge's C, where that can be had."""
    return _is_on("NORMFORGE_NATIVE_LAUNCHER", "launch by normforge's launcher", default="1")


def batch_invariant() -> bool:
    """NORMFORGE_BATCH_INVARIANT: whether a row's bits may depend on no other row, nor on how many there are."""
    return _is_on("NORMFORGE_BATCH_INVARIANT", "the bits of a row depend on no batch")


def fuse_from() -> int:
    """NORMFORGE_FUSE_FROM: the fewest elements of a tensor that a patched block adds and normalises in one kernel.

    Without gradients, it is also the fewest of queries that are normalised and rotated in one kernel.

    Fused, a training step saves the GPU passes over them, and costs the host some 50 us. Of the models of
    `python -m benchmarks models`, on an H200 at 2baeb10: at 8 Mi elements T5 and DiT gained 0.5 %, and Qwen3 under
    autocast, which is bound by the host, lost 9 %; at 12.3 Mi and more ViT gained 3 and 4 %, and others up to 2 %.
    """
    setting = os.environ.get("NORMFORGE_FUSE_FROM") or "12582912"
    if not (setting.isascii() and setting.isdecimal()):
        raise SettingError(
            f"NORMFORGE_FUSE_FROM={setting!r} is no number of elements; set it to an integer of at least 0, such as "
            "12582912 (the default)"
        )
    return int(setting)


def engine_is_invariant(variable: str) -> bool:
    """VLLM_BATCH_INVARIANT: whether an engine's own switch asks for the same; the engine refuses what is no number."""
    return (os.environ.get(variable) or "0") != "0"


def _is_on(variable: str, meaning: str, default: str = "0") -> bool:
    setting = os.environ.get(variable) or default
    if setting not in ("0", "1"):
        raise SettingError(f"{variable}={setting!r} is neither 1 ({meaning}) nor 0; set it to one of them")
    return setting == "1"


def lists_us(variable: str) -> bool:
    """Return True if SGLANG_PLUGINS or VLLM_PLUGINS, an engine's list of plugins, names normforge."""
    return "normforge" in (name.strip() for name in os.environ.get(variable, "").split(","))


def _path(variable: str, error: type[NormforgeError], replaced: str | None = None) -> Path | None:
    """Return the path in a variable, or its replacement; None if the path is unset or empty.

    A relative path starts at the working folder of normforge's import, not at the current working folder.

    Raises:
        NormforgeError: the given error; there can be no such path.
    """
    value = os.environ.get(variable) if replaced is None else replaced
    if not value:
        return None
    # An absolute or a home's path is what joining gives back.
    return named(value if value.startswith("~") or _START is None else _START / value, error)


# An index or a recording of every kernel there is takes some MiB.
_MOST_BYTES = 256 << 20
_ROOT = 0


def named(path: str | os.PathLike[str], error: type[NormforgeError]) -> Path:
    """Return the absolute path that a call or a variable names.

    Raises:
        NormforgeError: the given error; there can be no such path.
    """
    try:
        return Path(path).expanduser().resolve()
    except (TypeError, ValueError, RuntimeError, OSError) as problem:
        # Another type, a NUL, an unknown user's home, a link to itself, a working folder that is gone.
        raise error(f"{str(path)!r} is no path ({problem}); name another") from problem


def contents(path: Path) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: there is none that can be read, or it is too large to be one of normforge's.
    """
    # Opening a pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(0, f"it is longer than {_MOST_BYTES >> 20} MiB")
    return data


def why_open(path: Path, owned: int) -> str | None:
    """Return why another user could have put code at a path, or None if no user but this one and root could.

    Args:
        path: a file or a folder that exists.
        owned: how many parts of the path, counted from its end, this user or root must own. A folder above them may be
            another user's: whatever that user moves there is the other user's too.
    """
    path = path.parent.resolve() / path.name
    for place, part in enumerate((path, *path.parents)):
        about = part.lstat()
        if stat.S_ISLNK(about.st_mode):
            return f"{part} is a symbolic link"
        if place < owned and about.st_uid not in (os.geteuid(), _ROOT):
            return f"{part} belongs to user {about.st_uid}"
        # With the sticky bit, as in /tmp, only the owner may rename a file, so the checked parts of the path stay.
        if about.st_mode & stat.S_IWOTH and not (place and about.st_mode & stat.S_ISVTX):
            return f"{part} can be written by everybody (chmod o-w {part} ends that)"
    return None
