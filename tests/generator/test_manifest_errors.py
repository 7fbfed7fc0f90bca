"""Every way a manifest can be wrong, by the whole message: file, line, group, what was wrong and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest
import yaml

from normforge.codegen.document import Section, compose
from normforge.codegen.errors import ManifestError
from normforge.codegen.manifest import load
from normforge.codegen.tiling import standard_ladder

from .conftest import AXES_OF_MODES

# Lines 1 to 4 of every manifest below that starts with it.
GROUP = "groups:\n  a:\n    norm: layer\n    dtype_in: fp16\n"
# What `errors.yaml` has words for.
WORDS = {
    "AXES": AXES_OF_MODES,
    "BUCKETS": ", ".join(("all", *(bucket.name for bucket in standard_ladder()))),
    "FADD": "one of none, pre_add_store, pre_add, post_add, post_add_norm",
    "GROUP": GROUP,
    "DEEP": "[" * 5000,
    "LONG": "x" * 1000,
}
# By the table, how a manifest is made of a text, and where in it the error is.
FORMS = {
    "in a group": (f"{GROUP}    {{}}\n", "5: group a: {}"),
    "of a group": (f"{GROUP}    {{}}\n", "2: group a: {}"),
    "whole": ("{}", "{}"),
    "buckets": ("groups: {{a: {{norm: rms, dtype_in: fp16}}}}\nbuckets: {}\n", "{}"),
}
TABLES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("errors.yaml").read_text())
CASES = [
    tuple(form.format(Template(each).substitute(WORDS)) for form, each in zip(FORMS[name], case, strict=True))
    for name, table in TABLES.items()
    for case in table.items()
]


@pytest.mark.parametrize(("text", "message"), CASES, ids=range(len(CASES)))
def test_rejected(file: Callable[..., Path], text: str, message: str) -> None:
    refused(file(text), f":{message}")


def refused(path: Path, message: str) -> None:
    """Fail unless a manifest is refused with its path and a message."""
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == f"{path}{message}"


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.yaml", ": there is no such manifest; name one with --manifest FILE")


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="the manifest cannot be read: Is a directory"):
        load(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("groups:\n  # größer\n".encode("latin-1"))
    refused(path, ":2: the manifest is not UTF-8 text; save it as UTF-8")


def test_what_might_never_end_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        refused(
            path,
            ": the manifest is no regular file, and might never end; name one with --manifest FILE, or pipe it in as "
            "/dev/stdin",
        )


def test_a_manifest_that_is_far_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    refused(path, ": the manifest is longer than 16 MiB; split it in several")


def test_a_path_that_is_none() -> None:
    with pytest.raises(ManifestError, match="is no path"):
        load(Path("a\0b"))


def test_a_manifest_that_another_process_hands_over() -> None:
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as file:
        file.write(GROUP)
        file.close()
        assert len(load(Path(f"/dev/fd/{read}")).instances) == 19


def test_words_that_are_numbers_need_no_quotes(tmp_path: Path) -> None:
    """As recordings, and the group that the error of a missing instance says, have them."""
    path = tmp_path / "words.yaml"
    path.write_text('[128, "64", none]\n')
    node = compose(path)
    assert node is not None
    assert Section(path).words(node, "size", ("none", "64", "128")) == ("128", "64", "none")
    with pytest.raises(ManifestError, match="size takes one of none, 64, not the whole number 128"):
        Section(path).words(node, "size", ("none", "64"))
