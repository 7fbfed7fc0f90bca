"""Errors that the command line reports without a traceback."""

from __future__ import annotations

# Exit statuses besides 0: something to mend in the command, or goals that are not reached.
USAGE, SHORT = 2, 1


class UsageError(ValueError):
    """The command asks for something that is not there; its text says what to do instead."""
