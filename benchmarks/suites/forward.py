"""The forward pass over row lengths."""

from __future__ import annotations

from ..cells import Method, Suite, Task
from .shapes import sweep

SUITE = Suite("forward", "Forward", Method.COLD, tuple(sweep(Task.FORWARD)))
