"""Generated modules as tests of the kernels themselves want them: with every pipeline that a mode may have."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from normforge.codegen import emit
from normforge.codegen.model import Mode, Part, Pipeline


def pipelines_of(mode: Mode) -> tuple[Pipeline, ...]:
    """The pipelines that a mode may have; a row is spread only if its statistics are all there is to exchange."""
    return tuple(p for p in Pipeline if p is not Pipeline.SPREAD or mode.streams or mode.is_backward)


def kernel_of(package: Path, mode: Mode, part: Pipeline | Part) -> Any:
    """A kernel of a mode, whose module is rendered into an importable folder if it is not there."""
    path = package / f"{mode.name}.py"
    if not path.exists():
        path.write_text(emit.render_module(mode, pipelines_of(mode)))
        importlib.invalidate_caches()
    return getattr(importlib.import_module(f"{package.name}.{mode.name}"), mode.kernel(part))
