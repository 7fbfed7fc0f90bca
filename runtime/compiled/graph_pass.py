"""The pass that Inductor runs over each partitioned graph. Importing this module imports Inductor's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._inductor import custom_graph_pass
from torch.fx import Graph

from .._version import __version__
from ..upstream import torch_inductor
from .patterns import fuse as fuse
from .patterns import servable

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
        sources = sorted([*Path(__file__).parent.glob("*.py"), Path(torch_inductor.__file__)])
        code = custom_graph_pass.get_hash_for_files(tuple(map(str, sources)), __version__)
        return None if None in others else (code, servable(), *others)

    def _others(self) -> tuple[Any, ...]:
        if self.before is None:
            return ()
        return tuple(self.before) if isinstance(self.before, (list, tuple)) else (self.before,)
