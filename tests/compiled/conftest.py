"""Makes each test of this folder run on one core."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Tensors here are small: a second thread only waits, and takes a core from the other workers while it does.
    torch.set_num_threads(1)
