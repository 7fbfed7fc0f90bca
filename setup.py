"""Build outside the sources, so that `pip install .` leaves no build/ and no *.egg-info in a clone; add links."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.egg_info import egg_info

# Removed when this process ends.
_SCRATCH = TemporaryDirectory(prefix="normforge-build-")

# The repository that a workflow of GitHub's builds from. In any other build the repository's address is not known.
_SERVER, _NAME = (os.environ.get(f"GITHUB_{name}") for name in ("SERVER_URL", "REPOSITORY"))
_HOME = f"{_SERVER}/{_NAME}" if _SERVER and _NAME else None

# A link or a picture of Markdown whose target is a file of the repository.
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)")


class _Build(build):
    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = _SCRATCH.name


class _EggInfo(egg_info):
    def initialize_options(self) -> None:
        super().initialize_options()
        # An sdist holds the folder, and takes it from the sources.
        if "sdist" not in self.distribution.commands:
            self.egg_base = _SCRATCH.name


def _readme() -> str:
    """Return README.md with links that work on an index's page too."""
    text = Path("README.md").read_text(encoding="utf-8")
    if _HOME is None:
        return text
    return _LINK.sub(lambda found: f"{found[0]}{_HOME}/{'raw' if found[1] else 'blob'}/HEAD/", text)


_URLS = {"Source": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}

setup(
    cmdclass={"build": _Build, "egg_info": _EggInfo},
    long_description=_readme(),
    long_description_content_type="text/markdown",
    project_urls={name: f"{_HOME}{path}" for name, path in _URLS.items()} if _HOME else {},
)
