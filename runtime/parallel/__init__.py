"""Norms of sharded models: a parallel style, norms of split rows, and norms of partial sums.

Importing the package imports DTensor.

Stands on families/, calls/, codegen/, selection/ and upstream/.
"""

from .all_reduce import AllReduceNorm
from .sequence import SequenceParallel
from .split import split_layer_norm, split_rms_norm

__all__ = ["AllReduceNorm", "SequenceParallel", "split_layer_norm", "split_rms_norm"]


def __dir__() -> list[str]:
    return sorted(__all__)
