"""Several forward kernels in one launch: whether they can share one, and the recipe of the kernel that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..codegen.several import Kernels, suffix
from ..codegen.values import Pipeline
from .assembly import Recipe


def kernels_of(modes: Sequence[Any], recipes: Sequence[Recipe], *, invariant: bool) -> Kernels | None:
    """Return the kernels that one launch runs, or None if each takes a launch of its own.

    All programs of a launch have the warps of the kernel that has most, so that other kernels add a row up in another
    order. Under batch invariance all kernels have to have as many.
    """
    if invariant and len({each.warps for each in recipes}) > 1:
        return None
    # Rows on several strides are numbered in the type of the first problem's M.
    if any(each.types["M"] != recipes[0].types["M"] or each.options for each in recipes):
        return None
    # Neither windows, whose programs walk all rows by the size of the grid, nor programs that wait for one another.
    kernels = [(mode, each.part) for mode, each in zip(modes, recipes, strict=True) if isinstance(each.part, Pipeline)]
    return kernels if len(kernels) == len(recipes) and all(part.takes_rows_alike for _, part in kernels) else None


def recipe_of(recipes: Sequence[Recipe]) -> Recipe:
    """Return the recipe of the kernel that calls the kernels of some problems.

    A launch brings the values of each problem's launch in turn, and then how many programs each problem has. The grid
    follows from the most programs of a problem alone.
    """
    pairs = [(suffix(at), each) for at, each in enumerate(recipes)]
    return Recipe(
        part=None,
        types={
            **{f"{name}{end}": word for end, each in pairs for name, word in each.types.items()},
            **{f"programs{end}": "i32" for end, _ in pairs},
        },
        strides={f"{name}{end}": stride for end, each in pairs for name, stride in each.strides.items()},
        constants={f"{name}{end}": value for end, each in pairs for name, value in each.constants.items()},
        warps=max(each.warps for each in recipes),
        options={},
        grid=lambda m, programs: (programs, len(recipes), 1),
    )
