"""Build outside the sources, so that `pip install .` leaves no build/ and no *.egg-info in a clone."""

from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.egg_info import egg_info

# Removed when this process ends.
_SCRATCH = TemporaryDirectory(prefix="normforge-build-")


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


setup(cmdclass={"build": _Build, "egg_info": _EggInfo})
