"""A pytest plugin: every so many tests of each file, the same ones each time."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take --every."""
    parser.addoption(
        "--every", type=int, default=1, metavar="K", help="run every K-th test of each file, the first too"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the others out, after markers have left out theirs."""
    every = config.getoption("every")
    places: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        file = item.nodeid.partition("::")[0]
        (left if places[file] % every else kept).append(item)
        places[file] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept
