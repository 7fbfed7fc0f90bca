"""The command: python -m proving mutants."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .. import parts
from ..evidence import conclude, parser_of
from .mutant import Mutant, Suite
from .report import header, summary, table
from .table import MUTANTS
from .tree import ROOT, copied, present_files
from .trial import Outcome, Runner, Verdict


def main(argv: list[str]) -> int:
    """Try mutants, and return 1 if one is not caught."""
    about = "Break normforge on purpose, an edit at a time, and see whether the tests chosen for it notice."
    parser = parser_of("mutants", about)
    parts.add_options(parser, jobs=2)
    arguments = parser.parse_args(argv)
    if arguments.record and arguments.only != "*":
        parser.error("--record writes all mutants and --only tries a part; leave one of them out")
    every = {mutant.name: mutant for mutant in MUTANTS}
    cases = parts.chosen(every, parser, arguments, lambda mutant: f"{mutant.file}: {mutant.breaks}")
    stated = header(arguments.revision)
    files = present_files()
    # Copies are of the tree as it is now, whatever is done to the tree meanwhile.
    with copied(ROOT, files) as snapshot, ThreadPoolExecutor(arguments.jobs) as threads:
        runner = Runner(snapshot, files)
        found = parts.run(cases, lambda due: _tried(due, threads, runner), arguments, stated)
        outcomes = [*found.results.values()]
        if not found.left:
            outcomes = _judged(outcomes, threads, runner, arguments.jobs)
    conclude(arguments, "mutants", table(outcomes, stated, found.seconds), summary, left=found.left)
    return 1 if found.left or not all(each.caught for each in outcomes) else 0


def _tried(
    due: Sequence[Mutant], threads: ThreadPoolExecutor, runner: Runner
) -> Generator[tuple[str, Outcome], None, None]:
    trials = [threads.submit(runner.outcome, mutant) for mutant in due]
    try:
        for trial in trials:
            found = trial.result()
            print(f"{found.verdict.value:9} {found.mutant.name:45} {found.seconds:5.1f} s  {found.said}", flush=True)
            yield found.mutant.name, found
    finally:
        for trial in trials:
            trial.cancel()


def _judged(outcomes: Sequence[Outcome], threads: ThreadPoolExecutor, runner: Runner, jobs: int) -> list[Outcome]:
    """Return outcomes, unfit where the test that caught a mutant fails in a copy of the tree without an edit, too."""
    unmutated = []
    for suite in Suite:
        # Each once and those of a file together, for as many processes as run at once.
        tests = sorted({found.said for found in outcomes if found.caught and found.mutant.suite is suite})
        size = -(-len(tests) // jobs) or 1
        for start in range(0, len(tests), size):
            unmutated.append(threads.submit(runner.failing_unmutated, suite, tests[start : start + size]))
    unfit = {test for run in unmutated for test in run.result()}
    print("without an edit, all tests that caught one pass" if not unfit else "these fail without an edit, too:")
    print(*sorted(unfit), sep="\n", end="\n" if unfit else "")
    return [
        replace(found, verdict=Verdict.UNFIT) if found.caught and found.said in unfit else found for found in outcomes
    ]
