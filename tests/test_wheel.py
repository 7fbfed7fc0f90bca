"""The wheel, installed where there is nothing else: what lands there, and that the generator and the kernels work."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normforge

from .calling import command, there
from .thorough import THOROUGH

ROOT = Path(__file__).resolve().parent.parent
# As a workflow of GitHub's names the repository that it builds from.
HOME = "https://server.example/owner/name"
# Folders of sources that are packages in normforge; runtime/ is normforge itself.
INNER = ("codegen", "generated", "templates", "tools")


@dataclass(frozen=True)
class Built:
    """A wheel, the folder that the wheel was unpacked into, and files that building left beside the sources."""

    wheel: Path
    packages: Path
    left_in_clone: set[str]


def _files(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


def _python(*arguments: str | Path, **environment: str) -> None:
    done = command(sys.executable, *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the wheel from a copy of the sources, so that no earlier build leaks into it."""
    base = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    source = shutil.copytree(ROOT, base / "source", ignore=unwanted)
    cloned = _files(source)
    github = {"GITHUB_SERVER_URL": HOME.removesuffix("/owner/name"), "GITHUB_REPOSITORY": "owner/name"}
    _python("-m", "build", "--wheel", "--no-isolation", "--outdir", base / "dist", source, **github)
    (wheel,) = (base / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, base / "unpacked", "zip")
    return Built(wheel, base / "unpacked", _files(source) - cloned)


@pytest.fixture(scope="module")
def run(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return what runs a command in an environment of the wheel, with this process's dependencies by a .pth file."""
    home = tmp_path_factory.mktemp("installed") / "environment"
    _python("-m", "venv", "--without-pip", home)
    options = ("install", "--quiet", "--no-index", "--no-deps")
    _python("-m", "pip", "--python", home, *options, built.wheel)
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")

    def run(program: str, *argv: str, cwd: Path, status: int = 0, **variables: str) -> str:
        done = command(home / "bin" / program, *argv, cwd=cwd, PYTHONPATH=None, TRITON_INTERPRET="1", **variables)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_only_normforge_lands_in_site_packages(built: Built) -> None:
    expected = {"normforge", f"normforge-{normforge.__version__}.dist-info"}
    assert {path.name for path in built.packages.iterdir()} == expected


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
    most = float(there(re.search(r"normforge is less than ([\d.]+) MB", (ROOT / "README.md").read_text()))[1])
    assert most / 3 < built.wheel.stat().st_size / 1e6 < most


def test_every_source_is_in_the_wheel(built: Built) -> None:
    inner = {f"{folder}/{name}" for folder in INNER for name in _files(ROOT / folder)}
    assert _files(built.packages / "normforge") == inner | _files(ROOT / "runtime")


@THOROUGH
def test_a_users_own_kernels_are_generated_and_run(run: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("mine.yaml"), tmp_path)
    run("normforge", "generate", "--manifest", "mine.yaml", "--out", "kernels", cwd=tmp_path)
    mine: dict[str, Any] = {"cwd": tmp_path, "NORMFORGE_INSTANCES": "kernels", "NORMFORGE_ON_MISS": "error"}
    problem = ("normforge", "run", "-m", "4", "-n", "64")
    assert "1 of 1 instances" in run("normforge", "list", **mine)
    ran = run(*problem, "-xbias", "1", "-save_mv", "1", **mine)
    assert "ln_fwd_fp16_xb_mv_n64" in ran
    assert re.search(r"^valid +yes$", ran, re.MULTILINE)
    assert "ln_fwd_fp16" in run(*problem, status=2, **mine)


@THOROUGH
def test_the_kernels_it_came_with_run(run: Callable[..., str], tmp_path: Path) -> None:
    ran = run("normforge", "run", "-m", "4", "-n", "64", cwd=tmp_path, NORMFORGE_ON_MISS="error")
    assert "ln_fwd_fp16_n128" in ran


@THOROUGH
def test_engines_find_their_plugs(run: Callable[..., str], tmp_path: Path) -> None:
    """Loaded as engines load them, where no engine is: what is registered is theirs to say, later."""
    code = """
from importlib.metadata import entry_points
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (plug,) = [each for each in entry_points(group=group) if each.name == "normforge"]
    print(plug.load().__module__)
"""
    found = run("python", "-c", code, cwd=tmp_path)
    assert found.split() == ["normforge.integrations.vllm", "normforge.integrations.sglang"]
