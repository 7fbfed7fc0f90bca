"""Mutants of the keys of known calls: each leaves out one element, and random sequences of calls notice."""

from __future__ import annotations

from ..mutant import Mutant

_SLICE = "tests/cold_warm/test_cold_warm.py::test_calls_do_what_they_do_in_a_new_process"
_MANY = "tests/cold_warm/test_cold_warm.py::test_many_calls_do_what_they_do_in_a_new_process"
_GROUP = "runtime/families/group/row.py"
_PLAN = "runtime/calls/plan.py"
_LOOKUP = "runtime/calls/lookup.py"
_KNOWN = "runtime/calls/known.py"


def _of(*families: str, how: str = "by_tensor", many: bool = False) -> tuple[str, ...]:
    return tuple(f"{_MANY if many else _SLICE}[{family}-{how}]" for family in families)


MUTANTS = (
    Mutant(
        "sequences-group-key-forgets-what-is-there",
        "a GroupNorm's weight or bias is looked for where an earlier call had none",
        _PLAN,
        "    dtypes = (*inputs.values(), *results.values())\n",
        "    dtypes = (*results.values(),)\n",
        _of("group"),
    ),
    Mutant(
        "sequences-group-alignment-is-not-asked",
        "a GroupNorm of aligned tensors takes the kernel of misaligned ones",
        _GROUP,
        "remember(plans, key, operands, (1, 0, 0), addresses, ready)",
        "remember(plans, key, operands, (1, 0, 0), (0, 0, 0), ready)",
        _of("group", many=True),
    ),
    Mutant(
        "sequences-group-key-takes-true-for-a-number",
        "a GroupNorm whose number of groups is True or 2.0 is known from 1 or 2, and not refused",
        "codegen/tables.py",
        "row.kind in (Kind.FLAG, Kind.COUNT)",
        "row.kind is Kind.FLAG",
        _of("group"),
    ),
    Mutant(
        "sequences-gradient-plans-forget-dtypes",
        "gradients of gated and modulated norms are stored as those of an earlier call",
        _PLAN,
        'key = ("parts", call.mode, sizes, dtypes, strides,',
        'key = ("parts", call.mode, sizes, (), strides,',
        _of("gated", many=True),
    ),
    Mutant(
        "sequences-group-plans-forget-dtypes",
        "a GroupNorm's weight has a gradient of the dtype of an earlier call's weight",
        _PLAN,
        "    dtypes = (*inputs.values(), *results.values())\n",
        "    dtypes = (*map(bool, inputs.values()), *map(bool, results.values()))\n",
        _of("group", how="by_address", many=True),
    ),
    Mutant(
        "sequences-misaligned-plans-serve-all",
        "a plan for misaligned tensors serves aligned ones, and the other way round",
        _KNOWN,
        "        if any(at & MISALIGNED for at in addresses):\n",
        "        if False:\n",
        _of("functional", "forward"),
    ),
    Mutant(
        "sequences-batch-invariance-shares-plans",
        "a kernel that batch invariance chose serves calls outside of it",
        "runtime/selection/dispatch.py",
        "return _kinds[invariance.is_on() is not invariance.by_default()]",
        "return _kinds[False]",
        _of("functional", "forward"),
    ),
    Mutant(
        "sequences-known-calls-ignore-dispatch-modes",
        "a mode that sees operators sees none once a call like it was known",
        _LOOKUP,
        "            or dispatch_modes()\n",
        "",
        _of("functional", "forward"),
    ),
    Mutant(
        "sequences-known-calls-ignore-dual-levels",
        "a call that is known drops tangents of forward-mode AD",
        _LOOKUP,
        "            forward_ad._current_level >= 0\n            or dispatch_modes()\n",
        "            dispatch_modes()\n",
        _of("functional", "forward", "group"),
    ),
    Mutant(
        "sequences-c-takes-the-first-kind",
        "calls in C take the plan of tensors of another dtype or layout",
        "runtime/upstream/known.c",
        "    if (is_yes(call, apply(call, get(call, call->kind, fits_name), call->there, call->present)))\n",
        "    if (call->key != NULL)\n",
        _of("functional", how="by_address"),
    ),
    Mutant(
        "sequences-jax-operations-are-equal-whatever-eps",
        "a JAX norm computes with the eps of an earlier one",
        "runtime/jax/operation.py",
        "    eps: float = 0.0\n",
        "    eps: float = __import__('dataclasses').field(default=0.0, compare=False)\n",
        _of("jax", many=True),
    ),
)
