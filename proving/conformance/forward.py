"""A forward call of a case, and the errors of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import normforge
from normforge import LayerNormOutput

from .case import Case, Close, Norm
from .judge import OWN, OWN_STATISTICS, CloseTally, ExactTally, QuantisedTally
from .outcome import Book
from .rows import Tensors, blocks, exact, flat, rows_of

FORWARD: dict[Norm, Callable[..., LayerNormOutput]] = {
    Norm.LAYER: normforge.layernorm2d_fwd,
    Norm.RMS: normforge.rmsnorm2d_fwd,
}


def call(case: Case, given: Tensors, **keywords: Any) -> LayerNormOutput:
    """Make the call of a case; keywords are further arguments."""
    names = ("x", "weight", "bias", "residual", "x_bias", "smooth_scale")
    arguments: dict[str, Any] = {name: given[name] for name in names if name in given}
    if case.weight_offset:
        arguments["weight_offset"] = case.weight_offset
    arguments |= {"eps": case.eps, "cast": case.cast, "fadd": case.fadd, "fquant": case.fquant, "save_mv": case.save_mv}
    if case.quantises:
        arguments |= {"scale_dtype": case.scale, "rounding": case.rounding}
    if case.out is not None:
        arguments["out_dtype"] = case.out
    return FORWARD[case.norm](**arguments | keywords)


def judge(case: Case, given: Tensors, got: LayerNormOutput, book: Book) -> None:
    """Hold every output against the oracle's."""
    device, leading = given["x"].device, case.shape[:-1]
    statistics = (leading, torch.float32) if case.save_mv else None
    stored = (case.shape, case.residual) if case.fadd == "pre_add_store" and case.residual else None
    has = {
        "y": book.expects("y", got.y, (case.shape, case.y)),
        "residual_out": book.expects("residual_out", got.residual_out, stored),
        "y_scale": book.expects("y_scale", got.y_scale, (leading, case.scale) if case.quantises else None),
        "mean": book.expects("mean", got.mean, statistics if case.norm is Norm.LAYER else None),
        "rstd": book.expects("rstd", got.rstd, statistics),
    }
    y_tallies = (CloseTally(case.tolerance.y, device), CloseTally(OWN.get(case.y, Close(0.0)), device))
    quantised = QuantisedTally(case.y, case.rounding, device) if case.quantises else None
    to_the_bit = ExactTally(device)
    rounding = torch.finfo(case.scale).eps
    # A scale of 16 bits may be one unit in the last place off.
    y_scale = Close(0.0, max(case.tolerance.y_scale.rtol, rounding))
    scales = CloseTally(y_scale, device)
    moments = {
        name: (CloseTally(case.tolerance.statistics, device), CloseTally(OWN_STATISTICS, device))
        for name in ("mean", "rstd")
    }
    rows = flat(case, given)
    for part in blocks(case):
        want = exact(case, given, rows, part)
        if has["y"] and quantised is None:
            for tally in y_tallies:
                tally.add(rows_of(got.y, case.n)[part], want.z, want.open)
        if has["y"] and has["y_scale"] and quantised is not None and got.y_scale is not None:
            quantised.add(rows_of(got.y, case.n)[part], want.z, got.y_scale.reshape(-1)[part], want.open)
        if has["residual_out"] and got.residual_out is not None and want.residual_out is not None:
            to_the_bit.add(rows_of(got.residual_out, case.n)[part], want.residual_out)
        if has["y_scale"] and got.y_scale is not None and want.y_scale is not None:
            scales.add(got.y_scale.reshape(-1)[part], want.y_scale.double(), want.scale_open)
        for name, moment, exactly in (("mean", got.mean, want.mean), ("rstd", got.rstd, want.rstd)):
            if has[name] and moment is not None:
                for tally in moments[name]:
                    tally.add(moment.reshape(-1)[part], exactly.squeeze(-1))
    if has["y"]:
        book.open("y", *((quantised,) if quantised is not None else y_tallies))
    if has["residual_out"]:
        book.open("residual_out", to_the_bit)
    if has["y_scale"]:
        book.open("y_scale", scales)
    for name in ("mean", "rstd"):
        if has[name]:
            book.open(name, *moments[name])
