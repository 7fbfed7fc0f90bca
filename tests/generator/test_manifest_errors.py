"""Every way a manifest can be wrong, by the whole message: file, line, group, what was wrong and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from normforge.codegen.document import Section, compose
from normforge.codegen.errors import ManifestError
from normforge.codegen.manifest import load

# Lines 1 to 4 of every manifest below that starts with it.
GROUP = "groups:\n  a:\n    norm: layer\n    dtype_in: fp16\n"

FADD = "one of none, pre_add_store, pre_add"
AXES = (
    "direction, norm, dtype_in, dtype_out, fadd, fquant, save_mv, x_bias, group_size, scale_format, scale_layout, "
    "scale_ub, quantise_rounded, save_unquant, scale_dtype, rounding, cast, modulated, x_gate, gating, "
    "gate_activation, grouped, activation, channels_last, dropout, n"
)
N = (
    "all, n128, n256, n512, n768, n1024, n1536, n2048, n3072, n4096, n5120, n6144, n7168, n8192, n12288, n16384, "
    "n32768, n65536, n131072, nbig"
)

CASES = {
    "empty": ("", "1: the manifest is empty; it needs groups, each with a norm and a dtype_in"),
    "only_comments": ("# later\n", "1: the manifest is empty; it needs groups, each with a norm and a dtype_in"),
    "a_list": ("[]", "1: expected the sections buckets, defaults, groups, not a list"),
    "no_groups": (
        "defaults: {norm: rms}\n",
        "1: there are no groups, so no instances; add groups, each with a norm and a dtype_in",
    ),
    "empty_groups": ("\ngroups: {}\n", "2: groups is empty; add a group with a norm and a dtype_in"),
    "groups_left_blank": ("groups:\n", "1: expected groups, by name, not an empty value"),
    "unknown_section": (
        "group:\n  a: {}\n",
        "1: unknown section 'group'; did you mean groups? Use one of buckets, defaults, groups",
    ),
    "blank_group": (
        "groups:\n  a:\n",
        "2: group a: expected axes, as axis: value or axis: [value, value], not an empty value",
    ),
    "blank_defaults": (
        GROUP + "defaults:\n",
        "5: defaults: expected axes, as axis: value or axis: [value, value], not an empty value",
    ),
    "no_norm": (
        "groups:\n  a:\n    dtype_in: fp16\n",
        "2: group a: norm is missing; add norm: [layer, rms, l2, group] or one of them",
    ),
    "no_dtype_in": (
        "groups:\n  a:\n    norm: rms\n",
        "2: group a: dtype_in is missing; add dtype_in: [fp16, bf16, fp32, fp8_e4m3fn, fp8_e5m2] or one of them",
    ),
    "unknown_axis": (
        GROUP + "    fad: none\n",
        f"5: group a: unknown axis 'fad'; did you mean fadd? Use one of {AXES}",
    ),
    "unknown_axis_unlike_any": (
        GROUP + "    exclude: int8\n",
        f"5: group a: unknown axis 'exclude'; use one of {AXES}",
    ),
    "unknown_value": (
        GROUP + "    fadd: [none, pre-add]\n",
        f"5: group a: unknown fadd 'pre-add'; did you mean pre_add? Use {FADD}",
    ),
    "value_in_capitals": (
        "groups:\n  a:\n    norm: LAYER\n",
        "3: group a: unknown norm 'LAYER'; did you mean layer? Use one of layer, rms, l2, group",
    ),
    "unknown_value_in_defaults": (
        GROUP + "defaults:\n  norm: rmss\n",
        "6: defaults: unknown norm 'rmss'; did you mean rms? Use one of layer, rms, l2, group",
    ),
    "quantised_input": (
        "groups:\n  a:\n    norm: rms\n    dtype_in: int8\n",
        "4: group a: unknown dtype_in 'int8'; use one of fp16, bf16, fp32, fp8_e4m3fn, fp8_e5m2",
    ),
    "unknown_bucket": (
        GROUP + "    n: n4095\n",
        f"5: group a: unknown n 'n4095'; did you mean n4096? Use one of {N}",
    ),
    "boolean_for_a_word": (
        GROUP + "    fadd: no\n",
        f"5: group a: fadd takes {FADD}, not the boolean false (YAML reads no so); did you mean none?",
    ),
    "boolean_for_a_word_in_a_list": (
        GROUP + "    fadd: [pre_add,\n      off]\n",
        f"6: group a: fadd takes {FADD}, not the boolean false (YAML reads off so); did you mean none?",
    ),
    "true_for_a_word": (GROUP + "    fadd: true\n", f"5: group a: fadd takes {FADD}, not the boolean true"),
    "boolean_for_a_key": (
        GROUP + "    on: fp16\n",
        "5: group a: a key takes a word, not the boolean true (YAML reads on so)",
    ),
    "boolean_for_a_group": (
        "groups:\n  off: {norm: rms}\n",
        "2: a key takes a word, not the boolean false (YAML reads off so)",
    ),
    "word_for_a_boolean": (
        GROUP + "    save_mv: maybe\n",
        "5: group a: save_mv takes true or false, unquoted, not the word 'maybe'",
    ),
    "quoted_boolean": (
        GROUP + "    x_bias: 'true'\n",
        "5: group a: x_bias takes true or false, unquoted, not the word 'true'",
    ),
    "number_for_a_boolean": (
        GROUP + "    save_mv: 1\n",
        "5: group a: save_mv takes true or false, unquoted, not the whole number 1",
    ),
    "list_for_a_boolean": (
        GROUP + "    save_mv: [[true]]\n",
        "5: group a: save_mv takes true or false, unquoted, not a list",
    ),
    "number_for_a_word": (GROUP + "    fadd: 1\n", f"5: group a: fadd takes {FADD}, not the whole number 1"),
    "float_for_a_word": (GROUP + "    fadd: 1.5\n", f"5: group a: fadd takes {FADD}, not the number 1.5"),
    "date_for_a_word": (GROUP + "    fadd: 2020-01-01\n", f"5: group a: fadd takes {FADD}, not the date 2020-01-01"),
    "blank_for_a_word": (
        GROUP + "    fadd:\n",
        f"5: group a: fadd takes {FADD}, not an empty value; did you mean none?",
    ),
    "mapping_for_a_word": (GROUP + "    fadd: {a: b}\n", f"5: group a: fadd takes {FADD}, not a mapping"),
    "list_in_a_list": (GROUP + "    fadd: [[none]]\n", f"5: group a: fadd takes {FADD}, not a list"),
    "tagged_word": (
        GROUP + "    fadd: !mine none\n",
        f"5: group a: fadd takes {FADD}, not !mine none; did you mean none?",
    ),
    "merge_key": (
        GROUP + "    <<: {}\n",
        "5: group a: YAML's merge key << is not supported; write the lines out, or put what all groups share "
        "under defaults:",
    ),
    "octal": (
        GROUP + "    n: 010\n",
        "5: group a: n takes a row length, from 1 up, not 010, which YAML may read as octal; write 10",
    ),
    "empty_list": (
        GROUP + "    fadd: []\n",
        "5: group a: fadd is an empty list, which makes no instance; give it a value or leave it out",
    ),
    "item_twice": (
        GROUP + "    fadd:\n    - none\n    - none\n",
        "7: group a: fadd lists none twice, which makes every instance twice; keep one",
    ),
    "boolean_twice": (
        GROUP + "    save_mv: [true, yes]\n",
        "5: group a: save_mv lists true twice, which makes every instance twice; keep one",
    ),
    "all_and_a_bucket": (
        GROUP + "    n: [all, n128]\n",
        "5: group a: n lists all beside other buckets, and all is every bucket; keep one or the other",
    ),
    "no_length": (GROUP + "    n: 0\n", "5: group a: n takes row lengths from 1 up, not 0"),
    "negative_length": (GROUP + "    n: -4\n", "5: group a: n takes a row length, from 1 up, not the whole number -4"),
    "length_twice": (
        GROUP + "    n: [64, 64]\n",
        "5: group a: n lists 64 twice, which makes every instance twice; keep one",
    ),
    "range_of_nothing": (GROUP + "    n: 4..2\n", "5: group a: n (4..2) ends before it starts; write first..last"),
    "open_below": (GROUP + "    n: ..4\n", "5: group a: n takes a range, first..last or first.., from 1 up, not '..4'"),
    "all_and_a_length": (
        GROUP + "    n: [64, all]\n",
        "5: group a: n lists all beside other buckets, and all is every bucket; keep one or the other",
    ),
    "axis_twice": (GROUP + "    norm: rms\n", "5: group a: norm is given twice, first on line 3; keep one of the two"),
    "group_twice": (GROUP + "  a: {}\n", "5: a is given twice, first on line 2; keep one of the two"),
    "section_twice": (GROUP + "groups: {}\n", "5: groups is given twice, first on line 1; keep one of the two"),
    "default_twice": (
        GROUP + "defaults:\n  n: all\n  n: all\n",
        "7: defaults: n is given twice, first on line 6; keep one of the two",
    ),
    "bucket_twice": (
        GROUP + "buckets:\n  n4: 1..4\n  n4: 5..\n",
        "7: buckets: n4 is given twice, first on line 6; keep one of the two",
    ),
    "instance_twice": (
        GROUP + "  b:\n    norm: [rms, layer]\n    dtype_in: fp16\n    n: [n256, n128]\n",
        "5: group b: ln_fwd_fp16_n128 is made here and by group a on line 2; let only one of the two groups make it",
    ),
    "instance_twice_in_one_group": (
        GROUP + "    dtype_out: [same, fp16]\n",
        "2: group a: ln_fwd_fp16_n128 is made twice by this group; its lists overlap",
    ),
    "illegal": (
        GROUP + "    dtype_out: int8\n",
        "2: group a: dtype_out int8 needs a scale for each row, and fquant none computes none; "
        "use fquant dynamic or smooth_dynamic, or one of fp16, bf16, fp32",
    ),
    "illegal_among_others": (
        "groups:\n  a:\n    norm: layer\n    dtype_in: [fp16, bf16]\n    fquant: [none, dynamic]\n",
        "2: group a: among the combinations of its lists is an illegal one (dtype_in fp16, fquant dynamic): "
        "fquant dynamic writes quantised values, and dtype_out fp16 is not a quantised type; "
        "use one of int8, fp8_e4m3fn, fp8_e4m3fnuz, fp8_e5m2, or fquant none",
    ),
    "illegal_scale": (
        GROUP + "    scale_dtype: fp16\n",
        "2: group a: scale_dtype fp16 is the type of y_scale, and fquant none writes none; "
        "leave scale_dtype out, or use fquant dynamic or smooth_dynamic",
    ),
    "illegal_cast": (
        "groups:\n  a:\n    norm: layer\n    dtype_in: fp32\n    cast: before_weight\n",
        "2: group a: cast before_weight rounds to 16 bits first, and neither dtype_in fp32 nor dtype_out fp32 has 16 "
        "bits; leave cast out, or use fp16 or bf16 for one of them",
    ),
    "illegal_rounding": (
        GROUP + "    rounding: truncate\n",
        "2: group a: rounding truncate is for int8, and dtype_out is fp16; leave rounding out, or use dtype_out int8",
    ),
    "unclosed": (
        "a: 1\ngroups: [1",
        "2: this is not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'; "
        "a manifest is groups of axis: value",
    ),
    "unknown_alias": (
        "groups:\n  a: *b\n",
        "2: this is not valid YAML: found undefined alias 'b'; a manifest is groups of axis: value",
    ),
    "two_documents": (
        "a: b\n---\nc: d\n",
        "2: this is not valid YAML: expected a single document in the stream, but found another document; "
        "a manifest is groups of axis: value",
    ),
    "control_character": (
        "é: 1\na: \x07\n",
        "2: this is not valid YAML: special characters are not allowed (character 0x7); "
        "a manifest is groups of axis: value",
    ),
    "nested_too_deeply": (
        "[" * 5000,
        "1: this is not valid YAML: it is nested too deeply; a manifest is groups of axis: value",
    ),
}


CASES |= {
    "a_tagged_mapping": (
        "groups:\n  a: !!python/object:os.system {norm: layer, dtype_in: fp16}\n",
        "2: group a: expected axes, as axis: value or axis: [value, value], not a mapping tagged "
        "tag:yaml.org,2002:python/object:os.system",
    ),
    "a_tagged_list": (
        "groups:\n  a: {norm: !!set [layer], dtype_in: fp16}\n",
        "2: group a: norm takes one of layer, rms, l2, group, not a list tagged tag:yaml.org,2002:set",
    ),
    "a_name_of_several_lines": (
        'groups:\n  "a\\nb\\e[31m": {norm: layer}\n',
        "2: group a\\nb\\x1b[31m: dtype_in is missing; add dtype_in: [fp16, bf16, fp32, fp8_e4m3fn, fp8_e5m2] "
        "or one of them",
    ),
    "a_long_word": (
        GROUP + f"    fadd: {'x' * 1000}\n",
        f"5: group a: unknown fadd '{'x' * 80}...'; use {FADD}",
    ),
}


@pytest.mark.parametrize(("text", "message"), CASES.values(), ids=CASES)
def test_rejected(manifest_file: Callable[[str], Path], text: str, message: str) -> None:
    path = manifest_file(text)
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == f"{path}:{message}"


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: there is no such manifest; name one with --manifest FILE"


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="the manifest cannot be read: Is a directory"):
        load(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("groups:\n  # größer\n".encode("latin-1"))
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == f"{path}:2: the manifest is not UTF-8 text; save it as UTF-8"


@pytest.mark.parametrize("make", ["pipe", "device", "endless"])
def test_what_might_never_end_is_no_manifest(make: str, tmp_path: Path) -> None:
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/null"), "endless": Path("/dev/zero")}[make]
    if make == "pipe":
        os.mkfifo(path)
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path}: the manifest is no regular file, and might never end; name one with --manifest FILE, or pipe it in "
        "as /dev/stdin"
    )


def test_a_manifest_that_is_far_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ManifestError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: the manifest is longer than 16 MiB; split it in several"


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
