"""The time that a command may take."""

from __future__ import annotations

import time


class OutOfTimeError(Exception):
    """The end of a measurement whose time is spent; no failure."""


class Budget:
    """A number of minutes from now on, or unlimited time."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def seconds(self) -> float | None:
        """The seconds that are left; None without a limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Return if there is time left.

        Raises:
            OutOfTimeError: no time is left.
        """
        if self.seconds == 0:
            raise OutOfTimeError
