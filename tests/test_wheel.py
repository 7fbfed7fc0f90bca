"""The wheel, installed where there is nothing else: what lands there, and that the generator and the kernels work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normforge

from .thorough import THOROUGH

ROOT = Path(__file__).resolve().parent.parent
# As a workflow of GitHub's names the repository that it builds from.
HOME = "https://server.example/owner/name"

# A mode that normforge's own table lacks: only the user's folder can serve it.
MANIFEST = """\
buckets:
  n64: 1..64
  nbig: 65..
groups:
  mine:
    norm: layer
    dtype_in: fp16
    x_bias: true
    save_mv: true
    n: n64
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment that holds the wheel and, through a .pth file, this process's dependencies."""

    environment: Path
    added: set[str]

    def run(self, *argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the installed `normforge` command outside the repository."""
        return self._run("normforge", *argv, cwd=cwd, **variables)

    def python(self, code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run code in the environment, likewise."""
        return self._run("python", "-c", code, cwd=cwd, **variables)

    def _run(self, program: str, *argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.environment / "bin" / program, *argv],
            cwd=cwd,
            env=inherited | {"TRITON_INTERPRET": "1"} | variables,
            capture_output=True,
            text=True,
            check=False,
        )


@dataclass(frozen=True)
class Built:
    """A wheel, the folder that it was unpacked into, and files that building left beside the sources."""

    wheel: Path
    packages: Path
    left_in_clone: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the wheel from a copy of the sources, so that no earlier build leaks into it."""
    base = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    source = shutil.copytree(ROOT, base / "source", ignore=unwanted)
    cloned = _files(source, "**/*")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_SERVER_URL", HOME.removesuffix("/owner/name"))
        patch.setenv("GITHUB_REPOSITORY", "owner/name")
        _python(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", base / "dist", source)
    (wheel,) = (base / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, base / "unpacked", "zip")
    return Built(wheel, base / "unpacked", _files(source, "**/*") - cloned)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = tmp_path_factory.mktemp("installed") / "environment"
    _python(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    before = _names(packages)
    options = ("install", "--quiet", "--no-index", "--no-deps")
    _python(sys.executable, "-m", "pip", "--python", environment, *options, built.wheel)
    added = _names(packages) - before
    (packages / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    return Installed(environment, added)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _python(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@THOROUGH
def test_only_normforge_lands_in_site_packages(installed: Installed) -> None:
    assert installed.added == {"normforge", f"normforge-{normforge.__version__}.dist-info"}


def test_building_leaves_nothing_in_the_clone(built: Built) -> None:
    """A build/ that stays makes the next wheel of files that are gone from the sources."""
    assert built.left_in_clone == set()


def _metadata(built: Built) -> Message:
    (path,) = built.packages.glob("normforge-*.dist-info/METADATA")
    return message_from_string(path.read_text())


def test_an_indexs_page_links_to_the_repository(built: Built) -> None:
    """Links of README.md to files of the repository lead there; an index has none of those files."""
    metadata = _metadata(built)
    assert f"Source, {HOME}" in metadata.get_all("Project-URL", [])
    assert metadata["Summary"]
    assert metadata["License-Expression"] == "MIT"
    links = re.findall(r"\]\(([^)#]+)", str(metadata.get_payload()))
    ours = [link for link in links if link.startswith(HOME)]
    assert ours
    assert all(link.startswith("https://") for link in links)
    assert [link for link in ours if not (ROOT / link.split("/HEAD/")[1]).is_file()] == []


def test_constraints_pin_what_extras_ask_for(built: Built) -> None:
    metadata = _metadata(built)
    assert set(metadata.get_all("Provides-Extra", [])) >= {"bench", "dist", "docs", "jax", "models"}
    asked = {canonicalize_name(Requirement(line).name) for line in metadata.get_all("Requires-Dist", [])}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if "==" in line}
    assert asked - pinned == {"normforge"}


def test_its_size_is_what_the_readme_says(built: Built) -> None:
    """With room for kernels that a user adds to the manifest."""
    said = re.search(r"normforge is less than ([\d.]+) MB", (ROOT / "README.md").read_text())
    assert said is not None
    assert float(said[1]) / 3 < built.wheel.stat().st_size / 1e6 < float(said[1])


# Folders of sources, the packages that have them in the wheel, and their files.
SOURCES = (
    ("runtime", "normforge", "**/*.py"),
    ("runtime", "normforge", "py.typed"),
    ("runtime", "normforge", "**/*.c"),
    ("codegen", "normforge/codegen", "*.py"),
    ("codegen/tiles", "normforge/codegen/tiles", "*.yaml"),
    ("generated", "normforge/generated", "*.py"),
    ("templates", "normforge/templates", "*"),
    ("tools", "normforge/tools", "*.py"),
)


def test_every_source_is_in_the_wheel(built: Built) -> None:
    for folder, package, pattern in SOURCES:
        expected = _files(ROOT / folder, pattern)
        assert expected
        there = _files(built.packages / package, pattern)
        others = ("codegen/", "generated/", "tools/") if package == "normforge" else ()
        assert {name for name in there if not name.startswith(others)} == expected, (folder, pattern)


def _files(folder: Path, pattern: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file()}


@THOROUGH
def test_a_users_own_kernels_are_generated_and_run(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MANIFEST)
    generated = installed.run("generate", "--manifest", "mine.yaml", "--out", "kernels", cwd=tmp_path)
    assert generated.returncode == 0, generated.stdout + generated.stderr
    mine = {"NORMFORGE_INSTANCES": "kernels", "NORMFORGE_ON_MISS": "error"}

    listed = installed.run("list", cwd=tmp_path, **mine)
    assert "1 of 1 instances" in listed.stdout, listed.stderr

    ran = installed.run("run", "-m", "4", "-n", "64", "-xbias", "1", "-save_mv", "1", cwd=tmp_path, **mine)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ln_fwd_fp16_xb_mv_n64" in ran.stdout
    assert ran.stdout.split()[-2:] == ["valid", "yes"]

    missed = installed.run("run", "-m", "4", "-n", "64", cwd=tmp_path, **mine)
    assert missed.returncode == 2
    assert "ln_fwd_fp16" in missed.stderr


@THOROUGH
def test_the_kernels_it_came_with_run(installed: Installed, tmp_path: Path) -> None:
    ran = installed.run("run", "-m", "4", "-n", "64", cwd=tmp_path, NORMFORGE_ON_MISS="error")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ln_fwd_fp16_n128" in ran.stdout


@THOROUGH
def test_engines_find_their_plugs(installed: Installed, tmp_path: Path) -> None:
    """Loaded as engines load them, where no engine is: what is registered is theirs to say, later."""
    code = """
from importlib.metadata import entry_points
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (plug,) = [each for each in entry_points(group=group) if each.name == "normforge"]
    print(plug.load().__module__)
"""
    found = installed.python(code, cwd=tmp_path)
    assert found.stdout.split() == ["normforge.integrations.vllm", "normforge.integrations.sglang"], found.stderr


@THOROUGH
def test_a_repository_for_hugging_face_is_written(installed: Installed, tmp_path: Path) -> None:
    wrote = installed.run("hub", "norms", cwd=tmp_path)
    assert wrote.returncode == 0, wrote.stderr
    for name in ("build.toml", "flake.nix", "torch-ext/normforge_norms/layers.py", "build/torch-cuda/metadata.json"):
        assert (tmp_path / "norms" / name).is_file()
