"""Generated modules as tests of the kernels themselves want them: with every pipeline that a mode may have."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from normforge.codegen import emit
from normforge.codegen.model import Mode
from normforge.codegen.values import Part, Pipeline


def kernel_of(package: Path, mode: Mode, part: Pipeline | Part) -> Any:
    """A kernel of a mode, whose module is rendered into an importable folder if it is not there."""
    path = package / f"{mode.name}.py"
    if not path.exists():
        path.write_text(emit.render_module(mode, mode.pipelines))
        importlib.invalidate_caches()
    return getattr(importlib.import_module(f"{package.name}.{mode.name}"), mode.kernel(part))
