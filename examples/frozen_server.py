"""Build the kernels of one's own manifest, narrowed by a filter, and serve with nothing generated or compiled later."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

import normforge
from normforge.codegen import cli

MANIFEST = """\
groups:
  serving:
    norm: [layer, rms]
    dtype_in: bf16
    fadd: [none, pre_add_store]
    n: [4096]
"""


def main() -> list[str]:
    """Return the names of the instances that the server has."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.yaml").write_text(MANIFEST)
        # On the command line: normforge generate --manifest mine.yaml --filter 'rms_*' --out kernels
        cli.main(["--manifest", str(folder / "mine.yaml"), "--filter", "rms_*", "--out", str(folder / "kernels")])
        os.environ["NORMFORGE_ON_MISS"] = "error"
        normforge.load_instances(folder / "kernels")
        try:
            return serve()
        finally:
            del os.environ["NORMFORGE_ON_MISS"]
            normforge.load_instances(None)


def serve() -> list[str]:
    """Answer a request, and refuse one that the folder has no kernel for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        # Everything that the modes come to is compiled now; afterwards compiling is an error.
        normforge.warmup([4096])
        os.environ["NORMFORGE_FROZEN"] = "1"
    x, weight = torch.randn(2, 4096, device=device).bfloat16(), torch.ones(4096, device=device).bfloat16()
    print(normforge.rmsnorm2d_fwd(x, weight).y.shape)
    try:
        normforge.layernorm2d_fwd(x, weight, weight)
    except normforge.errors.MissingInstanceError as error:
        print(f"refused: {error}")
    os.environ.pop("NORMFORGE_FROZEN", None)
    return [entry.name for entry in normforge.instances()]


if __name__ == "__main__":
    main()
