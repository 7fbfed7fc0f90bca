"""TorchTitan's overrides, its configurations, and its norms.

After torchtitan/config/override.py, config/configurable.py and models/common/nn_modules.py of pytorch/torchtitan's
release 0.3.0; overrides had names at 15de1a6f87e9ebba84af52ec1edc0b974f6b5002.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar

import pytest
import torch

from . import install


class Configurable:
    """What is built of its `Config`, a dataclass with keywords and slots."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The fields that all have."""

        _owner: ClassVar[type | None] = None

        def build(self) -> Any:
            assert self._owner is not None
            return self._owner(config=replace(self))

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        config: Any = vars(cls).get("Config")
        if config is not None:
            assert "__slots__" in vars(config)
            assert all(each.kw_only for each in fields(config) if each.init)
            config._owner = cls


def _configurable(norm: Any) -> Any:
    """Return torch's class, built of a `Config` with the fields of both norms."""

    class Norm(norm, Configurable):  # type: ignore[misc]  # one of torch's two classes
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            normalized_shape: int
            eps: float = 1e-5
            elementwise_affine: bool = True

        def __init__(self, config: Any) -> None:
            super().__init__(config.normalized_shape, eps=config.eps, elementwise_affine=config.elementwise_affine)

    return Norm


@dataclass(kw_only=True, slots=True)
class OverrideConfig:
    """What --override.imports fills."""

    imports: list[str] = field(default_factory=list)


def derive(source: Any, target: Any) -> Any:
    there = {each.name for each in fields(source)}
    return target(**{each.name: getattr(source, each.name) for each in fields(target) if each.name in there})


def _apply(registry: dict[str, Any], asked: OverrideConfig, root: Any) -> None:
    for path in asked.imports:
        import_module(path.rpartition(".")[0])
        target, factory = registry[path]
        for each in fields(root):
            if isinstance(getattr(root, each.name), target):
                setattr(root, each.name, factory(getattr(root, each.name)))


def stand_in(monkeypatch: pytest.MonkeyPatch, *, names: bool) -> None:
    """Have these be TorchTitan, of a release whose overrides have names or not."""
    registry: dict[str, Any] = {}

    def override(*, target: type, description: str = "", exact: bool = False) -> Any:
        assert issubclass(target, Configurable.Config)

        def register(factory: Callable[..., Any]) -> Callable[..., Any]:
            key = f"{factory.__module__}.{factory.__name__}"
            assert key not in registry
            registry[key] = target, factory
            return factory

        return register

    def named_override(name: str, *, target: type, description: str = "", exact: bool = False) -> Any:
        assert name
        return override(target=target, description=description, exact=exact)

    config = {
        "Configurable": Configurable,
        "OverrideConfig": OverrideConfig,
        "apply_overrides": lambda asked, root: _apply(registry, asked, root),
        "clear_overrides": registry.clear,
        "derive": derive,
        "override": named_override if names else override,
    }
    norms = {name: _configurable(getattr(torch.nn, name)) for name in ("RMSNorm", "LayerNorm")}
    install(monkeypatch, {"torchtitan.config": config, "torchtitan.models.common.nn_modules": norms})
