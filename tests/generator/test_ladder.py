"""The buckets a manifest names: each N is served once, or the manifest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from normforge.codegen.errors import ManifestError
from normforge.codegen.manifest import load

# Line 1 of every manifest below.
GROUPS = "groups: {a: {norm: rms, dtype_in: fp16}}\n"

CASES = {
    "none": ("{}", "2: buckets: there are none; leave buckets out to get the standard ladder"),
    "blank": ("", "2: buckets: expected buckets, as name: first..last, not an empty value"),
    "a_list": ("[n4]", "2: buckets: expected buckets, as name: first..last, not a list"),
    "last_has_a_cap": (
        "\n  n4: 1..4\n  n9: 5..9",
        "4: buckets: n9 (5..9) is the last bucket and has a cap, so no kernel would serve a longer row; add nbig: 10..",
    ),
    "starts_late": (
        "\n  n4: 2..4\n  nbig: 5..",
        "3: buckets: n4 (2..4) is the first bucket and must start at 1; buckets ascend; write 1..4",
    ),
    "gap": (
        "\n  n4: 1..4\n  n9: 7..9\n  nbig: 10..",
        "4: buckets: there is a gap between n4 (1..4) and n9 (7..9): no bucket serves N = 5..6; start n9 at 5",
    ),
    "overlap": (
        "\n  n4: 1..4\n  n9: 3..9\n  nbig: 10..",
        "4: buckets: n4 (1..4) and n9 (3..9) overlap: both serve N = 3; start n9 at 5",
    ),
    "descending": (
        "\n  n4: 1..4\n  n9: 5..9\n  n7: 6..7\n  nbig: 10..",
        "5: buckets: n9 (5..9) and n7 (6..7) overlap or are out of order; "
        "buckets ascend, each starting one past the last",
    ),
    "no_cap_in_the_middle": (
        "\n  nbig: 1..\n  n9: 5..9",
        "3: buckets: nbig (1..) has no cap, so no bucket can follow it; write it last, or give it a cap",
    ),
    "wrong_name": (
        "\n  small: 1..4\n  nbig: 5..",
        "3: buckets: small (1..4) must be called n4: names of instances end in it; rename it",
    ),
    "wrong_name_without_cap": (
        "\n  n4: 1..4\n  n9: 5..",
        "4: buckets: n9 (5..) must be called nbig: names of instances end in it; rename it",
    ),
    "no_range": ("\n  n4: 1-4", "3: buckets: n4 takes a range, first..last or first.., from 1 up, not '1-4'"),
    "from_zero": ("\n  n4: 0..4", "3: buckets: n4 takes a range, first..last or first.., from 1 up, not '0..4'"),
    "a_number": ("\n  n4: 4", "3: buckets: n4 takes a range, first..last or first.., not the whole number 4"),
    "backwards": ("\n  n1: 4..1", "3: buckets: n1 (4..1) ends before it starts; write first..last"),
}


@pytest.mark.parametrize(("buckets", "message"), CASES.values(), ids=CASES)
def test_rejected(manifest_file: Callable[[str], Path], buckets: str, message: str) -> None:
    path = manifest_file(f"{GROUPS}buckets: {buckets}\n")
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == f"{path}:{message}"
