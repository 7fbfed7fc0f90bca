"""What a device's tiles are looked up by."""

from __future__ import annotations

from functools import cache

import torch


@cache
def architecture(device: torch.device) -> str:
    """A device's architecture as tables of tiles name it: "sm_90" or "gfx942", say; "cpu" for the interpreter."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip is not None:
        # What follows the colon says which features are switched on.
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
