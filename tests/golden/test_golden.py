"""The text of a few modules, chosen so that every macro of the templates is in one of them.

Where generated/ holds a text to the byte, the committed module is the golden file; tests/golden holds the other texts.
After an intended change to the templates, run `generate.py` and then `NORMFORGE_UPDATE_GOLDEN=1 pytest tests/golden`,
which writes and removes golden files as needed; review the diff of both folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import pytest
import yaml

from normforge.codegen import calls, emit, tiling
from normforge.codegen.groups import Activation, AnyMode, GroupMode, Span
from normforge.codegen.instance import Bucket, Instance, Tile, Tiles
from normforge.codegen.model import Mode
from normforge.codegen.several import name_of
from normforge.codegen.tile_tables import TileTable, tiles_of
from normforge.codegen.values import Direction, DType, Norm, Pipeline

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent

# Paths of texts that are committed where they are used: that is what is reviewed.
EMITTED = tuple(calls.TEMPLATES)

MODES = tuple(Mode.from_name(name) for name in yaml.safe_load((FOLDER / "modes.yaml").read_text()))

GROUP_MODES = (
    GroupMode(DType.BF16, activation=Activation.SILU, channels_last=True),
    GroupMode(DType.BF16, Direction.BACKWARD, Activation.SILU),
    GroupMode(DType.BF16, span=Span.CHANNELS),
    GroupMode(DType.BF16, Direction.BACKWARD, span=Span.CHANNELS),
    GroupMode(DType.BF16, Direction.BACKWARD, span=Span.CHANNELS_RMS),
)

# Two problems by one kernel, and a third by another one, in one launch.
_GROUPS, _ADDED = (Mode.from_name(name) for name in ("rms_fwd_bf16_fp8_e4m3fn_dq_g128", "rms_fwd_bf16_addst"))
TOGETHER = [(_GROUPS, Pipeline.ONE_PASS), (_GROUPS, Pipeline.ONE_PASS), (_ADDED, Pipeline.ROWS)]

# Not the committed tables: those change with every measurement, and this shows every field of a tile.
_SPREAD = Tile(Pipeline.SPREAD, 1, 4096, 16, resident=1, held=4)
_SPREAD_BACK = Tile(Pipeline.SPREAD, 4, 1024, 4, resident=3)
_HELD = Tile(Pipeline.TWO_PASS, 1, 8192, 32, held=2)
_ENDLESS = Bucket("nbig", 65537, None)
TABLES = {
    "sm_90": TileTable(
        {
            tiling.TileClass(Direction.FORWARD, 2): ((_ENDLESS, Tiles(_SPREAD, _HELD)),),
            tiling.TileClass(Direction.BACKWARD, 2, tiling.Load.ADD): ((_ENDLESS, Tiles(_SPREAD_BACK, _SPREAD_BACK)),),
        }
    )
}


def _texts() -> Iterator[tuple[str, str]]:
    """Yield each file's name, or path if it is committed elsewhere, and its text, made as they are asked for."""
    every: tuple[AnyMode, ...] = (*MODES, *GROUP_MODES)
    for mode in every:
        yield f"{mode.name}.py", emit.render_module(mode, mode.pipelines)
    ladder = tiling.standard_ladder()
    instances = [
        Instance(mode, bucket, tiles_of(mode, bucket, TABLES))
        for mode in MODES
        for bucket in (ladder if mode.norm is Norm.LAYER else ladder[:4])
    ]
    instances += [
        Instance(mode, bucket, tiles_of(mode, bucket, TABLES)) for mode in GROUP_MODES for bucket in ladder[:4]
    ]
    folder = emit.render_folder(instances)
    yield from ((name, folder[name]) for name in _SHARED)
    yield from ((name, text) for name, text in emit.own_files().items() if name.startswith("rotary"))
    yield f"{name_of(TOGETHER)}.py", emit.render_several(TOGETHER)
    yield from ((path, calls.render_calls(path)) for path in EMITTED)


_SHARED = (*[f"{name}.py" for name in emit.DEVICE_FUNCTIONS], "finalise.py", "dispatch.py", "__init__.py")

TEXTS = dict(_texts())


_ANEW = "generated/ gained or lost a module: run `NORMFORGE_UPDATE_GOLDEN=1 pytest tests/golden`"


def _committed(name: str) -> Path:
    """Return the module outside tests/golden that a text may be committed as."""
    return ROOT / (name if name in EMITTED else f"generated/{name}")


def _is_committed(name: str) -> bool:
    path = _committed(name)
    return name in EMITTED or (path.exists() and path.read_text() == TEXTS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_as_reviewed(name: str) -> None:
    golden = FOLDER / f"{name}.golden"
    if os.environ.get("NORMFORGE_UPDATE_GOLDEN") == "1":
        if name in EMITTED:
            _committed(name).write_text(TEXTS[name])
        elif _is_committed(name):
            golden.unlink(missing_ok=True)
        else:
            golden.write_text(TEXTS[name])
    reviewed = golden if golden.exists() else _committed(name)
    assert reviewed.exists(), _ANEW
    assert TEXTS[name] == reviewed.read_text()


def test_golden_files_are_those_that_no_committed_module_holds() -> None:
    held = {path.name for path in FOLDER.glob("*.golden")}
    assert held == {f"{name}.golden" for name in TEXTS if not _is_committed(name)}, _ANEW


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_mask_hides_is_said(name: str) -> None:
    """Without `other` it is undefined, and a NaN times the 0 of a column that does not exist would reach a sum."""
    masked = re.findall(r"tl\.load\(.*mask=.*", TEXTS[name])
    assert [load for load in masked if "other=" not in load] == []


def test_no_device_function_has_two_homes() -> None:
    """A module that calls it would import both, of which a folder need not have the second."""
    names = [
        name for home in emit.DEVICE_FUNCTIONS for name in re.findall(r"^def (\w+)", TEXTS[f"{home}.py"], re.MULTILINE)
    ]
    assert len(names) == len(set(names))


# The head of a macro, and its name.
_MACRO = re.compile(r"{% macro (\w+)\(.*?%}\n?", re.DOTALL)


def test_a_golden_file_shows_every_macro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each macro is expanded for one of the texts."""
    emit.clear_caches()
    environment = emit.environment()
    loader = environment.loader
    assert loader is not None
    original = loader.get_source
    macros, expanded = set[tuple[str, str]](), set[tuple[str, str]]()

    def noted(jinja: jinja2.Environment, template: str) -> tuple[str, str | None, Callable[[], bool] | None]:
        text, path, is_fresh = original(jinja, template)
        macros.update((template, macro) for macro in _MACRO.findall(text))
        return _MACRO.sub(rf"\g<0>{{{{ note('{template}', '\1') }}}}", text), path, is_fresh

    def note(template: str, macro: str) -> str:
        expanded.add((template, macro))
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(loader, "get_source", noted)
        patch.setitem(environment.globals, "note", note)
        for template in emit.TEMPLATES.glob("*.j2"):
            environment.get_template(template.name)
        assert dict(_texts()) == TEXTS
    emit.clear_caches()
    assert expanded == macros != set()
