"""Norms of sharded models: a parallel style, and rows that are split over ranks. Importing it imports DTensor.

Stands on calls/, selection/ and upstream/.
"""

from .sequence import SequenceParallel
from .split import split_layer_norm, split_rms_norm

__all__ = ["SequenceParallel", "split_layer_norm", "split_rms_norm"]


def __dir__() -> list[str]:
    return sorted(__all__)
