"""The generator: ladders, selections, folders, and what a manifest may say."""

from __future__ import annotations

from ..mutant import Mutant

_FOLDER = "tests/generator/test_folder.py"
_SELECT = "tests/generator/test_select.py"
_MANIFEST_ERRORS = "tests/generator/test_manifest_errors.py"

MUTANTS = (
    Mutant(
        "ladder-leaves-a-length-out",
        "between two buckets a row length is served by none",
        "codegen/tiling.py",
        "first = 0 if last is None else last + 1",
        "first = 0 if last is None else last + 2",
        ("tests/selection/test_table.py::test_each_row_length_has_the_entry_whose_bucket_holds_it",),
    ),
    Mutant(
        "table-written-first",
        "a run that is cut off leaves a table that names modules which are not there",
        "codegen/folder.py",
        "key=lambda name: name == _TABLE)",
        "key=lambda name: name != _TABLE)",
        (f"{_FOLDER}",),
    ),
    Mutant(
        "foreign-files-are-removed",
        "files of somebody else's in --out are overwritten",
        "codegen/folder.py",
        "        if self.foreign:\n",
        "        if False:\n",
        (f"{_FOLDER}::test_files_of_somebody_elses_are_refused_and_kept",),
    ),
    Mutant(
        "where-less-than-includes",
        "--where 'n<4096' keeps the bucket that ends at 4096",
        "codegen/select.py",
        '"<": operator.lt,',
        '"<": operator.le,',
        (f"{_SELECT}",),
    ),
    Mutant(
        "where-alternatives-all-have-to-hold",
        "--where 'fquant=none|dynamic' keeps nothing",
        "codegen/select.py",
        "return any(_is(mode, axis, word) for word in words) is wanted",
        "return all(_is(mode, axis, word) for word in words) is wanted",
        (f"{_SELECT}",),
    ),
    Mutant(
        "a-name-leaves-rounding-out",
        "modes that truncate and that round share a name, and a module",
        "codegen/model.py",
        '    "rounding": {Rounding.NEAREST: "", Rounding.TRUNCATE: "_trunc"},\n',
        "",
        ("tests/selection/test_table.py::test_which",),
    ),
    Mutant(
        "illegal-combinations-are-legal",
        "truncation of fp8 is taken and ignored",
        "codegen/model.py",
        "if self.rounding is Rounding.TRUNCATE and not self.dtype_out.is_int:",
        "if False:",
        (f"{_MANIFEST_ERRORS}", "tests/calls/test_bad_arguments.py::test_refused"),
    ),
    Mutant(
        "pipelines-share-a-kernel",
        "a mode's module holds no kernel for rows that are read twice",
        "codegen/emit.py",
        'files[f"{mode.name}.py"] = render_module(mode, [p for p in Pipeline if p in wanted])',
        'files[f"{mode.name}.py"] = render_module(mode, [p for p in Pipeline if p in wanted][:1])',
        ("tests/selection/test_table.py::test_every_kernel_exists_in_its_module",),
    ),
    Mutant(
        "products-have-a-head",
        "one_pass: the mean of a row gated before the norm is off where its first values are large",
        "codegen/model.py",
        " and self.prologue[-1] not in _PRODUCTS",
        "",
        ("tests/accuracy/test_accuracy.py::test_rows_gated_before_the_norm_need_no_luck_with_their_first_values",),
    ),
    Mutant(
        "a-decision-is-not-noted",
        "modes between which a template decides share the text of the first one",
        "codegen/sketch.py",
        "            self._notes[_Question(path)] = value\n",
        "            pass\n",
        ("tests/generator/test_sketch.py::test_a_module_reads_as_if_rendered_for_its_mode_alone",),
    ),
    Mutant(
        "a-comparison-is-not-noted",
        "modes of 16 and of 32 bits share the text of the first one",
        "codegen/sketch.py",
        "answer = self.notes[_Question(self.path, compare, other)] = compare(self.value, other)",
        "answer = compare(self.value, other)",
        ("tests/generator/test_sketch.py::test_modes_share_what_templates_do_not_decide_on",),
    ),
    Mutant(
        "a-cast-of-fp32-alone-is-legal",
        "rows of fp32 have a kernel of their own that rounds them to fp32",
        "codegen/model.py",
        "elif self.cast.comes_first and 2 not in (self.dtype_out.itemsize, self.dtype_in.itemsize):",
        "elif False:",
        (f"{_MANIFEST_ERRORS}",),
    ),
    Mutant(
        "a-name-leaves-cast-out",
        "modes that round before the weight and behind it share a name, and a module",
        "codegen/model.py",
        '    "cast": {Cast.AFTER_WEIGHT: "", Cast.BEFORE_WEIGHT: "_cbw"},\n',
        "",
        ("tests/calls/test_cast.py::test_two_roundings_to_the_bit_and_the_weights_gradient_of_the_first",),
    ),
)
