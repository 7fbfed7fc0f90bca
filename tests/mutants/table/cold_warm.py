"""What calls are known by: one element of each key or guard is left out, and random sequences of calls notice."""

from __future__ import annotations

from ..mutant import Mutant

_SLICE = "tests/cold_warm/test_cold_warm.py::test_calls_do_what_they_do_in_a_new_process"
_MANY = "tests/cold_warm/test_cold_warm.py::test_many_calls_do_what_they_do_in_a_new_process"
_GROUP = "runtime/calls/group.py"
_LOOKUP = "runtime/calls/lookup.py"
_KNOWN = "runtime/calls/known.py"


def _of(*families: str, how: str = "by_tensor", many: bool = False) -> tuple[str, ...]:
    return tuple(f"{_MANY if many else _SLICE}[{family}-{how}]" for family in families)


MUTANTS = (
    Mutant(
        "sequences-group-key-forgets-what-is-there",
        "a GroupNorm's weight or bias is looked for where an earlier call had none",
        _GROUP,
        "there = weight is None, bias is None, ",
        "there = bias is None, ",
        _of("group"),
    ),
    Mutant(
        "sequences-group-alignment-is-not-asked",
        "a GroupNorm of misaligned tensors takes the kernel of aligned ones",
        _GROUP,
        " or (addresses[0] | addresses[1] | addresses[2]) & MISALIGNED",
        "",
        _of("group", many=True),
    ),
    Mutant(
        "sequences-group-does-not-ask-for-dual-levels",
        "a GroupNorm that is known drops tangents of forward-mode AD",
        _GROUP,
        "if dispatch_modes() or forward_ad._current_level >= 0:\n",
        "if dispatch_modes():\n",
        _of("group"),
    ),
    Mutant(
        "sequences-gradient-plans-forget-dtypes",
        "gradients of gated and modulated norms are stored as those of an earlier call",
        "runtime/calls/plan.py",
        'key = dispatch.plans, ("parts", call.mode, call.n, dtypes, strides,',
        'key = dispatch.plans, ("parts", call.mode, call.n, (), strides,',
        _of("gated", many=True),
    ),
    Mutant(
        "sequences-group-plans-forget-dtypes",
        "a GroupNorm's weight is read in the dtype of an earlier call's",
        "runtime/calls/group_plan.py",
        '("group", kind, device)',
        '("group", kind._replace(dtypes=()), device)',
        _of("group"),
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
        "return self._by_default if invariance.is_on() is invariance.by_default() else self._otherwise",
        "return self._by_default",
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
        _of("functional", "forward"),
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
