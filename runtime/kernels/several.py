"""Several forward kernels in one launch: the kernel that calls them, and its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import settings
from ..codegen.model import Mode
from ..codegen.several import Kernels, suffix
from ..codegen.values import Pipeline
from .assembly import Recipe


def join(modes: Sequence[str], recipes: Sequence[Recipe], *, invariant: bool) -> tuple[Kernels, Recipe] | None:
    """Return the kernels of some problems and the recipe of the one that calls them; None if each is launched alone.

    A launch brings the values of each problem's launch in turn, and then how many programs each problem has. The grid
    is the most programs of a problem, and the problems.

    All programs of a launch have the warps of the kernel that has most, so that other kernels add a row up in another
    order. Under batch invariance all kernels have to have as many.
    """
    if not settings.generates() or (invariant and len({each.warps for each in recipes}) > 1):
        return None
    # Rows on several strides are numbered in the type of the first problem's M.
    if any(each.types["M"] != recipes[0].types["M"] or each.options for each in recipes):
        return None
    # Neither windows, whose programs walk all rows by the size of the grid, nor programs that wait for one another.
    kernels = [
        (Mode.from_name(mode), each.part)
        for mode, each in zip(modes, recipes, strict=True)
        if isinstance(each.part, Pipeline) and each.part.takes_rows_alike
    ]
    if len(kernels) < len(recipes):
        return None
    pairs = [(suffix(at), each) for at, each in enumerate(recipes)]
    recipe = replace(
        recipes[0],
        types={
            **{f"{name}{end}": word for end, each in pairs for name, word in each.types.items()},
            **{f"programs{end}": "i32" for end, _ in pairs},
        },
        strides={f"{name}{end}": stride for end, each in pairs for name, stride in each.strides.items()},
        constants={f"{name}{end}": value for end, each in pairs for name, value in each.constants.items()},
        warps=max(each.warps for each in recipes),
    )
    return kernels, recipe
