"""PyTorch's own operators, eagerly."""

from __future__ import annotations

from ..expressions import torch_builders
from ..provider import Provider

PROVIDERS = (Provider("eager", "torch", ("torch",), torch_builders(lambda function: function), compiles=False),)
