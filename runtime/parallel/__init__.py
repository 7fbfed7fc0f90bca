"""Norms in models that are sharded over ranks; importing it imports torch.distributed. Stands on nothing."""

from .sequence import SequenceParallel

__all__ = ["SequenceParallel"]
