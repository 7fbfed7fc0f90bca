"""Folders of generated kernels, written without the generator's own file handling."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from normforge.codegen.emit import render_folder
from normforge.codegen.instance import ANY, Instance, Tile, Tiles
from normforge.codegen.model import Mode
from normforge.codegen.tile_tables import tiles_of
from normforge.codegen.tiling import standard_ladder
from normforge.codegen.values import DType, Norm
from normforge.selection.table import Entry

PLAIN = Mode(Norm.LAYER, DType.FP32, DType.FP32)
RMS = Mode(Norm.RMS, DType.FP32, DType.FP32)


def instance(mode: Mode, n: int, tile: Tile | None = None) -> Instance:
    """The standard ladder's instance for one row length, with a tile of one's own if given."""
    bucket = next(bucket for bucket in standard_ladder() if n in bucket)
    return Instance(mode, bucket, ((ANY, Tiles(tile, tile)),) if tile else tiles_of(mode, bucket))


def write(folder: Path, instances: Iterable[Instance]) -> Path:
    """Write a folder that holds exactly these instances, over what it held."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for name, text in render_folder(tuple(instances)).items():
        (folder / name).write_text(text)
    return folder


def distinct_tiles(entry: Entry) -> tuple[Tile, ...]:
    """Return every tile that an instance may run with, on whichever architecture, each once."""
    return tuple(dict.fromkeys(tile for _, tiles in entry.tiles for tile in tiles.every))
