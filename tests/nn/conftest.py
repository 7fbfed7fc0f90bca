"""What patched blocks compute together."""

from __future__ import annotations

import pytest

from normforge.families import post_add
from normforge.patching import modulating, rotating, sums

from .models import Counted


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return how often a norm was computed together with what is beside it; sums of any size are fused."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    return Counted(
        monkeypatch,
        sum_before=(sums, "add_ahead"),
        # The gradient of its input has that of the sum behind added.
        input_added=(sums, "norm_of_summand"),
        sum_behind=(post_add, "normalise"),
        # And with another norm behind the sum behind.
        norm_behind=(post_add, "add_ahead"),
        modulation=(modulating.Formula, "fused"),
        rotations=(rotating, "_normalised_and_rotated"),
    )
