"""The plug of TorchTitan, beside a stand-in of its overrides and, where it is installed, beside TorchTitan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

from .stand_ins import of_torchtitan

N = 48
MODULE = "normforge.integrations.torchtitan"


@pytest.fixture(params=["stand-in", "own"])
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TorchTitan's `config` and module of norms, with nothing overridden yet."""
    if request.param == "stand-in":
        of_torchtitan.stand_in(monkeypatch)
    else:
        pytest.importorskip("torchtitan.config.override", reason="TorchTitan is not installed")
    config = import_module("torchtitan.config")
    config.clear_overrides()
    sys.modules.pop(MODULE, None)
    yield config, import_module("torchtitan.models.common.nn_modules")
    sys.modules.pop(MODULE, None)
    config.clear_overrides()


def root(config: Any, norms: Any) -> Any:
    """A configuration with two norms beneath it, and one of a class derived from the first's."""

    class Custom(norms.RMSNorm):  # type: ignore[misc]  # either of two packages'
        @dataclass(kw_only=True, slots=True)
        class Config(norms.RMSNorm.Config):  # type: ignore[misc]  # likewise
            pass

    @dataclass(kw_only=True, slots=True)
    class Root(config.Configurable.Config):  # type: ignore[misc]  # likewise
        rms: Any
        layer: Any
        custom: Any

    return Root(
        rms=norms.RMSNorm.Config(normalized_shape=N, eps=1e-3),
        layer=norms.LayerNorm.Config(normalized_shape=N, eps=1e-2, elementwise_affine=False),
        custom=Custom.Config(normalized_shape=N),
    )


def test_listed_overrides_replace_norms(titan: Any) -> None:
    config, norms = titan
    tree = root(config, norms)
    before = tree.rms.build(), tree.layer.build(), type(tree.custom)
    asked = config.OverrideConfig(imports=[f"{MODULE}.rms_norm", f"{MODULE}.layer_norm"])
    config.apply_overrides(asked, tree)
    after = tree.rms.build(), tree.layer.build(), type(tree.custom)
    assert after[2] is before[2]
    for new, old in zip(after[:2], before[:2], strict=True):
        assert isinstance(new, type(old))
        assert type(new).__module__ == MODULE
        assert (new.eps, new.elementwise_affine, new.state_dict().keys()) == (
            old.eps,
            old.elementwise_affine,
            old.state_dict().keys(),
        )
        x = torch.randn(2, 3, N)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = new(one), old(other)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        # By kernels: torch leaves nodes of its own.
        assert type(y.grad_fn).__name__ == "_NormaliseBackward"
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_an_override_that_is_not_listed_replaces_nothing(titan: Any) -> None:
    config, norms = titan
    tree = root(config, norms)
    config.apply_overrides(config.OverrideConfig(imports=[f"{MODULE}.layer_norm"]), tree)
    assert type(tree.rms) is norms.RMSNorm.Config
    assert type(tree.layer) is not norms.LayerNorm.Config


def test_releases_that_name_overrides_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = of_torchtitan.stand_in(monkeypatch, names=True)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    assert registry.keys() == {f"{MODULE}.rms_norm", f"{MODULE}.layer_norm"}
