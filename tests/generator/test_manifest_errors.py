"""Every way a manifest can be wrong, by the whole message: file, line, group, what was wrong and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from normforge.codegen.document import Section, compose
from normforge.codegen.errors import ManifestError
from normforge.codegen.manifest import load

from .conftest import AXES_OF_MODES

# Lines 1 to 4 of every manifest below that starts with it.
GROUP = "groups:\n  a:\n    norm: layer\n    dtype_in: fp16\n"

FADD = "one of none, pre_add_store, pre_add, post_add, post_add_norm"
N = (
    "all, n128, n256, n512, n768, n1024, n1536, n2048, n3072, n4096, n5120, n6144, n7168, n8192, n12288, n16384, "
    "n32768, n65536, n131072, nbig"
)

TWICE = "which makes every instance twice; keep one"
NO_YAML = "this is not valid YAML: {}; a manifest is groups of axis: value"

# Line 5 of a manifest, the last of its only group, and what is said of it.
IN_A_GROUP = {
    "fad: none": f"unknown axis 'fad'; did you mean fadd? Use one of {AXES_OF_MODES}",
    "exclude: int8": f"unknown axis 'exclude'; use one of {AXES_OF_MODES}",
    "fadd: [none, pre-add]": f"unknown fadd 'pre-add'; did you mean pre_add? Use {FADD}",
    "n: n4095": f"unknown n 'n4095'; did you mean n4096? Use one of {N}",
    "fadd: no": f"fadd takes {FADD}, not the boolean false (YAML reads no so); did you mean none?",
    "on: fp16": "a key takes a word, not the boolean true (YAML reads on so)",
    "save_mv: maybe": "save_mv takes true or false, unquoted, not the word 'maybe'",
    "fadd: 1": f"fadd takes {FADD}, not the whole number 1",
    "fadd: 2020-01-01": f"fadd takes {FADD}, not the date 2020-01-01",
    "fadd:": f"fadd takes {FADD}, not an empty value; did you mean none?",
    "fadd: {a: b}": f"fadd takes {FADD}, not a mapping",
    "fadd: !mine none": f"fadd takes {FADD}, not !mine none; did you mean none?",
    f"fadd: {'x' * 1000}": f"unknown fadd '{'x' * 80}...'; use {FADD}",
    "<<: {}": (
        "YAML's merge key << is not supported; write the lines out, or put what all groups share under defaults:"
    ),
    "n: 010": "n takes a row length, from 1 up, not 010, which YAML may read as octal; write 10",
    "fadd: []": "fadd is an empty list, which makes no instance; give it a value or leave it out",
    "save_mv: [true, yes]": f"save_mv lists true twice, {TWICE}",
    "n: [64, 64]": f"n lists 64 twice, {TWICE}",
    "n: [n128, all]": "n lists all beside other buckets, and all is every bucket; keep one or the other",
    "n: 0": "n takes row lengths from 1 up, not 0",
    "n: -4": "n takes a row length, from 1 up, not the whole number -4",
    "n: 4..2": "n (4..2) ends before it starts; write first..last",
    "n: ..4": "n takes a range, first..last or first.., from 1 up, not '..4'",
    "norm: rms": "norm is given twice, first on line 3; keep one of the two",
}

# The line of a combination is that of its group.
ILLEGAL = {
    "dtype_out: [same, fp16]": "ln_fwd_fp16_n128 is made twice by this group; its lists overlap",
    "fquant: [none, dynamic]": (
        "among the combinations of its lists is an illegal one (fquant dynamic): fquant dynamic writes quantised "
        "values, and dtype_out fp16 is not a quantised type; use one of int8, fp8_e4m3fn, fp8_e4m3fnuz, fp8_e5m2, or "
        "fquant none"
    ),
    "scale_dtype: fp16": (
        "scale_dtype fp16 is the type of y_scale, and fquant none writes none; "
        "leave scale_dtype out, or use fquant dynamic or smooth_dynamic"
    ),
    "rounding: truncate": (
        "rounding truncate is for int8, and dtype_out is fp16; leave rounding out, or use dtype_out int8"
    ),
}

WHOLE = {
    "": "1: the manifest is empty; it needs groups, each with a norm and a dtype_in",
    "[]": "1: expected the sections buckets, defaults, groups, not a list",
    "defaults: {norm: rms}": "1: there are no groups, so no instances; add groups, each with a norm and a dtype_in",
    "\ngroups: {}": "2: groups is empty; add a group with a norm and a dtype_in",
    "group: {a: {}}": "1: unknown section 'group'; did you mean groups? Use one of buckets, defaults, groups",
    "defaults:\ngroups: {a: {}}": (
        "1: defaults: expected axes, as axis: value or axis: [value, value], not an empty value"
    ),
    "groups: {a: {dtype_in: fp16}}": (
        "1: group a: norm is missing; add norm: [layer, rms, l2, l2_clamped, group] or one of them"
    ),
    'groups: {"a\\nb\\e[31m": {norm: rms}}': (
        "1: group a\\nb\\x1b[31m: dtype_in is missing; add dtype_in: [fp16, bf16, fp32, fp8_e4m3fn, fp8_e5m2] or one "
        "of them"
    ),
    f"{GROUP}defaults: {{norm: rmss}}": (
        "5: defaults: unknown norm 'rmss'; did you mean rms? Use one of layer, rms, l2, l2_clamped, group"
    ),
    "groups: {a: !!python/object:os.system {norm: layer, dtype_in: fp16}}": (
        "1: group a: expected axes, as axis: value or axis: [value, value], not a mapping tagged "
        "tag:yaml.org,2002:python/object:os.system"
    ),
    "groups: {a: {norm: layer, dtype_in: fp32, cast: before_weight}}": (
        "1: group a: cast before_weight rounds to 16 bits first, and neither dtype_in fp32 nor dtype_out fp32 has 16 "
        "bits; leave cast out, or use fp16 or bf16 for one of them"
    ),
    "groups: {a: {norm: group, dtype_in: bf16, fquant: dynamic, dtype_out: int8}}": (
        "1: group a: norm group has no dtype_out int8; leave dtype_out out, or use another norm"
    ),
    "groups: {a: {norm: group, dtype_in: bf16, save_mv: true}}": (
        "1: group a: norm group has no save_mv true; leave save_mv out, or use another norm"
    ),
    "groups: {a: {norm: rms, dtype_in: bf16, channels_last: true}}": (
        "1: group a: norm rms has no channels_last true; leave channels_last out, or use another norm"
    ),
    f"{GROUP}    fadd:\n    - none\n    - none": f"7: group a: fadd lists none twice, {TWICE}",
    f"{GROUP}  a: {{}}": "5: a is given twice, first on line 2; keep one of the two",
    f"{GROUP}defaults:\n  n: all\n  n: all": "7: defaults: n is given twice, first on line 6; keep one of the two",
    f"{GROUP}  b: {{norm: [rms, layer], dtype_in: fp16, n: [n256, n128]}}": (
        "5: group b: ln_fwd_fp16_n128 is made here and by group a on line 2; let only one of the two groups make it"
    ),
    "a: 1\ngroups: [1": "2: "
    + NO_YAML.format("while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
    "groups: {a: *b}": "1: " + NO_YAML.format("found undefined alias 'b'"),
    "a: b\n---\nc: d": "2: " + NO_YAML.format("expected a single document in the stream, but found another document"),
    "é: 1\na: \x07": "2: " + NO_YAML.format("special characters are not allowed (character 0x7)"),
    "[" * 5000: "1: " + NO_YAML.format("it is nested too deeply"),
}

# Buckets from line 2 on: each N is served once, or the manifest is refused.
BUCKETS = {
    "{}": "2: buckets: there are none; leave buckets out to get the standard ladder",
    "": "2: buckets: expected buckets, as name: first..last, not an empty value",
    "[n4]": "2: buckets: expected buckets, as name: first..last, not a list",
    "\n  n4: 1..4\n  n9: 5..9": (
        "4: buckets: n9 (5..9) is the last bucket and has a cap, so no kernel would serve a longer row; add nbig: 10.."
    ),
    "\n  n4: 2..4\n  nbig: 5..": (
        "3: buckets: n4 (2..4) is the first bucket and must start at 1; buckets ascend; write 1..4"
    ),
    "\n  n4: 1..4\n  n9: 7..9\n  nbig: 10..": (
        "4: buckets: there is a gap between n4 (1..4) and n9 (7..9): no bucket serves N = 5..6; start n9 at 5"
    ),
    "\n  n4: 1..4\n  n9: 3..9\n  nbig: 10..": (
        "4: buckets: n4 (1..4) and n9 (3..9) overlap: both serve N = 3; start n9 at 5"
    ),
    "\n  n4: 1..4\n  n9: 5..9\n  n7: 6..7\n  nbig: 10..": (
        "5: buckets: n9 (5..9) and n7 (6..7) overlap or are out of order; "
        "buckets ascend, each starting one past the last"
    ),
    "\n  nbig: 1..\n  n9: 5..9": (
        "3: buckets: nbig (1..) has no cap, so no bucket can follow it; write it last, or give it a cap"
    ),
    "\n  small: 1..4\n  nbig: 5..": (
        "3: buckets: small (1..4) must be called n4: names of instances end in it; rename it"
    ),
    "\n  n4: 1..4\n  n9: 5..": ("4: buckets: n9 (5..) must be called nbig: names of instances end in it; rename it"),
    "\n  n4: 0..4": "3: buckets: n4 takes a range, first..last or first.., from 1 up, not '0..4'",
    "\n  n4: 4": "3: buckets: n4 takes a range, first..last or first.., not the whole number 4",
    "\n  n1: 4..1": "3: buckets: n1 (4..1) ends before it starts; write first..last",
}

CASES = [
    *((f"{GROUP}    {line}\n", f"5: group a: {message}") for line, message in IN_A_GROUP.items()),
    *((f"{GROUP}    {line}\n", f"2: group a: {message}") for line, message in ILLEGAL.items()),
    *WHOLE.items(),
    *(
        (f"groups: {{a: {{norm: rms, dtype_in: fp16}}}}\nbuckets: {text}\n", message)
        for text, message in BUCKETS.items()
    ),
]


@pytest.mark.parametrize(("text", "message"), CASES, ids=range(len(CASES)))
def test_rejected(manifest_file: Callable[[str], Path], text: str, message: str) -> None:
    refused(manifest_file(text), f":{message}")


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
