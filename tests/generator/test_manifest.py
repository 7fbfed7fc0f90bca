"""What a legal manifest expands to, which names modes have, and what is said of a manifest that is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, fields
from pathlib import Path
from string import Template
from typing import Any, get_type_hints

import pytest
import yaml

from normforge.codegen.document import Section, compose
from normforge.codegen.errors import IllegalCombinationError, ManifestError
from normforge.codegen.groups import group_modes
from normforge.codegen.manifest import Manifest, load
from normforge.codegen.model import Mode
from normforge.codegen.tiling import standard_ladder
from normforge.codegen.values import DType, Norm

from ..covering import every_mode, modes_of_one_gpu
from ..thorough import THOROUGH
from .conftest import AXES_OF_MODES


def names(manifest: Manifest) -> list[str]:
    return [instance.name for instance in manifest.instances]


def test_a_group_is_the_cross_product_of_its_lists_in_order(two_groups: Manifest) -> None:
    plain = [f"{norm}_fwd_{dtype}" for norm in ("ln", "rms") for dtype in ("fp16", "bf16")]
    modes = [*plain, "ln_fwd_bf16_int8_sdq", "ln_fwd_bf16_int8_dq"]
    assert names(two_groups) == [f"{mode}_{bucket}" for mode in modes for bucket in ("n1024", "nbig")]


def test_every_instance_remembers_its_group_and_line(two_groups: Manifest) -> None:
    assert {(entry.group, entry.line) for entry in two_groups.entries} == {("plain", 5), ("quantised", 8)}
    modes = [(entry.instance.mode, entry.group) for entry in two_groups.entries]
    assert all(isinstance(mode, Mode) and mode.fquant.quantises == (group == "quantised") for mode, group in modes)


RIGHT: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("expanded.yaml").read_text())
# The text of a manifest, and its instances.
EXPANDED = RIGHT["texts"] | {
    f"groups: {{a: {{norm: layer, dtype_in: fp16, n: {asked}}}}}": " ".join(
        f"ln_fwd_fp16_{bucket}" for bucket in found.split()
    )
    for asked, found in RIGHT["lengths"].items()
}


@pytest.mark.parametrize(("text", "found"), EXPANDED.items())
def test_a_manifest_makes_the_instances_that_it_asks_for(
    text: str, found: str, expand: Callable[[str], Manifest]
) -> None:
    assert names(expand(f"{text}\n")) == found.split()


def test_axes_left_out_have_their_defaults(expand: Callable[[str], Manifest]) -> None:
    manifest = expand("groups:\n  a: {norm: rms, dtype_in: fp32}\n")
    assert {instance.mode for instance in manifest.instances} == {Mode(Norm.RMS, DType.FP32, DType.FP32)}
    assert tuple(instance.bucket for instance in manifest.instances) == standard_ladder() == manifest.buckets


def test_buckets_ascend_whatever_order_n_and_groups_name_them_in(expand: Callable[[str], Manifest]) -> None:
    manifest = expand(
        "groups:\n  a: {norm: rms, dtype_in: fp16, n: [nbig, n512]}\n  b: {norm: rms, dtype_in: fp16, n: n128}\n"
    )
    assert names(manifest) == ["rms_fwd_fp16_n128", "rms_fwd_fp16_n512", "rms_fwd_fp16_nbig"]
    assert [entry.group for entry in manifest.entries] == ["b", "a", "a"]


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


def make_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


ENDLESS = (
    ": the manifest is no regular file, and might never end; name one with --manifest FILE, or pipe it in as /dev/stdin"
)
UNREAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, ": there is no such manifest; name one with --manifest FILE"),
    "no text": (
        lambda path: path.write_bytes("groups:\n  # größer\n".encode("latin-1")),
        ":2: the manifest is not UTF-8 text; save it as UTF-8",
    ),
    "a pipe": (os.mkfifo, ENDLESS),
    "a device": (lambda path: path.symlink_to("/dev/zero"), ENDLESS),
    "far too long": (make_long, ": the manifest is longer than 16 MiB; split it in several"),
}


@pytest.mark.parametrize(("make", "message"), UNREAD.values(), ids=UNREAD)
def test_a_file_that_is_no_manifest(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path / "mine.yaml")
    refused(tmp_path / "mine.yaml", message)


@pytest.mark.parametrize(("path", "said"), [("a\0b", "is no path"), ("/", "cannot be read: Is a directory")])
def test_a_path_of_no_file(path: str, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        load(Path(path))


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
    node: Any = compose(path)
    assert Section(path).words(node, "size", ("none", "64", "128")) == ("128", "64", "none")
    with pytest.raises(ManifestError, match="size takes one of none, 64, not the whole number 128"):
        Section(path).words(node, "size", ("none", "64"))


@pytest.mark.parametrize(("first", "step"), [(0, 4001), pytest.param(1, 7, marks=THOROUGH)])
def test_what_is_legal_beside_a_legal_mode_is_listed(first: int, step: int) -> None:
    """Modes that differ from a listed one in a single axis: of those that are listed, one in so many."""
    modes, types = every_mode(), get_type_hints(Mode)
    listed = set(modes)
    assert len(listed) == len(modes)
    axes = [(False, True) if types[field.name] is bool else tuple(types[field.name]) for field in fields(Mode)]

    def is_legal(values: tuple[Any, ...]) -> bool:
        try:
            Mode(*values)
        except IllegalCombinationError:
            return False
        return True

    for mode in modes[first::step]:
        values = astuple(mode)
        for place, options in enumerate(axes):
            for other in options:
                changed = (*values[:place], other, *values[place + 1 :])
                assert not is_legal(changed) or Mode(*changed) in listed, changed


@THOROUGH
def test_full_holds_every_legal_mode_over_every_bucket(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    # Behind an exchange between ranks rows have a limit, so manifests/tensor_parallel.yaml has those.
    # manifests/training.yaml has some of the forms of 8-bit training.
    trained = {mode for mode in modes_of_one_gpu() if mode.columnwise.writes or mode.save_amax}
    trained |= {mode for mode in modes_of_one_gpu() if mode.serves and (mode.modulated or mode.fadd.code > 2)}
    rows = [mode for mode in modes_of_one_gpu() if mode not in trained]
    modes = [*rows, *group_modes()]
    expected = {(mode, bucket) for mode in modes for bucket in standard_ladder()}
    assert {(instance.mode, instance.bucket) for instance in manifest.instances} == expected
    assert len(manifest.instances) == len(expected)


@THOROUGH
def test_every_legal_mode_is_read_from_its_name() -> None:
    for mode in every_mode():
        assert Mode.from_name(mode.name) == mode


NO_NAMES = (
    *("", "ln", "ln_fwd", "ln_fwd_bf61", "ln_fwd_bf16_", " ln_fwd_bf16", "ln_fwd_bf16\n", "ln_fwd_bf16_n128"),
    *("ln_fwd_bf16_mv_xb", "ln_fwd_bf16_bf16", "ln_fwd_bf16_mv_mv", "ln_fwd_bf16_dq", "ln_fwd_int8"),
    *("ln_bwd_bf16_mv", "rms_fwd_fp16_int8_dq_sfp32", "rms_fwd_fp16_fp8_e4m3fn_dq_trunc"),
)


@pytest.mark.parametrize("name", NO_NAMES)
def test_no_other_name_is_one(name: str) -> None:
    with pytest.raises(IllegalCombinationError, match="no mode is called"):
        Mode.from_name(name)
