"""RMSNorms in one launch on random tensors: compared with the fp64 reference of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import reference
from ..calls.outputs import LayerNormOutput, QuantisedOutput
from ..codegen.parameters import QUANTISED
from ..codegen.values import Norm
from ..errors import ConflictError
from ..families import several
from ..reference import quantised as quantisation_reference
from ..selection import dispatch
from .checked_run import validate_quantised, validate_rows
from .compare import Finding
from .measured_run import Run
from .problem import Problem, SeveralProblem
from .problem_tensors import inputs

# The arguments of a norm that is not quantised; the reference takes the words of the 2d function as well.
_PLAIN = ("eps", "residual", "x_bias", "cast")
_QUANTISED = [row.name for row in QUANTISED.of(Norm.RMS) if row.name not in ("columnwise", "save_amax")]


def prepare(problem: SeveralProblem, device: torch.device) -> Run[tuple[torch.Tensor | None, ...]]:
    """Make the tensors of all norms, so that they can be run on a device.

    Raises:
        NormforgeError: no one launch serves the norms.
    """
    drawn = [inputs(each, device) for each in problem.problems]
    quantises = problem.problems[0].mode.fquant.quantises
    names = _QUANTISED if quantises else _PLAIN
    norms = [(given["x"], given["weight"], _chosen(given, names)) for given in drawn]

    def call() -> tuple[torch.Tensor | None, ...]:
        return tuple([tensor for result in several.rms_norms(norms) for tensor in _tensors(result)])

    def check(outputs: tuple[torch.Tensor | None, ...]) -> tuple[Finding, ...]:
        found, each = [], len(outputs) // len(norms)
        for at, (own, given) in enumerate(zip(problem.problems, drawn, strict=True)):
            parts = _compared(own, given, outputs[at * each : (at + 1) * each])
            found += [part._replace(name=f"{part.name}[{at}]") for part in parts]
        return tuple(found)

    return Run(
        names=lambda: _names(problem, norms),
        call=call,
        validate=check,
        operands=tuple(value for given in drawn for value in given.values()),
    )


def _chosen(given: Mapping[str, Any], names: list[str] | tuple[str, ...]) -> dict[str, Any]:
    return {name: each for name, each in given.items() if name in names and name not in ("x", "weight")}


def _tensors(result: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def _compared(problem: Problem, given: Mapping[str, Any], outputs: tuple[Any, ...]) -> tuple[Finding, ...]:
    if not problem.mode.fquant.quantises:
        y, residual_out = (*outputs, None)[:2]
        result = LayerNormOutput(y, residual_out, None, None, None)
        return validate_rows(problem, reference.FORWARD[Norm.RMS], dict(given), result)
    chosen = {"x": given["x"], "weight": given["weight"], **_chosen(given, _QUANTISED)}
    return validate_quantised(problem, quantisation_reference.FORWARD[Norm.RMS], chosen, QuantisedOutput(*outputs))


def _names(problem: SeveralProblem, norms: list[Any]) -> tuple[str, str]:
    """Return the names of all instances, and of the kernel that serves them together."""
    known = several.found(norms)
    planned = [] if known is None else [each for each, *_ in known]
    launcher = several.launcher_of(planned) if planned else None
    if launcher is None:
        raise ConflictError(
            f"no one launch serves norms of -several {','.join(str(each.n) for each in problem.problems)}; pass fewer "
            "rows or other lengths: rms_norms says what it leaves to launches of their own"
        )
    modes = [plan.mode for plan, *_ in planned]
    instances = [dispatch.find(mode, each.n) for mode, each in zip(modes, problem.problems, strict=True)]
    return " ".join(entry.name for entry in instances), launcher.key.symbol
