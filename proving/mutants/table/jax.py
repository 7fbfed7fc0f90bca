"""Norms of JAX arrays: launches, gradients, batches, shards, and where kernels come from."""

from __future__ import annotations

from ..mutant import Mutant, Suite

_PRIMITIVE = "runtime/jax/primitive.py"
_LAUNCHES = "runtime/jax/launches.py"
_CALLS = "runtime/jax/calls.py"
_LAUNCHED = "tests/jax/test_launches.py"
_LOWERED = "tests/jax/test_lowering.py"
_SHARDED = "tests/jax/test_sharding.py"

MUTANTS = (
    Mutant(
        "jax-sums-stay-on-their-device",
        "gradients of weight and bias are those of one device's rows",
        _PRIMITIVE,
        "jax.lax.psum(part, axes).astype(dtype) if name in op.sums else part",
        "part.astype(dtype) if name in op.sums else part",
        (f"{_SHARDED}::test_rows_are_not_sent",),
    ),
    Mutant(
        "jax-sums-rounded-on-each-device",
        "devices round what they add to gradients of weight and bias",
        _PRIMITIVE,
        'op.with_sums_in("float32")',
        "op",
        (f"{_SHARDED}::test_a_sum_over_devices_is_rounded_once",),
    ),
    Mutant(
        "jax-batches-share-a-sum",
        "vmap gives each member the gradient of the whole batch's weight",
        _PRIMITIVE,
        "    if not op.sums:\n        results = apply(op, *joined)",
        "    if True:\n        results = apply(op, *joined)",
        ("tests/jax/test_transforms.py::test_vmap",),
    ),
    Mutant(
        "jax-few-rows-run-as-many",
        "programs from JAX take another kernel for a few rows than those from torch",
        _LAUNCHES,
        "few=ROWS[size] == FEW",
        "few=False",
        (f"{_LAUNCHED}::test_a_window_of_few_rows_keeps_its_warps",),
    ),
    Mutant(
        "jax-sums-of-one-program",
        "partial sums of all programs but one are dropped",
        _LAUNCHES,
        '"M": self.m, "programs": self.programs}',
        '"M": self.m, "programs": 1}',
        (f"{_LAUNCHED}::test_programs_share_rows_as_many_as_the_gpu_runs",),
    ),
    Mutant(
        "jax-gradient-of-the-sum-is-lost",
        "add_layer_norm passes on no gradient of residual_out",
        _CALLS,
        '        adds = "residual_out" in arrived\n',
        "        adds = False\n",
        ("tests/jax/test_functions.py::test_values_and_gradients",),
    ),
    Mutant(
        "jax-statistics-vary-less-than-rows",
        "in shard_map gradients of weights are those of one device",
        "runtime/upstream/jax_internals.py",
        'jax.lax.pcast(array, tuple(sorted(every - own)), to="varying") if every - own else array',
        "array",
        (f"{_SHARDED}::test_shard_map",),
    ),
    Mutant(
        "jax-kernels-wait-for-the-launch-ahead",
        "kernels are compiled for programmatic dependent launch, which jaxlib does not ask for",
        "runtime/kernels/gpu.py",
        "return self._is_from(_FIRST_WITH_PDL) and not self.plainly",
        "return self._is_from(_FIRST_WITH_PDL)",
        ("tests/kernels/test_pipelines.py::test_where_launches_are_plain_no_program_waits_for_another",),
    ),
    Mutant(
        "jax-programs-wait-for-one-another",
        "programs that may never run at once wait for one another",
        "runtime/kernels/gpu.py",
        "        if self.plainly:\n            return 0\n",
        "",
        ("tests/kernels/test_pipelines.py::test_where_launches_are_plain_no_program_waits_for_another",),
    ),
    Mutant(
        "jax-ptx-not-checked",
        "damaged PTX is launched",
        "runtime/kernels/binaries.py",
        "told, text = [self._verify(name, row.files[name]) for name",
        "told, text = [settings.contents(self.path / name) for name",
        (f"{_LOWERED}::test_a_folder_that_does_not_fit_is_refused",),
        Suite.COMPILE,
    ),
    Mutant(
        "jax-frozen-compiles",
        "NORMFORGE_FROZEN=1 compiles what JAX lowers",
        "runtime/jax/code.py",
        "    if settings.frozen():\n",
        "    if False:\n",
        (f"{_LOWERED}::test_what_a_folder_lacks_is_compiled_or_refused",),
        Suite.COMPILE,
    ),
    Mutant(
        "jax-any-jaxlib-will-do",
        "a jaxlib that is none of the range is called, and fails as it may",
        "runtime/upstream/jaxlib_triton.py",
        "except (ImportError, AttributeError, TypeError, ValueError) as error:",
        "except ImportError as error:",
        (f"{_LOWERED}::test_another_jaxlib_is_refused_with_what_would_do",),
    ),
    Mutant(
        "jax-imports-torch",
        "a program of JAX's waits for torch, and has to have it",
        "runtime/__init__.py",
        'return sys.modules.get("torch") is None and ("jax" in sys.modules or find_spec("torch") is None)',
        "return False",
        (f"{_LOWERED}::test_a_program_of_jaxs_imports_torch_when_it_needs_it",),
    ),
)
