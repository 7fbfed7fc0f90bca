"""`normforge backendbench`: torch's norms in the folders that BackendBench's directory backend loads operators from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ..override.served import OPERATORS

_MARK = "# Written by `normforge backendbench`."

_TEXT = '''\
{mark}
"""aten::{operator} by normforge's kernels, and by torch's own what they do not serve."""

from normforge.override.switch import standalone

_call = standalone("{operator}")


def {folder}_kernel_impl({parameters}):
    return _call({parameters})
'''


def main(args: argparse.Namespace) -> int:
    """Run `normforge backendbench`; returns 0."""
    folder: Path = args.folder
    schemas = {operator: getattr(torch.ops.aten, operator).default._schema for operator in OPERATORS}
    texts = {
        folder / _folder(operator) / _file(operator): _text(operator, [argument.name for argument in schema.arguments])
        for operator, schema in schemas.items()
    }
    for path in texts:
        if (problem := _in_the_way(path)) is not None:
            args.parser.error(problem)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(texts)} operators in {folder}: {', '.join(OPERATORS)}")
    return 0


def _folder(operator: str) -> str:
    """BackendBench's folder of an operator's only overload, in which a dot is two underscores."""
    return f"{operator}__default"


def _file(operator: str) -> str:
    return f"{_folder(operator)}_implementation_v1.py"


def _text(operator: str, parameters: Sequence[str]) -> str:
    return _TEXT.format(mark=_MARK, operator=operator, folder=_folder(operator), parameters=", ".join(parameters))


def _in_the_way(path: Path) -> str | None:
    """Why a file cannot be written, or would not be loaded: BackendBench takes the first of a folder's by name."""
    if path.exists() and not path.read_text().startswith(_MARK):
        return f"{path} is there already and normforge did not write it; move it away, or name another DIR"
    others = sorted(path.parent.glob(f"{path.parent.name}_implementation*.py"))
    if others and others[0] < path:
        return f"BackendBench would load {others[0]} before {path.name}; move it away, or name another DIR"
    return None
