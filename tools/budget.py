"""The time that a command may take."""

from __future__ import annotations

import time


class OutOfTimeError(Exception):
    """The time is spent: not what went wrong, but what ends a measurement that has taken all it was given."""


class Budget:
    """So many minutes from now on, or any number."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def seconds(self) -> float | None:
        """What is left; None without an end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Go on if there is time left.

        Raises:
            OutOfTimeError: there is none.
        """
        if self.seconds == 0:
            raise OutOfTimeError
