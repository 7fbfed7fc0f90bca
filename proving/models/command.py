"""The command: python -m proving models."""

from __future__ import annotations

import argparse
import inspect
import platform
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.environment import revision_of

from ..evidence import add_options, conclude
from .survey import NORM, summary, survey

ROOT = Path(__file__).resolve().parent.parent.parent
_PAGE = Path("docs/reference/huggingface.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every class, and print the summary."""
    parser = argparse.ArgumentParser(
        prog="python -m proving models",
        description="Which norm classes of Hugging Face's transformers, which has to be installed, patch takes.",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install transformers")
    header = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "revision": options.revision or revision_of(ROOT),
    }
    found = survey(_classes(Path(transformers.__path__[0])), header)
    conclude(options, "huggingface", found, summary, page=_PAGE)
    return 0


def _classes(package: Path) -> Iterator[type[torch.nn.Module]]:
    for path in sorted((package / "models").glob("*/modeling_*.py")):
        if not re.search(r"^class \w*(RMSNorm|LayerNorm)\w*\(", path.read_text(), re.MULTILINE):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        for cls in vars(import_module(name)).values():
            is_own = inspect.isclass(cls) and issubclass(cls, torch.nn.Module) and cls.__module__ == name
            if is_own and NORM.search(cls.__name__):
                yield cls
