"""The command: python -m proving engines. Serve models with vLLM's norms and with the plug, and compare both."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from traceback import print_exc
from typing import Any

import yaml

from benchmarks.environment import describe, find_gpu

from ..evidence import Table, conclude, markdown, parser_of
from . import serve

MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())
PAGE = Path("docs/how-to/integrations.md")
# Rows, words of the prompt, and tokens: what is timed.
TIMED = {"decode_1": (1, 16, 128), "decode_64": (64, 16, 128), "prefill": (8, 1024, 1)}
ANSWERED = (8, 64, 64)
ROUNDS = 5
_OF_TIMED = ("", "_gpu", "_norms", "_graphs", "_ours", "_theirs")
# Ours, torch's and vLLM's, and Inductor's, which are named by the operators in them.
_NORMS = re.compile(r"\b((rms|ln)_fwd_\w*|\w*norm\w*_kernel|triton_\w*(rsqrt|norm)\w*)")
COLUMNS = [*["model", "equal", "margin", "native", "frozen"], *(f"{name}{of}" for name in TIMED for of in _OF_TIMED)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the engine's norms and the plug's; the exit status is 1 if a model could not be served."""
    about = "Serve models by vLLM with its norms and with normforge's, and compare kernels, tokens and throughput."
    parser = parser_of("engines", about)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated (default: all)")
    parser.add_argument("--control", action="store_true", help="no plug: how much two processes of one engine differ")
    asked = parser.parse_args(argv)
    plug = None if asked.control else "normforge"
    header, rows, names = describe(find_gpu("engines"), (), asked.revision), [], asked.model or MODELS
    with TemporaryDirectory() as folder:
        recording = str(Path(folder, "needed.yaml"))
        with engine(None) as theirs, engine(plug, NORMFORGE_RECORD=recording) as ours:
            for name in names:
                try:
                    started = theirs.submit(serve.start, MODELS[name], None)
                    header["vllm"] = ours.submit(serve.start, MODELS[name], plug).result()
                    started.result()
                    rows.append(dict.fromkeys(COLUMNS, "") | {"model": name} | compare(theirs, ours, MODELS[name]))
                    print(rows[-1], flush=True)
                except Exception:
                    # Whatever a model makes an engine raise, the others are served.
                    print_exc()
        if rows and plug:
            serve_frozen(rows, recording)
    conclude(asked, "engines", Table(header, COLUMNS, rows), summary, page=PAGE)
    return int(len(rows) != len(names))


def engine(provider: str | None, **variables: str) -> Executor:
    """Return a process that serves with a plug, or with none."""
    return ProcessPoolExecutor(1, get_context("spawn"), serve.begin, (variables | {"VLLM_PLUGINS": provider or ""},))


def compare(theirs: Executor, ours: Executor, model: Any) -> dict[str, str]:
    """Compare tokens, kernels and times of two engines that serve a model; then ask the first for its native norms."""
    both = theirs, ours
    expected, actual = [each.submit(serve.answer, *ANSWERED).result() for each in both]
    row = difference(expected, actual)
    times: Any = {name: {each: [] for each in both} for name in TIMED}
    for turn in range(ROUNDS + 1):
        # Whatever the first round compiles, later ones have; and neither engine is always the first.
        for each in both if turn % 2 else both[::-1]:
            for name, sizes in TIMED.items():
                times[name][each].append(each.submit(serve.seconds, *sizes).result())
    for name, sizes in TIMED.items():
        (before, _), (after, graphs) = [each.submit(serve.kernels, *sizes).result() for each in both]
        row |= {f"{name}_ours": _counts(after), f"{name}_theirs": _counts(before), f"{name}_graphs": str(graphs)}
        row[f"{name}_gpu"], row[f"{name}_norms"] = _ratio(before, after), _ratio(_norms(before), _norms(after))
        row[name] = f"{median(times[name][theirs][1:]) / median(times[name][ours][1:]):.3f}"
    if not model.get("override"):
        theirs.submit(serve.start, model, "native").result()
        row["native"] = difference(expected, theirs.submit(serve.answer, *ANSWERED).result())["equal"]
    return row


def difference(expected: Sequence[Any], actual: Sequence[Any]) -> dict[str, str]:
    """Say how many prompts have equal answers, and how near two different tokens were at most.

    The margin is what the log-probability of an expected token is above that of the token in its place, by the expected
    answer, at the first difference of a prompt; inf if the latter is not among the likeliest twenty.
    """
    margins = []
    for (tokens, likeliest), (others, _) in zip(expected, actual, strict=True):
        place = next((place for place, pair in enumerate(zip(tokens, others, strict=True)) if len({*pair}) > 1), None)
        if place is not None:
            margins.append(likeliest[place][tokens[place]] - likeliest[place].get(others[place], -inf))
    return {"equal": f"{len(expected) - len(margins)} of {len(expected)}", "margin": f"{max(margins, default=0):.4f}"}


def _norms(kernels: serve.Kernels) -> serve.Kernels:
    found: serve.Kernels = defaultdict(list)
    for name, taken in kernels.items():
        if named := _NORMS.search(name):
            found[named[0]] += taken
    return found


def _ratio(before: serve.Kernels, after: serve.Kernels) -> str:
    return f"{sum(map(sum, before.values())) / sum(map(sum, after.values())):.2f}" if before and after else ""


def _counts(kernels: serve.Kernels) -> str:
    return "; ".join(f"{name} {len(taken)}" for name, taken in sorted(_norms(kernels).items()))


def serve_frozen(rows: Sequence[dict[str, str]], recording: str) -> None:
    """Say in each row which kernels of norms serve where nothing may be compiled, after a warm-up by the recording."""
    subprocess.run([sys.executable, "-m", "normforge", "warmup", "--recorded", recording], check=True)
    with engine("normforge", NORMFORGE_FROZEN="1") as frozen:
        for row in rows:
            frozen.submit(serve.start, MODELS[row["model"]], "normforge").result()
            row["frozen"] = _counts(frozen.submit(serve.kernels, *ANSWERED).result()[0])
            print(row["model"], "frozen:", row["frozen"], flush=True)


def summary(table: Table) -> str:
    """Return the table of the page, and where the figures are from."""
    rows = [
        [
            row["model"],
            *("/".join(row[name + of] or "-" for of in ("", "_gpu", "_norms")) for name in TIMED),
            f"{row['equal']} ({row['margin']})",
        ]
        for row in table.rows
    ]
    return markdown(("model", *TIMED, "equal"), rows) + f"\n\n{table.where}"
