"""Sequences of calls, each compared with the same call without caches, and the shortest sequence that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch

from .functions import JUMPS, SETTINGS, Call, families, settled
from .operands import Operand
from .outcome import Outcome, Subject, outcome_of
from .session import Session, forgotten


class Difference(NamedTuple):
    """A call that depends on what ran before.

    Attributes:
        subject: what was called.
        by_address: whether launches took addresses.
        before: calls of a new process that are enough for it.
        call: the call.
        parts: by part of the outcome, that with caches and that without.
    """

    subject: str
    by_address: bool
    before: list[tuple[str, Call]]
    call: Call
    parts: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        lines = [f"{self.subject} differs{' (launches by address)' * self.by_address} after these calls:"]
        lines += [f"  {(name, call)!r}" for name, call in (*self.before, (self.subject, self.call))]
        for part, (warm, cold) in self.parts.items():
            warm, cold = _apart(warm, cold)
            lines += [f"  {part}", f"    with caches    {str(warm)[:900]}", f"    without caches {str(cold)[:900]}"]
        return "\n".join(lines)


def _apart(warm: Any, cold: Any) -> tuple[Any, Any]:
    """Return what differs of two values, of tuples and lists the first item that does."""
    several = isinstance(warm, tuple | list) and isinstance(cold, tuple | list) and len(warm) == len(cold)
    items = [each for each in zip(warm, cold, strict=True) if each[0] != each[1]] if several else []
    return _apart(*items[0]) if len(items) == 1 or (items and isinstance(items[0][0], tuple)) else (warm, cold)


def subjects(family: str) -> list[Subject]:
    """Return what is called of a family."""
    made = []
    for function in families()[family]:
        defaults = {name: default for name, (default, _) in SETTINGS.items()} | dict(function.defaults)
        draws = {name: draw for name, (_, draw) in SETTINGS.items()} | dict(function.draws)
        jumps = [{**jump} for word, jumps in JUMPS.items() if word in function.name for jump in jumps]
        jumps = [jump for jump in jumps if set(jump) <= set(defaults)]
        of, together = partial(outcome_of, function), partial(settled, function)
        made.append(Subject(function.name, defaults, draws, of, together, jumps))
    return made


FAMILIES = (
    *("functional", "forward", "backward", "added", "l2", "modulated", "gated", "quantised", "group", "operators"),
    *("statistics", "heads", "several", "parallel"),
)


# How often each field of an operand is the one that differs.
_WEIGHTS = (5, 6, 3, 3, 1)


# Properties that differ more often than others.
_OFTEN = ("outer", "transform", "place", "lead", "n")


def changed(random: Random, subject: Subject, call: Call) -> Call:
    """Return a call that differs in one property, now and then in two, or in several that go together."""
    made = dict(call)
    if subject.jumps and random.random() < 0.04:
        made |= random.choice(subject.jumps)
    for _ in range(random.choice((1, 1, 1, 1, 2))):
        weights = [
            4 if isinstance(made[each], Operand) else 5 if each in _OFTEN[:3] else 2 if each in _OFTEN else 1
            for each in subject.draws
        ]
        (name,) = random.choices(tuple(subject.draws), weights)
        old = made[name]
        for _ in range(8):
            new = subject.draws[name](random)
            if isinstance(old, Operand) and isinstance(new, Operand) and random.random() < 0.8:
                (field,) = random.choices(old._fields, _WEIGHTS)
                new = old._replace(**{field: getattr(new, field)})
            if repr(new) != repr(old):
                made[name] = new
                break
    return subject.settled(made) if random.random() < 0.9 else made


# What is compared of a call that runs again with the caches that it left.
_AGAIN = "again"


def _alone(session: Session, subject: Subject, call: Call) -> Outcome:
    """Return what a call comes to in a new process; asked once for each call."""
    key = subject.name, repr(call)
    if key not in session.alone:
        with forgotten():
            session.alone[key] = subject.outcome(session, call, True)
    found: Outcome = session.alone[key]
    return found


def compared(
    session: Session, subject: Subject, call: Call, *, again: bool = False
) -> tuple[Outcome, dict[str, tuple[Any, Any]]]:
    """Return what a call comes to, and where that is otherwise without caches, or in a second call like it."""
    warm = subject.outcome(session, call, False)
    cold = _alone(session, subject, call)
    found = _differing(warm, cold)
    if again and not found:
        second = subject.outcome(session, call, False)
        found = {f"{_AGAIN}: {part}": values for part, values in _differing(second, cold).items()}
        if second["finds"] and _is_plain(subject.name, call) and "launches" in second:
            found["again: kernels are looked for once more"] = (second["finds"], 0)
    return warm, found


def _differing(warm: Outcome, cold: Outcome) -> dict[str, tuple[Any, Any]]:
    parts = {part for part in (*warm, *cold) if part != "finds" and warm.get(part) != cold.get(part)}
    found = {part: (warm.get(part), cold.get(part)) for part in sorted(parts)}
    for part in ("launches", "gradients' launches"):
        if "negated" in repr([values for *_, values in cold.get(part, ())]):
            found[f"{part}: a kernel reads what is negated as it lies in memory"] = (warm.get(part), cold.get(part))
    return found


# Properties with which nothing is promised to be known.
_UNUSUAL = ("outer", "inner", "back_context", "transform", "place", "back_place", "alias", "create_graph")


def _is_plain(name: str, call: Call) -> bool:
    """Return True if a call like a call before may be expected to be known."""
    operands = [value for value in call.values() if isinstance(value, Operand)]
    # Batch invariance copies what is misaligned, and such copies are planned in each call.
    layouts = ("contiguous",) if name.endswith("_invariant") else ("contiguous", "offset")
    return (
        not any(call.get(name) for name in _UNUSUAL)
        and call.get("dy", ()) is not None
        and 0 not in call.get("lead", ())
        and all(type(call.get(name, 0.0)) is float for name in ("eps", "weight_offset", "dropout_p"))
        and all(operand.holder in ("tensor", "parameter") for operand in operands)
        and all(operand.layout in layouts for operand in operands)
        and not any(operand.dtype is torch.float64 for operand in operands)
    )


class Result(NamedTuple):
    """How many calls were served rather than refused, and the first difference of each kind."""

    served: int
    differences: list[Difference]


def run(family: str, seed: int, count: int, *, by_address: bool) -> Result:
    """Compare a sequence of calls with the same calls without caches.

    Args:
        family: what is called, a name of `FAMILIES`.
        seed: what the sequence follows from.
        count: how many calls are compared.
        by_address: whether launches take addresses, and known calls are found in C.
    """
    random, session = Random(f"{family} {seed} {by_address}"), Session(by_address=by_address)
    # Ahead of the recording: a module of a family says, when it is imported, how `native.calls` records its calls.
    among = {subject.name: subject for subject in subjects(family)}
    with session.recording():
        current: dict[str, Call] = {name: dict(subject.defaults) for name, subject in among.items()}
        liked: dict[str, list[Call]] = {name: [] for name in among}
        history: list[tuple[str, Call]] = []
        found: dict[Any, Difference] = {}
        served = 0
        name = next(iter(among))
        base: Call = {}
        for at in range(count):
            if at % 3 == 0 and random.random() < 0.3:
                name = random.choice(tuple(among))
            subject = among[name]
            if at % 3 == 2 and base:
                # The call that the last one differs from, after that one.
                call = base
            else:
                base = random.choice(liked[name]) if liked[name] and random.random() < 0.2 else current[name]
                base = dict(subject.defaults) if random.random() < 0.02 else base
                call = changed(random, subject, base)
            outcome, parts = compared(session, subject, call, again=random.random() < 0.15)
            kind = (name, *parts)
            if parts and kind not in found:
                found[kind] = shrunk(session, among, history, (name, call), parts)
            served += "exception" not in outcome
            if "exception" not in outcome or random.random() < 0.03:
                current[name] = call
                liked[name] = [*liked[name][-199:], call]
            history.append((name, call))
    return Result(served, [*found.values()])


def differences(
    session: Session, among: Mapping[str, Subject], before: Sequence[tuple[str, Call]], last: tuple[str, Call]
) -> dict[str, Any]:
    """Return where a call is otherwise after some calls of a new process."""
    with forgotten():
        for name, call in before:
            among[name].outcome(session, call, False)
        return compared(session, among[last[0]], last[1], again=True)[1]


_MOST_TRIED = 400


def shrunk(
    session: Session, among: Mapping[str, Subject], history: list[tuple[str, Call]], last: tuple[str, Call], parts: Any
) -> Difference:
    """Return a difference with one call before it, if one is enough, and with as few properties as are needed."""
    candidates: list[list[tuple[str, Call]]] = [[], *[[each] for each in reversed(history[-_MOST_TRIED:])]]
    before = next((each for each in candidates if differences(session, among, each, last)), None)
    if before is None:
        return Difference(last[0], session.by_address, history[-12:], last[1], parts)
    for place in range(len(before) + 1):
        calls = [*before, last]
        name, call = calls[place]
        for property_, default in among[name].defaults.items():
            if repr(call[property_]) == repr(default):
                continue
            calls[place] = (name, {**call, property_: default})
            if differences(session, among, calls[:-1], calls[-1]):
                call = calls[place][1]
            calls[place] = (name, call)
        before, last = calls[:-1], calls[-1]
    final = differences(session, among, before, last)
    told = [
        (name, {each: value for each, value in call.items() if repr(value) != repr(among[name].defaults[each])})
        for name, call in (*before, last)
    ]
    return Difference(last[0], session.by_address, told[:-1], told[-1][1], final or parts)
