"""From a program that is recorded to one that serves and compiles nothing, as the documentation tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ..docs.pages import ROOT, blocks, doc
from ..thorough import THOROUGH

pytestmark = pytest.mark.compile

# The README's own: a model that is patched, trained by a step here, and a fused kernel.
_BLOCKS = [block.source for block in blocks(ROOT / "README.md") if block.language in ("pycon", "python")]
_PROGRAM = f"""
torch.manual_seed(0)
{_BLOCKS[0]}
y.sum().backward()
{_BLOCKS[1]}
"""


def binaries(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*.cubin")]


# The programs of the page: pip is not run, and what needs a GPU has the stand-in.
_WRAPPERS = {
    "pip": "exit 0",
    "normforge": """
if [ "$1" = warmup ] && [ "$2" != --list ]; then exec {python} {here}/stand_in.py normforge "$@"; fi
exec {python} -m normforge "$@"
""",
    "python": 'exec {python} {here}/stand_in.py "$@"',
}
_STAND_IN = """
import json, os, runpy, sys
from pathlib import Path
from tests.stand_in_gpu import on_an_h200
with on_an_h200():
    import normforge
    from normforge.kernels.obtain import obtained
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "normforge":
        from normforge.tools import cli
        assert cli.main(sys.argv[1:]) == 0
    else:
        runpy.run_path(sys.argv[0])
frozen = os.environ.get("NORMFORGE_FROZEN", "0")
keys = sorted(key.portable for key, _ in obtained())
Path(f"{Path(sys.argv[0]).stem}.{frozen}.json").write_text(json.dumps(keys))
"""
_SERVE = f"import torch, normforge\n{_PROGRAM}"


@THOROUGH
def test_the_page_that_tells_it(tmp_path: Path) -> None:
    """Ten commands, of which pip's alone is not run."""
    (page,) = [block.text for block in blocks(doc("deploy")) if "normforge merge" in block.text]
    assert len(page.splitlines()) == 10
    (tmp_path / "bin").mkdir()
    for name, text in _WRAPPERS.items():
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/bash\n{text.strip().format(python=sys.executable, here=tmp_path)}\n")
        script.chmod(0o755)
    (tmp_path / "stand_in.py").write_text(_STAND_IN)
    (tmp_path / "serve.py").write_text(_SERVE)
    dropped = ("NORMFORGE_", "TRITON_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment |= {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "NORMFORGE_CACHE": str(tmp_path / "generated")}
    # On the server nothing is compiled into an empty cache.
    frozen = page.replace("export NORMFORGE_AOT", f"export TRITON_CACHE_DIR={tmp_path / 'empty'} NORMFORGE_AOT")
    done = subprocess.run(
        ["bash", "-eu", "-c", frozen], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    recorded, loaded, served = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("serve.0", "normforge.1", "serve.1")
    )
    assert len(recorded) >= 5
    assert recorded == loaded == served
    assert f"{len(recorded)} kernels for gfx942 in compiled/gfx942: {len(recorded)} compiled" in done.stdout
    assert not binaries([tmp_path / "empty"])
    assert not list((tmp_path / "generated").rglob("*.py"))
