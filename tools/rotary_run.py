"""Norms of heads with their rotary embedding on random tensors: their kernel, compared with the fp64 reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .. import reference
from ..calls.outputs import LayerNormOutput
from ..dtypes import TORCH_DTYPES
from ..families.functional import qk_norm_rope, qk_norm_rope_bwd
from ..families.operands import GroupNormGradients
from ..kernels.rotary import ACROSS, BACKWARD, CACHE, FORWARD
from ..reference.norms import ReferenceOutput
from .compare import Finding, compare, compare_gradients, unequal
from .measured_run import Run
from .problem import PACKED
from .problem_tensors import SEED
from .rotary_problem import RotaryProblem

_Outputs = tuple[torch.Tensor | None, ...]


def prepare(problem: RotaryProblem, device: torch.device) -> Run[_Outputs]:
    """Make a problem's tensors, so that it can be run on a device: q and k are heads of one packed tensor.

    Raises:
        NormforgeError: no kernel serves the problem.
    """
    generator = torch.Generator(device).manual_seed(SEED)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.empty(shape, device=device).uniform_(-0.5, 0.5, generator=generator)
        return drawn.to(TORCH_DTYPES[problem.dtype_in])

    def packed() -> list[torch.Tensor]:
        q, k = problem.q_heads, problem.k_heads
        heads = draw(problem.m, q + (PACKED - 1) * k, problem.n)
        return [heads[:, :q], heads[:, q : q + k]]

    rows, arrived = packed(), packed()
    lengths = [problem.n * (x.shape[1] if problem.norm.is_across else 1) for x in rows]
    weights = [draw(n) if x.shape[1] else None for x, n in zip(rows, lengths, strict=True)]
    rows_of_tables = problem.m + 3 * (problem.positions > 0)
    angles = 2 * torch.pi * draw(rows_of_tables, problem.rotary_dim // 2).float()
    cos, sin = angles.cos(), angles.sin()
    words: dict[str, Any] = {name: getattr(problem, name) for name in ("norm", "eps", "interleaved", "rotary_dim")}
    words |= {"cast": problem.cast, "mrope_section": problem.section, "mrope_interleaved": problem.alternates}
    if problem.positions:
        size = (problem.m,) if problem.section is None else (3, problem.m)
        words["positions"] = torch.randint(rows_of_tables, size, device=device, generator=generator)
    if problem.cache is not None:
        words |= _paged(problem, device, generator)

    cos_rows, sin_rows = (_of_tokens(problem, table, words.get("positions")) for table in (cos, sin))
    turn = _Turn(cos_rows, sin_rows, problem.interleaved)

    def check(outputs: _Outputs) -> tuple[Finding, ...]:
        found: list[Finding] = []
        for at, own in enumerate("qk"):
            exact = _Exact(problem, rows[at], weights[at], turn)
            if rows[at].shape[1]:
                parts = exact.gradients(arrived[at], outputs[at::2]) if problem.backward else exact.output(outputs[at])
                names = {"y": own, "dx": f"d{own}", "dweight": f"d{own}_weight"}
                found += [part._replace(name=names[part.name]) for part in parts]
        return (*found, *([_cached(outputs, words)] if CACHE in words else []))

    def call() -> _Outputs:
        if problem.backward:
            return qk_norm_rope_bwd(*operands, **words)
        return (*qk_norm_rope(*operands, **words), *([words[CACHE]] if CACHE in words else []))

    kernel = BACKWARD if problem.backward else FORWARD
    name = ACROSS[kernel] if problem.norm.is_across else kernel
    operands: Any = (*(arrived if problem.backward else ()), *rows, *weights, cos, sin)
    # No table has an instance: one module has the kernels of all such calls.
    return Run(names=lambda: (name, name), call=call, validate=check, operands=(*operands, *words.values()))


def _of_tokens(problem: RotaryProblem, table: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return each token's row of a table, of which pairs may have one position of three."""
    if positions is None or problem.section is None:
        return table if positions is None else table[positions]
    pairs = range(problem.rotary_dim // 2)
    axes = [each for each, count in enumerate(problem.section) for _ in range(count)]
    if problem.alternates:
        axes = [pair % 3 if pair < 3 * problem.section[pair % 3] else 0 for pair in pairs]
    return torch.stack([table[positions[axis], pair] for axis, pair in zip(axes, pairs, strict=True)], -1)


def _paged(problem: RotaryProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a paged cache of keys and the slots of all tokens, a fifth of which have none."""
    assert problem.cache is not None
    blocks = -(-problem.m // problem.slots)
    shape, dtype = (blocks, problem.slots, problem.k_heads, problem.n), TORCH_DTYPES[problem.cache]
    slots = torch.randperm(blocks * problem.slots, device=device, generator=generator)[: problem.m]
    slots[4::5] = -1
    scale = {"k_scale": torch.tensor([problem.k_scale], device=device)} if problem.k_scale else {}
    return {CACHE: torch.zeros(shape, device=device).to(dtype), "slot_mapping": slots, **scale}


def _cached(outputs: _Outputs, words: Mapping[str, torch.Tensor]) -> Finding:
    """Hold a cache against the keys that were returned, which it has at the slots of their tokens, to the bit."""
    _, keys, cache = outputs
    assert keys is not None
    assert cache is not None
    wanted, slots = torch.zeros_like(cache, dtype=torch.float32), words["slot_mapping"]
    scaled = keys.float() / words["k_scale"] if "k_scale" in words else keys.float()
    wanted.flatten(0, 1)[slots[slots >= 0]] = scaled[slots >= 0]
    if cache.dtype is torch.float8_e4m3fn:
        wanted = wanted.clamp(-448, 448)
    differing = unequal(cache.float(), wanted.to(cache.dtype).float())
    return Finding(CACHE, differing, 0.0, differing == 0)


class _Turn(NamedTuple):
    """The rotation of pairs of the first columns of heads, in fp64; cos and sin are (M, rotary_dim / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def of(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads, (M, heads, N)."""
        columns, (cos, sin) = 2 * self.cos.shape[1], (each.double().unsqueeze(1) for each in self[:2])
        turned, rest = heads[..., :columns], heads[..., columns:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        pairs = a * cos - b * sin, b * cos + a * sin
        return torch.cat((torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1), rest), -1)

    @property
    def back(self) -> _Turn:
        """The rotation that undoes this one; heads are orthogonally rotated, so it takes gradients back too."""
        return self._replace(sin=-self.sin)

    def sizes(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the sum of both terms of each rotated element, without their signs."""
        plain = self._replace(cos=self.cos.abs(), sin=self.sin.abs())
        return torch.maximum(*(turn.of(heads.abs()) for turn in (plain, plain.back)))


class _Exact(NamedTuple):
    """Heads of q or k, (M, heads, N), whose outputs and gradients are computed in fp64."""

    problem: RotaryProblem
    x: torch.Tensor
    weight: torch.Tensor | None
    turn: _Turn

    @property
    def _rows(self) -> torch.Tensor:
        return self.x.flatten(-2) if self.problem.norm.is_across else self.x

    def _normalised(self) -> ReferenceOutput:
        norm, cast = self.problem.norm.norm, self.problem.cast
        return reference.FORWARD[norm](self._rows, self.weight, eps=self.problem.eps, cast=cast, save_mv=True)

    def output(self, y: torch.Tensor | None) -> list[Finding]:
        """Compare heads that were normalised and rotated."""
        assert y is not None
        found, shape = self._normalised(), self.x.shape
        want = self.turn.of(found.z.view(shape))
        either = None if found.open is None else self.turn.sizes(found.open.view(shape))
        expected = ReferenceOutput(want.to(y.dtype), None, None, None, None, want, either)
        return compare(LayerNormOutput(y, None, None, None, None), expected)

    def gradients(self, dy: torch.Tensor, found: _Outputs) -> list[Finding]:
        """Compare the gradients of heads and of their weight, which are those of the norm, given dy rotated back."""
        saved, rows, (dx, dweight) = self._normalised(), self._rows, found
        assert dx is not None
        statistics: dict[str, Any] = {"rstd": saved.rstd} | ({} if saved.mean is None else {"mean": saved.mean})
        dz = self.turn.back.of(dy.double()).view(rows.shape)
        norm, cast = self.problem.norm.norm, self.problem.cast
        expected = reference.BACKWARD[norm](dz, rows, self.weight, cast=cast, **statistics)
        return compare_gradients(GroupNormGradients(dx.view(rows.shape), dweight, None), expected, ("dx", "dweight"))
