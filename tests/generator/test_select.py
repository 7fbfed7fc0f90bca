"""--filter and --where: what they keep, and what they say when they keep nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from normforge.codegen.axes import AXES
from normforge.codegen.errors import SelectionError
from normforge.codegen.groups import Activation, Span
from normforge.codegen.instance import Instance
from normforge.codegen.manifest import Manifest, load
from normforge.codegen.select import select

from .conftest import AXES_OF_MODES


@pytest.fixture(scope="module")
def several() -> Manifest:
    return load(Path(__file__).with_name("selected.yaml"))


def kept(manifest: Manifest, globs: str | None = None, where: str | None = None) -> list[str]:
    return [instance.name for instance in select(manifest, globs, where).instances]


def message(manifest: Manifest, globs: str | None = None, where: str | None = None) -> str:
    with pytest.raises(SelectionError) as caught:
        select(manifest, globs, where)
    return str(caught.value)


def test_a_glob_is_held_against_whole_names(several: Manifest) -> None:
    assert kept(several, "rms_fwd_bf16_n4096") == ["rms_fwd_bf16_n4096"]
    names = [f"rms_fwd_fp{bits}_mv_n{n}" for bits in (16, 32) for n in (512, 5120, 6144, 65536)]
    assert kept(several, "rms_fwd_fp??_mv_n[56]*") == names


def test_any_of_several_globs_is_enough_and_order_stays_the_manifests(several: Manifest) -> None:
    assert kept(several, "rms_fwd_bf16_n128, ln_fwd_bf16_n128") == ["ln_fwd_bf16_n128", "rms_fwd_bf16_n128"]
    assert kept(several, "ln_fwd_bf16_n128,ln_fwd_bf16_n128") == ["ln_fwd_bf16_n128"]


TABLES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("conditions.yaml").read_text())


@pytest.mark.parametrize(("where", "names"), TABLES["kept"].items())
def test_n_compares_with_buckets(several: Manifest, where: str, names: str) -> None:
    assert kept(several, "rms_fwd_fp16_n*", where) == [f"rms_fwd_fp16_{name}" for name in names.split()]


@st.composite
def typed_conditions(draw: st.DrawFn) -> tuple[str, Callable[[Instance], bool]]:
    """A condition as somebody may type it, and what it means."""
    axis, wanted = draw(st.sampled_from(AXES)), draw(st.booleans())
    words = draw(st.lists(st.sampled_from(axis.words), min_size=1, unique=True))
    tokens = [axis.name, "=" if wanted else "!=", *" | ".join(words).split()]

    def is_met_by(instance: Instance) -> bool:
        default = {"activation": Activation.NONE, "channels_last": False, "span": Span.GROUP}.get(axis.name)
        value: Any = getattr(instance.mode, axis.name, default)
        spelled = {str(value).lower() if isinstance(value, bool) else value.value}
        if axis.name == "dtype_out" and value is instance.mode.dtype_in:
            spelled.add("same")
        return bool(spelled & set(words)) is wanted

    return "".join(draw(st.sampled_from(("", " ", "  "))) + token for token in tokens), is_met_by


@settings(deadline=None, max_examples=40)
@given(conditions=st.lists(typed_conditions(), min_size=1, max_size=4))
def test_where_keeps_exactly_what_meets_every_condition(
    several: Manifest, conditions: list[tuple[str, Callable[[Instance], bool]]]
) -> None:
    where = " ,".join(text for text, _ in conditions)
    expected = [instance for instance in several.instances if all(is_met(instance) for _, is_met in conditions)]
    if expected:
        assert list(select(several, None, where).instances) == expected
    else:
        assert "leaves none of the" in message(several, where=where)


def test_a_glob_that_matches_nothing_shows_the_nearest_names(several: Manifest) -> None:
    assert message(several, "rms_fwd_bf17_n4096") == (
        "--filter 'rms_fwd_bf17_n4096' matches no instance; the nearest are rms_fwd_bf16_n4096, "
        "rms_fwd_bf16_addst_n4096, rms_fwd_bf16_add_n4096, rms_fwd_bf16_mv_n4096, rms_fwd_bf16_addst_mv_n4096; "
        "a glob must match a whole name, so end it in * to match a prefix"
    )
    nearest = message(several, "*_e4m3fnuz_*_sdq_*")
    assert "the nearest are ln_fwd_bf16_fp8_e4m3fn_sdq_n128, " in nearest
    assert "whole names" not in nearest


def test_where_that_leaves_nothing_shows_what_was_there(several: Manifest) -> None:
    assert message(several, where="dtype_out=fp8_e5m2") == (
        "--where 'dtype_out=fp8_e5m2' leaves none of the 912 instances that it was applied to; "
        "their dtype_out: fp16, bf16, fp32, int8, fp8_e4m3fn"
    )
    assert message(several, "*_n256,*_nbig", "dtype_in=fp32, fquant=dynamic") == (
        "--where 'fquant=dynamic' leaves none of the 12 instances that it was applied to; their fquant: none"
    )
    assert message(several, "rms_fwd_fp16_n256,rms_fwd_fp16_nbig", "n=1") == (
        "--where 'n=1' leaves none of the 2 instances that it was applied to; their n: n256 (129..256), nbig (131073..)"
    )


@pytest.mark.parametrize(("where", "problem"), TABLES["unread"].items(), ids=list(TABLES["unread"]))
def test_where_that_cannot_be_parsed(several: Manifest, where: str, problem: str) -> None:
    assert message(several, where=where) == f"--where {where!r}{problem.replace('$AXES', AXES_OF_MODES)}"


@pytest.mark.parametrize("globs", ["", " ", "rms_*,", ",rms_*"])
def test_filter_with_an_empty_part(several: Manifest, globs: str) -> None:
    assert message(several, globs) == f"--filter {globs!r} has an empty part; separate parts with single commas"
