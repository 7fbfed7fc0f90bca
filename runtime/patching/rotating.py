"""Norms of queries and keys that a model's own forward rotates, computed together with the rotary embedding.

An attention module that `patch` fused makes a `Rotary` for each call. Between the norms and the function that rotates,
the forward only transposes their results (see `text`), so that the norms can wait for the rotation. A function like
Llama's `apply_rotary_pos_emb(q, k, cos, sin)` is identified by calling it on random inputs of a few sizes, as in
`modulating`. A function that computes something else for other sizes or larger values is not recognised as different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.backend import is_served
from ..calls.plan import PLAIN
from ..codegen.values import ACROSS_HEADS
from ..errors import PatchError
from ..families.eager import embedded
from ..families.functional import qk_norm_rope
from ..selection.invariance import is_on
from ..settings import fuse_from
from .probing import Draw, called, recognised
from .sums import fused, is_bare, is_of_length, options_of, vectors_of

# Samples, tokens, heads of q and of k, and columns of a head. The last one is close to a model's own.
_SIZES = ((2, 3, 4, 2, 8), (3, 1, 2, 1, 16), (2, 260, 2, 2, 64))


@dataclass(frozen=True)
class Formula:
    """A function of q and k (B, heads, T, N), cosines and sines (B, T, N): it rotates q and k.

    Attributes:
        interleaved: whether columns 2 i and 2 i + 1 form a pair; otherwise i and i + half of those that are rotated.
        reads_half: whether it reads the first half of the tables' columns, a column for each pair.
        may_pass: whether it takes tables of fewer columns, and leaves the columns behind those as they are.
        keeps_dtype: whether it takes tables in fp32 and returns the dtype of the rows, as OLMo 2's does.
    """

    interleaved: bool
    reads_half: bool
    may_pass: bool
    keeps_dtype: bool

    def trials(self, function: Any, draw: Draw) -> Iterator[tuple[Any, Any]]:
        """Yield what the function returns for random operands, each with what this formula gives."""
        cases = product(_SIZES, (False, True)[: 1 + self.may_pass], (False, True))
        for (samples, tokens, q_heads, k_heads, n), few, shared in cases:
            rows = [draw(samples, heads, tokens, n) for heads in (q_heads, k_heads)]
            tables = draw(2, 1 if shared else samples, tokens, n // 2 if few else n).detach()
            tables = tables.to(self.dtype_of_tables(tables.dtype))
            before, half = tables.clone(), tables.shape[-1] // 2
            by_cos, by_sin = (each.unsqueeze(1) for each in self.read(*before))
            parts = [x.tensor_split([2 * half], -1) for x in rows]
            wanted = [
                torch.cat((embedded(x, by_cos, by_sin, half, self.interleaved), passed), -1).to(x.dtype)
                for x, passed in parts
            ]
            yield function(*rows, *tables), tuple(wanted)
            yield tables, before

    def dtype_of_tables(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the tables that it takes with rows of a dtype."""
        return torch.promote_types(dtype, torch.float32) if self.keeps_dtype else dtype

    def read(self, *tables: torch.Tensor) -> list[torch.Tensor]:
        """Return the columns of tables that are read."""
        return [each[..., : each.shape[-1] // 2] if self.reads_half else each for each in tables]


@dataclass(frozen=True)
class FormulaOfOne:
    """A function of one tensor, cosines and sines, which rotates the tensor.

    Attributes:
        pair: what it computes of q and of k, each by itself.
        heads_first: whether its tensor is (B, heads, T, N); otherwise (B, T, heads, N).
    """

    pair: Formula
    heads_first: bool

    def trials(self, function: Any, draw: Draw, *how: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what the function returns for random operands, each with what this formula gives."""

        def rotate(q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
            turned = [called(function, self._laid_out(x), tables, *how) for x in (q, k)]
            return tuple(map(self._laid_out, turned))

        return self.pair.trials(rotate, draw)

    def fused(self, block: torch.nn.Module, norm: Any, x: Any, tables: tuple[Any, ...]) -> Any:
        """Return x, normalised and rotated; None where both are left apart."""
        if not PLAIN.issuperset((x.__class__,)) or x.dim() != 4 or not _pays(x):
            return None
        rows = [self._laid_out(x)]
        args = (self.pair, [norm], rows, rows, tables)
        rotated = fused(block, norm, "a rotary embedding", _normalised_and_rotated, *args)
        return None if rotated is None else self._laid_out(rotated[0])

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.heads_first else x.transpose(1, 2)


def _formulas() -> Iterator[Formula]:
    for keeps_dtype, may_pass in product((True, False), (True, False)):
        for interleaved, reads_half in ((False, False), (True, True), (True, False)):
            yield Formula(interleaved, reads_half, may_pass, keeps_dtype)


def formulas_of_one() -> Iterator[FormulaOfOne]:
    """Yield the rotations of one tensor."""
    for pair, heads_first in product(_formulas(), (True, False)):
        yield FormulaOfOne(pair, heads_first)


# Returns the rotation that a function of q, k, cos and sin computes, or None.
formula_of: Callable[..., Formula | None] = partial(recognised, _formulas)


class Rotary:
    """The norms of queries and keys in one call of a forward, which are computed with their rotary embedding."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._block = block
        self._waiting: dict[str, Any] = {}
        self._pays: bool | None = None

    def normalise(self, which: str, norm: Any, x: Any) -> Any:
        """Return norm(x), or x, whose norm waits for `rotate`.

        Args:
            which: "q" or "k".
            norm: the norm, or whatever else the forward calls by its name.
            x: its input.
        """
        # Compiled graphs show the norm and the rotation.
        if is_dynamo_compiling() or not PLAIN.issuperset((x.__class__,)) or x.dim() not in (3, 4):
            return norm(x)
        if self._pays is None:
            self._pays = _pays(x)
        if not (self._pays and is_bare(norm)):
            return norm(x)
        self._waiting[which] = norm, x, _state(x)
        return x

    def rotate(self, function: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        """Return function(q, k, cos, sin) of the normalised q and k."""
        if not self._waiting:
            return function(q, k, cos, sin)
        norms, sources = zip(*[self._norm_of(which, x) for which, x in (("q", q), ("k", k))], strict=True)
        formula = None if None in norms else formula_of(function)
        if formula is not None:
            args = (formula, norms, sources, (q, k), (cos, sin))
            rotated = fused(self._block, norms[0], "a rotary embedding", _normalised_and_rotated, *args)
            if rotated is not None:
                return rotated
        return function(*map(_normalised, norms, sources, (q, k)), cos, sin)

    def _norm_of(self, which: str, x: Any) -> tuple[Any, Any]:
        """Return the norm that waits, and the rows that it was called with."""
        norm, source, state = self._waiting.pop(which, (None, None, None))
        if norm is not None and _state(x) != state:
            raise PatchError(
                f"rows were written to, or grad mode was set, between a {type(norm).__name__} and the rotary "
                "embedding, which patch computes together; unpatch the model, and patch it with fuse=False"
            )
        return norm, source


def _normalised(norm: Any, source: Any, x: Any) -> Any:
    """Return the norm of rows as the forward has them now: transposed, or viewed as heads and then transposed."""
    if norm is None or x.shape[-1] == source.shape[-1]:
        return x if norm is None else norm(x)
    return norm(source).reshape(x.transpose(1, 2).shape).transpose(1, 2)


def _pays(x: torch.Tensor) -> bool:
    """Return True if one kernel for rows like x saves time, or must be used for any number of rows.

    Without gradients it takes the host longer than norms and rotation: Qwen3 decoded in 15.4 ms a token on an H200
    (f001d00), and in 14.3 ms without. A CUDA graph has no such time.
    """
    is_recorded = torch.is_grad_enabled() and x.requires_grad
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return is_recorded or is_captured or is_on() or x.numel() >= fuse_from()


def _state(x: torch.Tensor) -> tuple[Any, ...]:
    """Return how often a tensor was written to, which inference tensors do not count, its type, and grad mode."""
    return None if x.is_inference() else x._version, x.dtype, torch.is_grad_enabled()


def _normalised_and_rotated(
    formula: Formula, norms: Sequence[Any], sources: Sequence[Any], rows: Sequence[Any], tables: Any
) -> tuple[torch.Tensor, ...] | None:
    """Return q and k, or one tensor, normalised and rotated; None where the kernel's results would differ.

    Args:
        formula: of the rotation.
        norms: one for each tensor.
        sources: what the norms were called with.
        rows: the same as (B, heads, T, N).
        tables: cosines and sines.
    """
    if any(x.dim() != 4 for x in rows):
        return None
    (cos, sin), heads = tables, [x.transpose(1, 2) for x in rows]
    weights, biases = zip(*map(vectors_of, norms), strict=True)
    if not PLAIN.issuperset(map(type, tables)) or not is_served((*heads, *weights, cos, sin)):
        return None
    q, options = heads[0], [options_of(norm, x.dtype, x) for norm, x in zip(norms, heads, strict=True)]
    word, eps, weight_offset, y_dtype, cast = options[0]
    samples, tokens, _, n = q.shape
    *leading, rotated = cos.shape if cos.dim() else (0,)
    is_across = any(source.shape[-1] != n for source in sources)
    sizes = [x.shape[2] * n if is_across else n for x in heads]
    is_fitting = (
        options == options[:1] * len(options)
        and {y_dtype} == {each.dtype for each in heads}
        and {formula.dtype_of_tables(y_dtype)} == {each.dtype for each in tables}
        and biases == (None,) * len(biases)
        and not (weight_offset and None in weights)
        and all((*x.shape[:2], x.shape[3]) == (samples, tokens, n) for x in heads)
        and all(is_of_length(norm, size) for norm, size in zip(norms, sizes, strict=True))
        and not (is_across and [source.shape for source in sources] != [(samples, tokens, size) for size in sizes])
        and leading in ([1, tokens], [samples, tokens])
        and cos.shape == sin.shape
        and not (cos.requires_grad or sin.requires_grad)
        and (rotated == n or (formula.may_pass and 0 < rotated < n))
        and rotated % 2 == 0
    )
    if not is_fitting:
        return None
    if len(heads) == 1:
        # No keys; a view with a gradient would add zeros to that of q.
        heads, weights = [q, q.detach()[:, :, :0]], (*weights, None)
    y = qk_norm_rope(
        *(*heads, *weights, *formula.read(cos, sin)),
        norm=word + ACROSS_HEADS * is_across,
        eps=eps,
        interleaved=formula.interleaved,
        rotary_dim=rotated,
        weight_offset=weight_offset,
        cast=cast,
    )
    return tuple(each.transpose(1, 2) for each in y)
