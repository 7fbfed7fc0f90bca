"""Compiling ahead, frozen runs, folders of binaries, kernels on demand, recordings."""

from __future__ import annotations

from ..mutant import Mutant, Suite

_AOT = "tests/runtime/test_aot.py"
_FROZEN = "tests/runtime/test_frozen.py"
_ON_DEMAND = "tests/runtime/test_on_demand.py"
_RECORD = "tests/runtime/test_record.py"

MUTANTS = (
    Mutant(
        "aot-hash-not-checked",
        "a damaged binary is launched",
        "runtime/aot.py",
        "        if found != digest:\n",
        "        if False:\n",
        (f"{_AOT}::test_a_kernel_that_does_not_fit_is_refused",),
        Suite.COMPILE,
    ),
    Mutant(
        "aot-source-not-checked",
        "a binary of another source is launched",
        "runtime/aot.py",
        "if row.source_sha256 != source_digest(function):",
        "if False:",
        (f"{_AOT}::test_a_kernel_that_does_not_fit_is_refused[another_source]",),
        Suite.COMPILE,
    ),
    Mutant(
        "aot-architecture-not-checked",
        "a binary for another GPU is launched",
        "runtime/aot.py",
        "if target.arch != self.arch:",
        "if False:",
        (f"{_AOT}::test_a_kernel_that_does_not_fit_is_refused[another_architecture]",),
        Suite.COMPILE,
    ),
    Mutant(
        "aot-release-not-checked",
        "a binary of another release of Triton is launched",
        "runtime/aot.py",
        "    if folder.triton != here:\n",
        "    if False:\n",
        (f"{_AOT}::test_a_folder_that_does_not_fit_is_refused",),
        Suite.COMPILE,
    ),
    Mutant(
        "aot-digest-leaves-device-functions-out",
        "a kernel whose device functions have changed is taken from a folder",
        "runtime/aot.py",
        '        digest.update(b"\\0" + shared.read_bytes())\n',
        "        pass\n",
        (f"{_AOT}::test_the_source_is_that_of_the_kernel_and_of_what_it_calls",),
    ),
    Mutant(
        "frozen-not-enforced",
        "NORMFORGE_FROZEN=1 compiles",
        "runtime/compiled.py",
        'return setting == "1"',
        "return False",
        (f"{_FROZEN}::test_a_compilation_is_refused_by_name",),
        Suite.COMPILE,
    ),
    Mutant(
        "a-kernels-hash-depends-on-the-order",
        "what warm-up compiled is not found by another process",
        "runtime/hashes.py",
        '            _ = getattr(value, "cache_key", None)\n',
        "            pass\n",
        (f"{_FROZEN}::test_a_kernel_has_one_hash_whatever_was_hashed_before_it",),
        Suite.COMPILE,
    ),
    Mutant(
        "kernels-of-another-device",
        "a kernel that was loaded on one GPU is launched on another",
        "runtime/compiled.py",
        "_compiled[key, device] = found",
        "_compiled[key, 0] = found",
        ("tests/runtime/test_compiled.py::test_each_device_has_its_own",),
    ),
    Mutant(
        "aot-folder-asked-last",
        "Triton compiles what the folder of binaries holds",
        "runtime/compiled.py",
        "found = aot.find(key, function, target) or compile_for(key, function, target)",
        "found = compile_for(key, function, target)",
        ("tests/runtime/test_compiled.py::test_a_kernel_compiled_ahead_of_time_is_taken_first",),
    ),
    Mutant(
        "m-beyond-an-i32",
        "more than 2**31 - 1 rows are counted by an i32",
        "runtime/compiled.py",
        'return "i32" if largest <= LARGEST_I32 else "i64"',
        'return "i32"',
        ("tests/runtime/test_compiled.py::test_integers_have_the_type_that_triton_gives_them",),
    ),
    Mutant(
        "every-pointer-is-aligned",
        "kernels for misaligned tensors are compiled with wide loads",
        "runtime/compiled.py",
        'return _POINTERS[dtype] + (_ALIGNED if aligned else "")',
        "return _POINTERS[dtype] + _ALIGNED",
        ("tests/runtime/test_compiled.py::test_pointers_have_the_type_that_triton_gives_a_tensor",),
    ),
    Mutant(
        "warmup-forgets-few-rows",
        "warm-up leaves the kernel for few rows to be compiled by a call",
        "runtime/keys.py",
        "ms = {FEW: 1, MANY: entry.small_m + 1, MOST: LARGEST_I32 + 1}",
        "ms = {FEW: entry.small_m + 1, MANY: entry.small_m + 1, MOST: LARGEST_I32 + 1}",
        ("tests/runtime/test_warmup.py::test_the_defaults_list_what_the_common_calls_launch",),
    ),
    Mutant(
        "cache-of-other-templates",
        "kernels that another version of the templates generated are taken from the cache",
        "runtime/on_demand.py",
        'digest.update(source.name.encode() + b"\\0" + source.read_bytes() + b"\\0")',
        'digest.update(source.name.encode() + b"\\0")',
        (f"{_ON_DEMAND}::test_the_digest_is_of_the_templates",),
    ),
    Mutant(
        "cache-of-a-spoilt-file",
        "a module that is not the generator's is run from the cache",
        "runtime/on_demand.py",
        "if path.is_file() and path.read_bytes() == data:",
        "if path.is_file():",
        (f"{_ON_DEMAND}::test_a_file_that_is_not_the_generators_is_replaced",),
    ),
    Mutant(
        "recording-leaves-missing-instances-out",
        "an instance that was generated on demand is not recorded",
        "runtime/recording.py",
        "bucket = bucket_of(n, table) if entry is None else Bucket(entry.bucket, entry.first, entry.last)",
        "bucket = Bucket(entry.bucket, entry.first, entry.last) if entry else next(iter(standard_ladder()))",
        (f"{_RECORD}::test_what_was_recorded_is_all_that_the_same_calls_need",),
    ),
    Mutant(
        "recording-replaces-somebody-elses-file",
        "a file that no recording wrote is overwritten",
        "runtime/recording.py",
        "        if foreign:\n",
        "        if False:\n",
        (f"{_RECORD}::test_a_file_of_somebody_elses_is_kept",),
    ),
)
