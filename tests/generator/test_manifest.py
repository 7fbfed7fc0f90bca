"""What a legal manifest expands to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from normforge.codegen.manifest import Manifest
from normforge.codegen.model import Mode
from normforge.codegen.tiling import standard_ladder
from normforge.codegen.values import DType, Norm


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


# Of lengths, the buckets that hold them.
LENGTHS = {
    "4096": "n4096",
    "1": "n128",
    "[128, 129, 200]": "n128 n256",
    "129..256": "n256",
    "100..300": "n128 n256 n512",
    "60000..": "n65536 n131072 nbig",
    "[nbig, 1000000, 100..120]": "n128 nbig",
    "900000000": "nbig",
}
ALL_AXES = (
    "norm: layer, dtype_in: bf16, dtype_out: int8, n: n128, fadd: pre_add_store, fquant: dynamic, save_mv: true, "
    "x_bias: true, scale_dtype: fp16, rounding: truncate"
)
DEFAULTS = "defaults: {norm: rms, dtype_in: [fp16, bf16], n: n128, save_mv: true}"
# The text of a manifest, and its instances.
EXPANDED = {
    **{
        f"groups: {{a: {{norm: layer, dtype_in: fp16, n: {asked}}}}}": " ".join(
            f"ln_fwd_fp16_{bucket}" for bucket in found.split()
        )
        for asked, found in LENGTHS.items()
    },
    f"groups: {{a: {{{ALL_AXES}}}}}": "ln_fwd_bf16_int8_xb_addst_dq_trunc_sfp16_mv_n128",
    f"{DEFAULTS}\ngroups: {{a: {{}}, b: {{dtype_in: fp32, save_mv: false}}}}": (
        "rms_fwd_fp16_mv_n128 rms_fwd_bf16_mv_n128 rms_fwd_fp32_n128"
    ),
    "groups: {a: {norm: rms, dtype_in: [fp16, fp32], dtype_out: same, n: n128}}": "rms_fwd_fp16_n128 rms_fwd_fp32_n128",
    "groups: {a: {norm: rms, dtype_in: fp16, save_mv: [no, Yes], n: n128}}": "rms_fwd_fp16_n128 rms_fwd_fp16_mv_n128",
    "groups: {a: {norm: rms, dtype_in: &b [fp16], n: n128}, b: {norm: layer, dtype_in: *b, n: n128}}": (
        "rms_fwd_fp16_n128 ln_fwd_fp16_n128"
    ),
    # A byte order mark is no part of it.
    "\ufeffgroups: {a: {norm: rms, dtype_in: fp16, n: n128}}": "rms_fwd_fp16_n128",
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
