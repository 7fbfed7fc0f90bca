"""Helion's pretuned norms, imported from the user's checkout of it: its wheel has the language, not the kernels.

The checkout is named by NORMFORGE_HELION; it should be of the release that is installed. As other peers', this module's
import fails where Helion or the checkout is not there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIABLE = "NORMFORGE_HELION"
_FOLDER = "pretuned_kernels"
_CONFIGURED = re.compile(r"_cuda_sm(\d+)\.py$")


def find() -> Path:
    """Return the folder of pretuned kernels.

    Raises:
        ImportError: it is not named, or not there.
    """
    if VARIABLE not in os.environ:
        raise ImportError(f"{VARIABLE} is not set; set it to a checkout of Helion, which has a folder {_FOLDER}")
    folder = Path(os.environ[VARIABLE]) / _FOLDER
    if not folder.is_dir():
        raise ImportError(f"there is no {folder}; set {VARIABLE} to a checkout of Helion, of the installed release")
    return folder


def load(folder: Path, name: str) -> Callable[..., Any]:
    """One kernel, with the configurations that lie beside it.

    Raises:
        ImportError: there is no such kernel, or no configuration for this GPU. Helion would take a default one.
        Exception: whatever its definition raises.
    """
    path = folder / name / f"{name}.py"
    if not path.is_file():
        raise ImportError(f"there is no {path}; set {VARIABLE} to a checkout of Helion, of the installed release")
    _require_configuration(path)
    # Helion looks up the globals of a kernel in its module's entry.
    known = f"helion_pretuned_{name}"
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[known] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ImportError(f"{path} defines no {name}, as a checkout of Helion does")
    kernel: Callable[..., Any] = getattr(module, name)
    return kernel


def _require_configuration(path: Path) -> None:
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    found = [match[1] for beside in path.parent.iterdir() if (match := _CONFIGURED.search(beside.name))]
    # Kernels tuned for older GPUs serve newer ones.
    if not any(int(capability) <= 10 * major + minor for capability in found):
        raise ImportError(f"{path.parent} has no configuration for sm{major}{minor}, only for {sorted(found)}")


# The search that Helion makes by default needs scikit-learn, and is made, though not run, for pretuned kernels too.
os.environ.setdefault("HELION_AUTOTUNER", "PatternSearch")
importlib.import_module("helion")

_KERNELS = find()
# (x, weight, bias) -> y, with an eps of 1e-5.
layer_norm = load(_KERNELS, "layer_norm")
# (x, weight, eps) -> y.
rms_norm = load(_KERNELS, "rms_norm")
# (y, x, weight, scales, eps, most, residual): y, scales and, over it, residual are written.
per_token = load(_KERNELS, "rms_norm_dynamic_per_token_quant")
# (y, x, weight, scales, eps, most, residual, columns of a group, whether scales are column-major): the same.
per_block = load(_KERNELS, "rms_norm_per_block_quant")
