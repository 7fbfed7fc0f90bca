"""Runs pytest in forks of a process that has imported torch and Triton, which takes longer than most chosen tests.

It is run by its path, imports nothing of this repository, and so leaves a fork free to import a copy of it. Each line
of its standard input is a request in JSON (`Runner` in trial.py writes them), and each of its output the exit status of
pytest, or null for one that was ended because it took too long.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

_IMPORTED = ("torch", "torch.testing", "triton", "triton.language", "numpy", "pytest", "jinja2", "yaml")
# Seconds between looks at a fork.
_STEP = 0.02


def main() -> None:
    """Serve requests until there are no more."""
    # What Python puts there is this file's folder.
    del sys.path[0]
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _test(request)
        print(json.dumps(_status(child, request["patience"])), flush=True)


def _test(request: dict[str, Any]) -> None:
    """Become a run of pytest; this does not return."""
    status = 70
    try:
        # In a session of its own, so that processes which the tests start can be ended with them.
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(old, new)
        os.chdir(request["tree"])
        os.environ.update(request["environment"])
        sys.path[:0] = [request["tree"], request["environment"]["PYTHONPATH"]]
        status = int(importlib.import_module("pytest").main(request["arguments"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(child: int, patience: float) -> int | None:
    until = time.monotonic() + patience
    status: int | None = None
    while True:
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(found)
            break
        if time.monotonic() > until:
            break
        time.sleep(_STEP)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return status


if __name__ == "__main__":
    main()
