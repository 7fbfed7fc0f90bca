"""`normforge hub`: what it writes, imported as Hugging Face's `kernels` imports it, and what the layers compute."""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import json
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from normforge.calls.check import check as check_call
from normforge.calls.plan import Plan
from normforge.codegen.hub import _instances
from normforge.codegen.parameters import BACKWARD, FORWARD
from normforge.codegen.tiling import standard_ladder
from normforge.dtypes import TORCH_DTYPES
from normforge.kernels.gpu import ARCHITECTURES, Target
from normforge.selection import dispatch
from normforge.selection.table import source_of
from normforge.tools.cli import main

from ..calling import module_at, outcome_of
from ..fire.world import snapshot
from ..thorough import THOROUGH

VARIANT = Path("build", "torch-cuda")
EPS = 1e-5

Described = list[tuple[str, dict[str, Any], tuple[int, ...]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hub") / "norms"
    assert main(["hub", str(made), "--owner", "someone"]) == 0
    return made


@pytest.fixture(scope="module")
def package(folder: Path) -> Iterator[Any]:
    """The package of a variant, imported as kernels 0.17's importer does it: by its metadata's id."""
    name = json.loads((folder / VARIANT / "metadata.json").read_text())["id"]
    yield module_at(folder / VARIANT / "__init__.py", name)
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[each]


def test_a_repository_is_laid_out_as_kernel_builder_takes_it(folder: Path) -> None:
    """After docs/source/builder/writing-kernels.md of huggingface/kernels, 8ac69fc542a4306eade0759ef7c45b4f2ae57df0."""
    build = (folder / "build.toml").read_text()
    for line in ('name = "normforge-norms"', "edition = 5", 'repo-id = "someone/normforge-norms"', "[torch-noarch]"):
        assert line in build.splitlines()
    here = folder / "torch-ext" / "normforge_norms"
    sources = {path.relative_to(here) for path in here.rglob("*.py")}
    assert {Path("__init__.py"), Path("layers.py")} <= sources
    for backend in re.findall(r'^    "(\w+)",$', build, re.MULTILINE):
        variant = folder / "build" / f"torch-{backend}"
        built = {path.relative_to(variant) for path in variant.rglob("*.py") if "__pycache__" not in path.parts}
        # A build adds the names of operators.
        assert built == {*sources, Path("_ops.py")}
        assert all((variant / path).read_bytes() == (here / path).read_bytes() for path in sources)
        metadata = json.loads((variant / "metadata.json").read_text())
        assert (metadata["name"], metadata["backend"]) == ("normforge-norms", {"type": backend})
        assert re.fullmatch(rf"_normforge_norms_{backend}_[0-9a-f]{{7}}", metadata["id"])
        assert f'"{metadata["id"]}::' in (variant / "_ops.py").read_text()
        for path, digest in metadata["digest"]["files"].items():
            assert base64.b64decode(digest) == hashlib.sha256((variant / path).read_bytes()).digest()
        assert {Path(path) for path in metadata["digest"]["files"]} == built


def test_its_own_tests_pass(folder: Path, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "normforge_norms", package)
    test = runpy.run_path(str(folder / "tests" / "test_normforge_norms.py"))["test_a_layer_agrees_with_torch"]
    ((names, cases),) = (mark.args for mark in test.pytestmark)
    assert names == ("layer", "module")
    for case in cases:
        test(*case)


def test_it_imports_nothing_but_torch_and_triton(folder: Path) -> None:
    for path in (folder / VARIANT).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            own = {name.partition(".")[0] for name in names}
            assert own <= {"torch", "triton", *sys.stdlib_module_names}, path


def test_layers_are_what_kernels_takes(package: Any) -> None:
    """After `_validate_layer` of kernels 0.17.2: no constructor, and no members but a forward and two flags."""
    members = set(dir(torch.nn.Module))
    for name in ("LayerNorm", "TorchRMSNorm", "RMSNorm", "GemmaRMSNorm"):
        layer = getattr(package.layers, name)
        assert issubclass(layer, torch.nn.Module)
        assert layer.__init__ is torch.nn.Module.__init__
        assert set(dir(layer)) - members == {"has_backward", "can_torch_compile"}
        assert layer.has_backward
        assert layer.can_torch_compile


def test_a_folder_is_brought_up_to_date_and_others_files_are_left(tmp_path: Path) -> None:
    main(["hub", str(tmp_path)])
    once = snapshot(tmp_path)
    source = tmp_path / "torch-ext" / "normforge_norms"
    (source / "kernels" / "old.py").write_text("# Generated by normforge from an earlier template\n")
    (source / "theirs.py").write_text("import torch\n")
    main(["hub", str(tmp_path)])
    theirs = str((source / "theirs.py").relative_to(tmp_path))
    assert snapshot(tmp_path) == once | {theirs: b"import torch\n"}
    (source / "layers.py").write_text("mine = True\n")
    (tmp_path / "build.toml").unlink()
    refused = outcome_of(main, ["hub", str(tmp_path)])
    assert "layers.py is there already and normforge did not write it" in refused.err
    assert not (tmp_path / "build.toml").exists()
    assert "is no name on the Hub" in outcome_of(main, ["hub", str(tmp_path), "--owner", "a/b"]).err


# Layers' numbers


class Module(torch.nn.Module):
    """A module with what a layer's forward reads: parameters, and an epsilon under every name."""

    def __init__(self, package: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, affine: bool = True):
        super().__init__()
        self.normalized_shape = shape
        self.eps = self.variance_epsilon = EPS
        self.weight = torch.nn.Parameter(torch.randn(shape).to(dtype)) if affine else None
        self.bias = torch.nn.Parameter(torch.randn(shape).to(dtype)) if affine and name == "LayerNorm" else None
        self.layer = getattr(package.layers, name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer.forward(self, x)


def expected(name: str, shape: tuple[int, ...], x: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
    """Return a layer's formula of fp64 tensors."""
    if name == "LayerNorm":
        return torch.nn.functional.layer_norm(x, shape, weight, bias, EPS)
    return torch.nn.functional.rms_norm(x, shape, weight + 1 if name == "GemmaRMSNorm" else weight, EPS)


# Of a value, beside the largest of its tensor; rounding before the weight too is another rounding.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-6}

NAMES = ("LayerNorm", "TorchRMSNorm", "RMSNorm", "GemmaRMSNorm")


def check(module: Module, name: str, dtype: torch.dtype, *rows: int) -> None:
    shape = module.normalized_shape
    # Rows that lie apart, and start where no vector does.
    x = (3 * torch.randn(*rows, *shape[:-1], shape[-1] + 1) + 1).to(dtype)[..., 1:].requires_grad_()
    leaves = [x, *module.parameters()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y, due = module(x), expected(name, shape, *wide)
    dy = torch.randn_like(y)
    assert y.dtype is dtype
    found = (y, *torch.autograd.grad(y, leaves, dy))
    for one, other in zip(found, (due, *torch.autograd.grad(due, wide, dy.double())), strict=True):
        assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max(), (name, rows, shape)


# A short and a long row, and with time a length of each pipeline and many rows.
SHAPES = [
    (6, 40),
    (5, 1500),
    *(pytest.param(*shape, marks=THOROUGH) for shape in ((3, 5), (3, 4099), (3, 17000), (300, 96))),
]


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_its_formula_and_its_gradients(
    package: Any, name: str, dtype: torch.dtype, m: int, n: int
) -> None:
    check(Module(package, name, (n,), dtype), name, dtype, m)
    if name in ("LayerNorm", "TorchRMSNorm") and n == 40:
        check(Module(package, name, (4, 10), dtype), name, dtype, 2, 3)
        check(Module(package, name, (40,), dtype, affine=False), name, dtype, 2, 3)


def test_rows_are_rounded_where_the_replaced_layer_rounds_them(package: Any) -> None:
    x = torch.randn(8, 40).bfloat16()
    for name, rounds in (("RMSNorm", True), ("TorchRMSNorm", False)):
        module: Any = Module(package, name, (40,), torch.bfloat16)
        row = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        due = module.weight * row.bfloat16() if rounds else (module.weight.float() * row).bfloat16()
        # Rounded elsewhere, one of five would have another last bit.
        assert (module(x) == due).double().mean() > 0.97


@pytest.mark.parametrize("name", NAMES)
def test_what_no_kernel_takes_is_torchs(package: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(package.layers.norms.launch, "_launch", lambda mode, *_: launched.append(mode))
    x = torch.randn(2, 40)
    cases = [(torch.float64, torch.float64)]
    # Gemma's formula takes a weight of any type; of the others, a weight of another type is torch's to say.
    cases += [] if name == "GemmaRMSNorm" else [(torch.bfloat16, torch.float32)]
    for of_x, of_weight in cases:
        module = Module(package, name, (40,), of_weight)
        due = expected(name, (40,), x.to(of_x).double(), *(each.double() for each in module.parameters()))
        torch.testing.assert_close(module(x.to(of_x)).double(), due, rtol=3e-2, atol=3e-2)
    module = Module(package, name, (40,), torch.float32)
    assert module(x[:0]).shape == (0, 40)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 39))
    assert launched == []


def test_a_weight_may_be_a_part_of_one_flat_buffer(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of short rows read two values of a weight at once, which fault at an address between two pairs."""
    launch, found = package.layers.norms.launch, []
    monkeypatch.setattr(launch, "_launch", lambda *given: found.append(given[-1]["weight_ptr"].data_ptr() % 16))
    monkeypatch.setattr(launch, "_add_up", lambda *_: None)
    weight = torch.ones(41, dtype=torch.bfloat16)[1:].requires_grad_()
    package.layers.norms.rms_norm(torch.randn(3, 40, dtype=torch.bfloat16), weight, EPS, 40).sum().backward()
    assert found == [0, 0]


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_torch_compile_breaks_no_graph(package: Any, name: str) -> None:
    module = Module(package, name, (40,), torch.float32)
    x = torch.randn(6, 40, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    (found,), (due,) = (torch.autograd.grad(each(x).square().sum(), x) for each in (compiled, module))
    torch.testing.assert_close(found, due)


def test_operators_are_ones_that_torch_knows(package: Any) -> None:
    norms = package.layers.norms
    x, weight = torch.randn(3, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(norms._layer_norm, (x, weight, None, EPS), test_utils=tests)
    torch.library.opcheck(norms._rms_norm, (x, weight, EPS, 0.0, True), test_utils=tests)


# Launches


def of_runtime(mode: Any, m: int, n: int, target: Target) -> Described:
    """The launches that the runtime comes to: symbols, constants and options, grids."""
    layer, rows = mode.norm.value == "layer", torch.empty(2, n, dtype=TORCH_DTYPES[mode.dtype_in])
    vector, statistic = rows[0], torch.empty(2)
    given: dict[str, Any] = {"x": rows, "weight": vector, "cast": mode.cast}
    if mode.is_backward:
        given |= {"dy": rows, "rstd": statistic} | ({"mean": statistic} if layer else {})
        given["wants"] = ("dx", "dweight", "dbias") if layer else ("dx", "dweight")
    else:
        given |= {"save_mv": True} | ({"bias": vector} if layer else {})
    call = check_call((BACKWARD if mode.is_backward else FORWARD).functions[mode.norm], given)
    assert call.mode == mode
    entry, made = dispatch.find(mode, n), Plan(call, (), target).prepared(m).assembly
    found: Described = []
    for recipe in (*made.walkers, *([made.finisher] if made.finisher else [])):
        source = source_of(entry.package, *entry.module_and_symbol(recipe.part))
        options = dict(recipe.key(source.name, source.parameters, target).options)
        told = {name: value for name, value in recipe.constants.items() if name in source.parameters}
        found.append((source.name.rpartition(":")[2], {**told, **options}, recipe.grid(m, made.programs(m, 1))))
    return found


def of_repository(
    package: Any, mode: Any, m: int, n: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> Described:
    """The launches that the package makes on such a GPU."""
    launch = package.layers.norms.launch
    found: Described = []

    def noting(symbol: str, names: Sequence[str]) -> Any:
        def launched(grid: tuple[int, ...], **given: Any) -> None:
            told = {name for name in given if name not in names or (name.isupper() and name != "M")}
            found.append((symbol, {name: given[name] for name in told}, grid))

        kernel = MagicMock()
        kernel.__getitem__.side_effect = lambda grid: partial(launched, grid)
        return kernel

    def kernel(mode: str, part: str) -> Any:
        _, names = original(mode, part)
        return noting(f"{mode}_{part}", names), names

    original, sums = launch._kernel, launch.finalise.sum_partials
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_kernel", kernel)
        patch.setattr(launch.finalise, "sum_partials", noting("sum_partials", inspect.getfullargspec(sums.fn).args))
        patch.setattr(launch, "_device", lambda _: (target.arch, target.warp_size, target.multiprocessors))
        patch.setattr(launch, "INTERPRETED", False)
        dtype = {word: dtype for dtype, word in launch.DTYPES.items()}[mode.dtype_in.value]
        x, vector, statistic = (torch.empty(*size, dtype=dtype, device="meta") for size in ((m, n), (n,), (m,)))
        layer = mode.norm.value == "layer"
        tensors = {"weight": vector, "rstd": statistic, **({"mean": statistic} if layer else {})}
        if mode.is_backward:
            sums = {"dweight": vector, **({"dbias": vector} if layer else {})}
            launch.backward(mode.name, x, x, sums, {"weight_offset": 0.0}, dx=x, **tensors)
        else:
            given = {**tensors, **({"bias": vector} if layer else {}), "y": x}
            launch.forward(mode.name, x, {"eps": EPS, "weight_offset": 0.0}, **given)
    return found


# Of every bucket two, whose rows start where vectors do: others the runtime reads by windows.
LENGTHS = [n for bucket in standard_ladder() for n in (bucket.last or 2 * bucket.first, -(-bucket.first // 8) * 8)]


@pytest.mark.parametrize("arch", ["sm_90", *(pytest.param(arch, marks=THOROUGH) for arch in ("sm_80", "gfx942"))])
def test_launches_are_the_runtimes(package: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is launched early and no programs wait for one another, as in programs of JAX's."""
    target = replace(ARCHITECTURES[arch], plainly=True)
    modes = list(dict.fromkeys(instance.mode for instance in _instances()))
    assert len(modes) == 16
    compared = 0
    for mode in modes:
        for n in LENGTHS:
            for m in (1, 256, 257, 5000):
                expected_launches = of_runtime(mode, m, n, target)
                assert of_repository(package, mode, m, n, target, monkeypatch) == expected_launches, (mode.name, m, n)
                compared += len(expected_launches)
    assert compared > 1000


def test_some_rows_take_their_tile(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, mode = package.layers.norms.launch, "ln_fwd_bf16_mv"
    (first, last, bucket, many, few, *_), *_ = launch.dispatch.TABLE[mode]["any"]
    some = (*many[:3], 2 * many[3])
    monkeypatch.setattr(launch.dispatch, "SOME_M", 2048, raising=False)
    monkeypatch.setitem(launch.dispatch.TABLE, mode, {"any": ((first, last, bucket, many, few, many, some),)})
    launch._tile.cache_clear()
    taken = [launch._tile(mode, 100, launch._place(m), ("cpu", 32, 1))["warps"] for m in (256, 257, 2048, 2049)]
    launch._tile.cache_clear()
    assert taken == [few[3], some[3], some[3], many[3]]
