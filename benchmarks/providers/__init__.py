"""The providers: `peers` describes most, and other modules of this folder those that take more code.

To add a peer, add a row to a tuple `PROVIDERS`. Nothing else has to know of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from fnmatch import fnmatch

from ..errors import UsageError
from ..provider import Provider
from ..results import CEILING, PROJECT

# The order of tables and legends: peers by name, then the project, then the ceiling.
_LAST = (PROJECT, CEILING)


def every_provider() -> dict[str, Provider]:
    """Every provider that is described here, present or not, by name."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    providers = [provider for module in modules for provider in module.PROVIDERS]
    providers.sort(key=lambda provider: (_LAST.index(provider.name) if provider.name in _LAST else -1, provider.name))
    return {provider.name: provider for provider in providers}


def find_providers(patterns: list[str]) -> tuple[dict[str, Provider], dict[str, str]]:
    """Import the providers that a pattern names.

    Args:
        patterns: names or shell patterns of names; none means all.

    Returns:
        Those that can be imported, by name, and for each other one why it cannot.

    Raises:
        UsageError: a pattern names no provider.
    """
    known = every_provider()
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in known):
            raise UsageError(f"--providers {pattern} names no provider; there are {', '.join(known)}")
    present, absent = {}, {}
    for name, provider in known.items():
        if patterns and not any(fnmatch(name, pattern) for pattern in patterns):
            continue
        try:
            provider.load()
        except Exception as error:  # a package that fails in its own import is as absent as one that is not there
            absent[name] = str(error).partition("\n")[0] or type(error).__name__
        else:
            present[name] = provider
    return present, absent
