"""One process of the start-up benchmark: imports, a training step, and how long both took, as a line of JSON.

    python -m benchmarks.first_result STARTED torch|normforge cuda|cpu

STARTED is the time at which the process was asked for. Nothing but the standard library may be imported before it is
due: what is imported is what is timed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

M, N = 16, 4096
_MODULES = {"torch": "torch.nn.functional", "normforge": "normforge"}


def main(started: float, what: str, device: str) -> None:
    """Print the seconds from `started` to the first gradient, and those of them after torch and the device were ready.

    Args:
        started: `time.time()` of when the process was asked for.
        what: "torch", or "normforge".
        device: where.
    """
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    x, dy = (torch.ones(M, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    x[:, ::2] = -1
    weight, bias = (torch.ones(N, dtype=torch.bfloat16, device=device) for _ in range(2))
    wait()
    ready = time.time()

    layer_norm = importlib.import_module(_MODULES[what]).layer_norm
    given = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = layer_norm(x, (N,), weight, bias)
    _, dweight, dbias = torch.autograd.grad(y, given, dy)
    wait()
    done = time.time()

    # A row of 1 and -1 is its own norm.
    torch.testing.assert_close(y, x + bias)
    torch.testing.assert_close(dbias, torch.full_like(bias, M))
    torch.testing.assert_close(dweight, M * x[0])
    print(json.dumps({"total_s": done - started, "norm_s": done - ready}))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3])
