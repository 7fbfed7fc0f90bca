"""A process that is sanitised: it makes calls, each of tensors that end where their memory does, and says which."""

from __future__ import annotations

import sys

import torch

from ..parts import told
from .cells import every, share

STARTS, BROKEN, DONE = "sanitizer cell:", "sanitizer broken:", "sanitizer done:"


def main(part: int, parts: int) -> None:
    """Make the calls of one of several shares, counted from 1; report each call that fails."""
    cells, device = share(every(), part, parts), torch.device("cuda")
    for cell in cells:
        print(STARTS, cell.name, flush=True)
        try:
            cell.call(device)
            torch.cuda.synchronize()
        except Exception as problem:
            print(BROKEN, told(problem), flush=True)
    print(DONE, len(cells), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
