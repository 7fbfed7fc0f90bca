"""The pass that Inductor runs over each partitioned graph. Importing this module imports Inductor's settings."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._inductor import custom_graph_pass
from torch.fx import Graph

from .._version import __version__
from ..upstream import torch_inductor
from . import backward, forward
from .operators import servable

_log = logging.getLogger(__name__)

# The rules, in the order in which they run.
_RULES: tuple[Callable[..., bool], ...] = (
    forward.join_cast,
    forward.join_sum,
    backward.join_widening,
    backward.join_gradient,
    backward.join_column_sum,
)

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as _Base
else:
    # Since torch 2.13 some passes receive `is_inference`, which this pass hands on.
    _Base = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class FuseNeighbours(_Base):
    """Joins normforge's operators with their neighbours, and then runs the passes that were there before."""

    def __init__(self, before: Any = None) -> None:
        """Take along what was set before: a pass, several of them, or None."""
        self.before = before

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        """Rewrite a graph in place."""
        fuse(graph)
        for each in self._others():
            torch_inductor.run_pass(each, graph, is_inference)

    def uuid(self) -> Any | None:
        """Return the key of this pass in Inductor's caches; None, which disables them, if another pass has no key."""
        others = [each.uuid() if hasattr(each, "uuid") else None for each in self._others()]
        return None if None in others else (_digest(), servable(), *others)

    def _others(self) -> tuple[Any, ...]:
        if self.before is None:
            return ()
        return tuple(self.before) if isinstance(self.before, (list, tuple)) else (self.before,)


def fuse(graph: Graph) -> dict[str, int]:
    """Join what can be joined, and return how often each rule was applied."""
    applied = {rule.__name__: 0 for rule in _RULES}
    for rule in _RULES:
        for node in list(graph.nodes):
            # A rule may have erased this node already.
            if not node._erased and rule(graph, node):
                applied[rule.__name__] += 1
    if any(applied.values()):
        graph.lint()
        _log.debug("joined with norms: %s", applied)
    return applied


@cache
def _digest() -> str:
    """Return a hash of this package's code and of the interface to Inductor."""
    sources = [*Path(__file__).parent.glob("*.py"), Path(torch_inductor.__file__)]
    texts = [__version__, *[path.read_text() for path in sorted(sources)]]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
