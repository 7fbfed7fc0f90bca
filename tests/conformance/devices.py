"""Where tests run that need no GPU: in the interpreter, and on a card under the marker of that name."""

from __future__ import annotations

import pytest

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
