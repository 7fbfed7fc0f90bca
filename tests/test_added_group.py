"""A user who adds a group to instances.yaml, as docs/how-to/generate.md says, has tests that pass still."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from proving.mutants.tree import copied, environment, present_files

from .thorough import THOROUGH

GROUP = """
  my_model:
    norm: rms
    dtype_in: bf16
    dtype_out: fp8_e5m2
    fquant: dynamic
    n: [n4096, n5120]
"""

# What reads the table, or counts what is in it.
READERS = (
    *("tests/generator/test_generate.py", "tests/generator/test_manifest.py"),
    *("tests/golden", "tests/sanitizer/test_cells.py", "tests/tools/test_run.py"),
    *("tests/selection/test_table.py", "tests/test_wheel.py::test_its_size_is_what_the_readme_says"),
)
PAGE = "tests/docs/test_blocks.py::test_code_does_what_the_page_says[docs/how-to/generate.md]"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def run(tree: Path, *arguments: str) -> str:
    """What a command prints in the copy, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment(tree), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@THOROUGH
def test_tests_pass_with_a_group_more(repository: Path) -> None:
    with copied(repository, present_files()) as tree:
        with (tree / "instances.yaml").open("a") as manifest:
            manifest.write(GROUP)
        assert "0 removed" in run(tree, "generate.py")
        run(tree, *PYTEST, "-m", "not compile and not gpu and not thorough", *READERS)
        assert "1 passed" in run(tree, *PYTEST, PAGE)
        new = "rms_fwd_bf16_fp8_e5m2_dq_n and not rest"
        assert "2 passed" in run(tree, *PYTEST, "tests/kernels/test_instances.py", "-k", new)
