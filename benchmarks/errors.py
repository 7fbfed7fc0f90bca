"""What the command line reports without a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """The command asks for something that is not there; its text says what to do instead."""
