"""What a function comes to in a forked child."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def in_child(function: Callable[[], bool], seconds: float = 20.0) -> bool | None:
    """Return what a function returns in a forked child; None, and end the child, if it is still busy after a while."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return {0: True, 1: False}[os.waitstatus_to_exitcode(status)]
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None
