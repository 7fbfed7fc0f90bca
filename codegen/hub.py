"""Render a repository for Hugging Face's `kernels`: emitted modules and a launcher, importing nothing of normforge."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import tiling
from .emit import render, render_folder
from .instance import ANY, Instance, Tile, Tiles
from .manifest import load
from .values import Pipeline

NAME = "normforge-norms"
PACKAGE = NAME.replace("-", "_")
VERSION = 0
# Torch's backends that Triton compiles for here; each has a folder with the same files.
BACKENDS = ("cuda", "rocm")

MARK = "# Written by `normforge hub`."

# The kernels that the layers launch: forward with the statistics that gradients need, and gradients.
_MODES = """\
groups:
  plain:
    norm: [layer, rms]
    dtype_in: [fp16, bf16, fp32]
    save_mv: true
  plain_gradients:
    direction: bwd
    norm: [layer, rms]
    dtype_in: [fp16, bf16, fp32]
  rounded:
    norm: rms
    dtype_in: [fp16, bf16]
    cast: before_weight
    save_mv: true
  rounded_gradients:
    direction: bwd
    norm: rms
    dtype_in: [fp16, bf16]
    cast: before_weight
"""

_OWN = ("launch", "layers", "norms")


@dataclass(frozen=True)
class Repository:
    """A repository's files.

    Attributes:
        name: the repository's name on the Hub, `owner/name`.
        files: text by path.
    """

    name: str
    files: Mapping[str, str]


def repository(owner: str) -> Repository:
    """Render a repository: its sources, as `kernel-builder` takes them, and the variants it would build from them.

    A `torch-noarch` kernel is not compiled when it is built, so its variants are copies of the sources with metadata.

    Args:
        owner: the user or organisation on the Hub.
    """
    named = f"{owner}/{NAME}"
    package = _package()
    # A digest of the files, so that two repositories' operators never share a name.
    digest = hashlib.sha256("".join(f"{path}\n{text}" for path, text in sorted(package.items())).encode()).hexdigest()
    values = {"mark": MARK, "title": NAME, "version": VERSION, "backends": BACKENDS, "repository": named}
    values |= {"package": PACKAGE, "layers": layers_of(package["layers.py"])}
    files = {file: render(f"hub/{file}.j2", **values) for file in ("build.toml", "flake.nix", "CARD.md")}
    # `kernel-builder upload` takes the card from beside the variants, where a build would write it.
    files |= {"build/CARD.md": files["CARD.md"]}
    files |= {"tests/__init__.py": f"{MARK}\n", f"tests/test_{PACKAGE}.py": render("hub/test.py.j2", **values)}
    files |= {f"torch-ext/{PACKAGE}/{path}": text for path, text in package.items()}
    for backend in BACKENDS:
        variant = f"build/torch-{backend}"
        unique = f"_{PACKAGE}_{backend}_{digest[:7]}"
        built = {**package, "_ops.py": render("hub/ops.py.j2", mark=MARK, id=unique)}
        files |= {f"{variant}/{path}": text for path, text in built.items()}
        files[f"{variant}/metadata.json"] = _metadata(unique, backend, built)
    return Repository(named, files)


def layers_of(text: str) -> list[tuple[str, str]]:
    """Return the layers of a module's text, each with the first line of its docstring."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [(node.name, (ast.get_docstring(node) or "").partition("\n")[0]) for node in classes]


def _package() -> dict[str, str]:
    """Return the files of the Python package without `_ops.py`, which a build adds."""
    kernels = render_folder(_instances())
    modes = sorted(path.removesuffix(".py") for path in kernels if "_fwd_" in path or "_bwd_" in path)
    values = {"mark": MARK, "modes": modes, "modules": sorted([*modes, "dispatch", "finalise"]), "tiling": tiling}
    package = {"__init__.py": render("hub/package.py.j2", mark=MARK)}
    package |= {f"{name}.py": render(f"hub/{name}.py.j2", **values) for name in _OWN}
    return package | {f"kernels/{path}": text for path, text in kernels.items()}


def _instances() -> list[Instance]:
    return [_alone(instance) for instance in load(Path("hub.yaml"), text=_MODES).instances]


def _alone(instance: Instance) -> Instance:
    """Return the instance with tiles of ANY where programs of its own tiles would wait for one another."""
    others = dict(instance.tiles)[ANY]

    def alone(tile: Tile, other: Tile) -> Tile:
        return other if tile.pipeline is Pipeline.SPREAD else tile

    def tiles(these: Tiles) -> Tiles:
        few, some, many = map(alone, these.by_rows, others.by_rows)
        return Tiles(many, few, some=some, ragged=alone(these.ragged or many, many))

    return replace(instance, tiles=tuple((arch, tiles(these)) for arch, these in instance.tiles))


def _metadata(unique: str, backend: str, files: Mapping[str, str]) -> str:
    digests = {
        path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in sorted(files.items())
    }
    metadata = {
        "name": NAME,
        "id": unique,
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(metadata, indent=2) + "\n"
