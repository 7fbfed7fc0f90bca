"""Random calls, on GPUs that are not here: whatever they bring, a recording of them comes to what they launch."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import normforge
from normforge.ahead_of_time.compile_keys import recorded_keys_for
from normforge.kernels.gpu import named_target
from normforge.selection import dispatch
from proving.cold_warm.compare import changed, subjects
from proving.cold_warm.functions import one_of
from proving.cold_warm.outcome import Subject
from proving.cold_warm.session import Session, forgotten

from ..launching import launching_nothing
from ..some_rows import SomeTable
from ..thorough import first_of_each

FAMILIES = ("functional", "forward", "backward", "modulated", "gated", "quantised", "group", "heads", "several")
# Rows that start anywhere are among these sizes, and rows for every pipeline and of every class.
SIZES = {
    "n": one_of(*(16, 32, 64) * 2, 33, 100, 1024, 2053, 4096, 5137, 9001, 17000),
    "lead": one_of(*((3,), (2, 9), (2, 3, 2)) * 2, (30, 11), (260,), ()),
}
CALLS = 40


pytestmark = pytest.mark.usefixtures("random_calls")

CASES = first_of_each(
    [(arch, family) for arch in ("sm_90", "gfx942", "sm_80", "sm_100") for family in FAMILIES],
    lambda case: case[1],
    "-".join,
)


@pytest.mark.parametrize("case", CASES)
def test_a_recording_comes_to_what_random_calls_launch(case: tuple[str, str], tmp_path: Path) -> None:
    arch, family = case
    random, target, session = Random(f"{arch} {family}"), named_target(arch), Session(by_address=False)
    among = [subject._replace(draws={**subject.draws, **SIZES}) for subject in subjects(family)]
    current = {subject.name: subject.defaults for subject in among}
    launched = 0
    for number in range(CALLS):
        subject: Subject = random.choice(among)
        call = changed(random, subject, current[subject.name])
        path, table = tmp_path / f"{number}.yaml", dispatch.loaded()
        with dispatch.using(SomeTable(table) if number % 4 == 3 else table), forgotten():
            with launching_nothing(target) as met, normforge.record(path):
                subject.outcome(session, call, False)
            found = {key.key.portable for key in recorded_keys_for(path, target, None)} if met else set()
        assert found == {key.portable for key in met}, (call, path.read_text())
        # Calls that are refused, or of tensors without memory, launch nothing.
        current[subject.name] = call if met else current[subject.name]
        launched += len(met)
    assert launched >= CALLS / 4
