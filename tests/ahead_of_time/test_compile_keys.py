"""The list of what a deployment compiles is that of its calls, whole and finite, of GroupNorm by shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.ahead_of_time.compile_keys import compile_keys, find_target, recorded_keys_for
from normforge.ahead_of_time.stand_ins import Deployment, plans
from normforge.codegen.groups import mode_named
from normforge.codegen.model import Mode
from normforge.codegen.tiling import SMALL_M, SOME_M
from normforge.codegen.values import DType, Norm
from normforge.errors import FrozenError
from normforge.kernels.gpu import KernelKey, Target, named_target, target_of
from normforge.kernels.obtain import obtain
from normforge.selection import dispatch
from normforge.tools import cli
from proving.cases import Case, cases, check, operands

from ..calling import table_at
from ..folders import PLAIN, RMS, instance, write
from ..launching import SomeTable
from ..stand_in_driver import driving
from ..thorough import first_of_each
from .calls import BF16, CALLS, CPU, DEFAULTS, listed


@pytest.mark.parametrize(("call", "modes"), DEFAULTS)
def test_the_defaults_list_what_the_common_calls_launch(
    call: Callable[[int], None], modes: list[str], called: set[KernelKey]
) -> None:
    for table in (dispatch.loaded(), SomeTable(dispatch.loaded())):
        found = set[KernelKey]()
        with dispatch.using(table):
            for word, ms in {"few": (3,), "some": (SMALL_M + 1, SOME_M), "many": (SOME_M + 1,)}.items():
                called.clear()
                for m in ms:
                    call(m)
                assert called == listed(*modes, rows=[word])
                found |= called
            assert found == listed(*modes)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_listed_is_what_calls_launch(name: str, called: set[KernelKey]) -> None:
    call, modes, options = CALLS[name].values()
    call()
    if "shapes" in options:
        assert called == listed(*modes, **options)
        of_any = [re.sub(r"^\d+", "*", shape) for shape in options["shapes"]]
        assert called <= listed(*modes, **options | {"shapes": of_any})
        return
    assert called == listed(*modes, rows=["few"], **options)
    # It is this option that does it: none of these calls is the common one.
    common = {"n": options["n"], "weight_dtypes": ["same"]} if "n" in options else {}
    assert called != listed(*modes, rows=["few"], **common)


# A deployment has to say of a training step which vectors there are, of both of two norms at once, and their dtype if
# that is not x's.
STEPS = first_of_each(
    [
        *(
            case
            for case in cases(vary=("norm", "without"), dtype=BF16, vectors=BF16, residual=BF16)
            if case.family != "renormed" or not case["without"]
        ),
        *cases("plain", "renormed", vary=(), dtype=BF16, residual=BF16, without=("x_bias",)),
        *cases("gated", vary=("norm",), dtype=BF16, vectors=BF16, shape=(8, 48), group_size=16),
    ],
    lambda case: (case.family, case["vectors"], case["group_size"]),
    str,
)


@pytest.mark.parametrize("case", STEPS)
def test_a_training_step_launches_what_is_listed_for_the_vectors_it_has(
    case: Case, called: set[KernelKey], tmp_path: Path
) -> None:
    with normforge.record(tmp_path / "needed.yaml"):
        check(case, operands(case))
        with torch.no_grad():
            case.run(operands(case))
    recorded = recorded_keys_for(tmp_path / "needed.yaml", target_of(CPU), None)
    assert {key.key.portable for key in recorded} == {key.portable for key in called}
    # Each mode has a module of its name.
    modes = {key.kernel.rpartition(":")[0].rpartition(".")[2] for key in called} - {"finalise"}
    options: dict[str, Any] = {
        f"{name}_dtypes": [None if name in case["without"] else case["vectors"]] for name in ("weight", "bias")
    }
    shapes = {"group": "3x12x3x4/4", "channels": "2x12x5x7/1"}
    of_rows = {"n": case["group_size"] or 40, "rows": ["few"]}
    sizes = {"shapes": [shapes[case.family]]} if case.family in shapes else of_rows
    assert called == listed(*modes, **sizes, **options)


def test_several_values_are_listed_in_every_combination() -> None:
    def count(**options: Any) -> int:
        return len(compile_keys([512], ["ln_fwd_bf16"], arch="sm_90", **options))

    assert count(rows=["few"]) == 1
    assert count() == 3
    assert count(weight_dtypes=["same", torch.float32, None]) == 9
    assert count(weight_dtypes=["same", torch.float32], bias_dtypes=["same", None]) == 12
    assert count(rows=["few", "many", "most"]) == 3


def test_each_key_is_listed_once_with_all_that_launch_it() -> None:
    found = compile_keys([512], ["ln_bwd_bf16*"], arch="sm_90")
    assert len({key.key for key in found}) == len(found)
    (shared,) = [key for key in found if key.key.symbol == "sum_partials"]
    assert shared.instances == ("ln_bwd_bf16_n512", "ln_bwd_bf16_addst_n512")
    assert shared.rows == ("few", "some", "many")
    assert shared.n == 512
    head = "ln_bwd_bf16_n512, ln_bwd_bf16_addst_n512 with N = 512 and few or some or many rows: "
    assert str(shared) == f"{head}{shared.key}"


def test_a_key_names_the_instance_that_launches_it() -> None:
    """Groups that share no weight are rows, whatever mode was named."""
    (key,) = compile_keys([64], ["rms_fwd_bf16_ga_grp"], weight_dtypes=[None], rows=["few"], arch="sm_90")
    assert key.instances == ("rms_fwd_bf16_ga_n128",)


def test_without_modes_it_is_every_mode_that_serves_a_length(fresh_table: None, tmp_path: Path) -> None:
    write(tmp_path / "mine", [instance(PLAIN, 64), instance(RMS, 64), instance(RMS, 4096)])
    normforge.load_instances(tmp_path / "mine")
    found = compile_keys([64, 4096], arch="sm_80", rows=["few"])
    assert [(key.instances, key.n) for key in found] == [
        (("ln_fwd_fp32_n128",), 64),
        (("rms_fwd_fp32_n128",), 64),
        (("rms_fwd_fp32_n4096",), 4096),
    ]


def test_an_instance_that_the_table_lacks_is_generated_or_refused(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mode(Norm.LAYER, DType.FP16, DType.FP16, x_bias=True)
    (key,) = compile_keys([64], ["ln_fwd_fp16_xb"], arch="sm_90", rows=["few"])
    assert key.instances == (f"{asked.name}_n128",)
    assert list(empty_cache.rglob("ln_fwd_fp16_xb.py"))
    monkeypatch.setattr(dispatch, "_generated", dispatch._NOTHING)
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    with pytest.raises(errors.MissingInstanceError, match=r"no instance of .* serves ln_fwd_fp16_xb with N = 64"):
        compile_keys([64], [asked], arch="sm_90")


def test_rows_of_fp32_that_are_rounded_first_are_rounded_to_the_type_of_dy() -> None:
    mode = "rms_bwd_fp32_cbw"
    keys = compile_keys([512], [mode], dy_dtypes=["same", torch.float16], rows=["many"], arch="sm_90")
    walkers = [dict(key.key.arguments) for key in keys if key.key.symbol.startswith(mode)]
    assert [(arguments["dy_ptr"], arguments["x_ptr"]) for arguments in walkers] == [("*fp16:16", "*fp32:16")]


def test_an_architecture_decides_tiles_types_and_options() -> None:
    def one(mode: str, n: int, **target: Any) -> KernelKey:
        return compile_keys([n], [mode], rows=["many"], **target)[0].key

    fp8 = "rms_fwd_bf16_fp8_e4m3fn_dq"
    kinds = {arch: dict(one(fp8, 4096, arch=arch).arguments)["y_ptr"] for arch in ("sm_80", "sm_90", "gfx942")}
    assert kinds == {"sm_80": "*u8:16", "sm_90": "*fp8e4nv:16", "gfx942": "*u8:16"}
    scaled = {arch: dict(one("ln_fwd_fp8_e5m2_bf16", 4096, arch=arch).arguments) for arch in ("sm_80", "sm_90")}
    assert [arguments["x_ptr"] for arguments in scaled.values()] == ["*u8:16", "*fp8e5:16"]
    assert {arguments["x_scale_ptr"] for arguments in scaled.values()} == {"*fp32"}
    # Its warps are of 64 threads.
    warps = [dict(one("ln_fwd_bf16", 33000, arch=arch).options)["num_warps"] for arch in ("sm_80", "gfx942")]
    assert warps[0] == 2 * warps[1]
    spread = one("ln_bwd_bf16", 16384, arch="sm_90")
    assert spread.symbol.endswith("_spread")
    assert dict(spread.options)["launch_cooperative_grid"] is True
    # A GPU that cannot hold all programs that wait for one another takes another pipeline.
    assert not one("ln_bwd_bf16", 16384, arch="sm_90", multiprocessors=1).symbol.endswith("_spread")


def test_targets_that_are_named() -> None:
    assert named_target("sm_90") == Target("sm_90", 32, 132)
    assert named_target("sm_90", 114).multiprocessors == 114
    assert named_target("gfx90a").warp_size == 64
    assert named_target("gfx1100", 48).warp_size == 32
    assert named_target("sm_86", 84) == Target("sm_86", 32, 84)


# What calls of `compile_keys` have that is not refused.
USUAL: dict[str, dict[str, Any]] = {
    "of rows": {"n": [64], "modes": ["ln_fwd_bf16"]},
    "of GroupNorm": {"modes": ["gn_fwd_bf16"], "shapes": ["2x64x64/32"]},
}
BAD: dict[str, dict[str, tuple[dict[str, Any], str, str]]] = table_at(Path(__file__).with_name("refused.yaml"), {})


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, rows in BAD.items() for name in rows])
def test_what_is_refused(what: str, name: str) -> None:
    given, error, message = BAD[what][name]
    with pytest.raises(getattr(errors, error), match=message):
        compile_keys(**{"arch": "sm_90"} | USUAL[what] | given)


# An odd row length for each way to walk a row, and one with aligned rows.
@pytest.mark.parametrize("n", [103, 4096, 4103, 40009])
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_compilations_depend_on_m_by_its_class_alone(n: int, arch: str) -> None:
    """Of every mode in the table: few, some and many rows, and no further M, are all that is compiled for."""
    target = find_target(arch)
    found = [mode_named(name) for name in sorted({entry.mode for entry in dispatch.loaded()})]
    for mode in (mode for mode in found if isinstance(mode, Mode)):
        entry = dispatch.find(mode, n)
        several = (1, 3, 16, 37, 64, 255, 256, 257, 999, 1001, 2048, 2049, 4096, 65536, 10**6)
        for plan in plans(mode, n, target, Deployment()):
            by_class: dict[int, set[frozenset[KernelKey]]] = {}
            for m in several:
                launched = frozenset(launcher.key for launcher in plan.prepared(m).launchers)
                by_class.setdefault(entry.size(m), set()).add(launched)
            assert all(len(keys) == 1 for keys in by_class.values()), mode.name
            listed = {key.key for key in compile_keys([n], [mode], arch=arch)}
            assert listed >= frozenset().union(*(keys for each in by_class.values() for keys in each)), mode.name


def test_any_number_of_samples_is_one_of_each_class() -> None:
    def told(shape: str, **options: Any) -> list[tuple[str, ...]]:
        return [key.rows for key in compile_keys(modes=["gn_fwd_bf16"], shapes=[shape], arch="sm_90", **options)]

    few, some = SMALL_M, SOME_M
    assert told("*x64x9/32") == [("few", "some", "many")]
    for m, word in ((few, "few"), (few + 32, "some"), (some, "some"), (some + 32, "many")):
        assert told(f"{m // 32}x64x9/32") == [(word,)]
    # InstanceNorm: one sample has some groups, or many.
    assert told(f"*x{few + 1}x9/{few + 1}") == [("some", "many")]
    assert told(f"*x{some + 1}x9/{some + 1}") == [("many",)]
    assert told("*x64x9/32", rows=["few", "many", "most"]) == [("few", "many", "most")]


def test_rows_and_shapes_are_listed_together() -> None:
    modes = ["ln_fwd_bf16", "gn_fwd_bf16_silu"]
    found = compile_keys([64], modes, shapes=["2x64x8x8/32", "2x64x8x8/32"], arch="sm_90", rows=["few"])
    assert [(key.instances, key.n) for key in found] == [(("ln_fwd_bf16_n128",), 64), (("gn_fwd_bf16_silu_n128",), 128)]


def test_the_command_takes_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Path(__file__).with_name("of_shapes.yaml")
    listing = ["warmup", "--list", "--arch", "sm_90"]
    assert cli.main([*listing, "--shape", "2x64x8x8/32,*x64x16x16/32", "--y", "same,fp32", "gn_fwd_bf16"]) == 0
    told = capsys.readouterr().out
    assert "x bf16, weight bf16, bias bf16, y fp32" in told
    of_manifest = [*listing, "--manifest", str(manifest)]
    assert cli.main([*of_manifest, "--shape", "2x64x8x8/32", "--n", "64", "--rows", "few"]) == 0
    instances = {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-2]}
    assert instances == {
        "ln_fwd_bf16_n128",
        *(f"gn_{way}_bf16{lies}_n128" for way in ("fwd", "bwd") for lies in ("", "_cl")),
    }
    assert cli.main([*of_manifest, "--n", "4096"]) == 2
    assert f"no instance of {manifest} serves N = 4096" in capsys.readouterr().err


def test_jax_has_no_such_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normforge.tools.arguments.interpreting", lambda: False)
    out = str(tmp_path / "kernels")
    argv = ["aot", "--for", "jax", "--arch", "sm_90", "--shape", "2x64x8x8/32", "--out", out, "gn_fwd_bf16"]
    assert cli.main(argv) == 2
    assert "gn_fwd_bf16 is GroupNorm's, which normforge.jax has not" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.usefixtures("nothing_compiled", "cold_cache")
def test_a_frozen_call_says_how_to_compile_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    key, *_ = compile_keys(modes=["gn_fwd_bf16_cl"], shapes=["1x128x8x8/32"], arch="sm_90")
    with driving(), pytest.raises(FrozenError, match=r"C=128.*aot --shape`, and x's shape with how many"):
        obtain(key.key, key.function, named_target("sm_90"), 0)
