"""Every operator says what it does with DTensors; what the rules say is held by `tests.parallel`, on several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._library.simple_registry import singleton

from . import registered

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

# Operators without a rule, and why none can be kept.
_TWO = "q and k are two tensors of rows; the function refuses DTensors"
UNRULED = {
    f"normforge::qk_norm_rope{end}{twin}": _TWO for end in ("", "_backward", "_cached") for twin in ("", "_invariant")
}


def test_every_operator_has_a_sharding_rule() -> None:
    from torch.distributed.tensor import DTensor

    assert registered.FORWARD
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("normforge::")]
    assert len(names) > 20
    unruled = {name for name in names if singleton.find(name).torch_dispatch_rules.find(DTensor) is None}
    assert unruled == UNRULED.keys()
