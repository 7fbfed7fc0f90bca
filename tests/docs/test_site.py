"""The documentation site has every public name, each with a docstring."""

from __future__ import annotations

import inspect
import re

import pytest

import normforge

from .pages import ROOT

API = ROOT / "docs" / "reference" / "api"


@pytest.mark.parametrize("name", sorted({*normforge.__all__} - {"__version__"}))
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = getattr(normforge, name)
    assert inspect.getdoc(value), name
    if inspect.isclass(value):
        members = [member for key, member in vars(value).items() if not key.startswith("_") and callable(member)]
        assert all(inspect.getdoc(member) for member in members)


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    shown = [
        name for page in API.glob("*.md") for name in re.findall(r"^::: normforge\.(\w+)$", page.read_text(), re.M)
    ]
    assert sorted(shown) == sorted({*normforge.__all__, "jax"} - {"__version__"})
