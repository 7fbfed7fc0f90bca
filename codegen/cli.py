"""The generator's command line: read manifests, narrow them by a selection, then write, check or list."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .calls import CallsFile, calls_files
from .command import DIFFERS, DONE, Parser, run
from .emit import own_files, render_folder
from .errors import FolderError
from .folder import Plan, plan
from .manifest import Manifest, load_all
from .report import counts, listing
from .select import select
from .tile_tables import own_tables, read_table
from .words import counted

# A checkout has these beside this package; an installation has neither.
_ROOT = Path(__file__).resolve().parent.parent
_MANIFEST = _ROOT / "instances.yaml"
_FOLDER = _ROOT / "generated"

_DESCRIPTION = """\
Generate normalisation kernels and their dispatch table from a manifest.
In a checkout and with no arguments, bring generated/ up to date with instances.yaml.
"""

_EPILOG = """\
a selection:
  --filter takes shell patterns, matched against whole instance names as --list prints them; one match is enough.
  --where takes conditions on axes, all of which must hold: axis=word, axis=word|word or axis!=word. dtype_out=same
  means dtype_in. For n, = and != mean the bucket that serves that length; <, <=, > and >= compare the last length of
  a bucket, infinite if it has no cap, so n<=8192 keeps the buckets that end at 8192 or before.
  Both options may be given, each several times. The folder then holds the selected instances, and other files of
  normforge's are removed from the folder. From generated/ of a checkout they are removed only with --prune; the same
  holds for another manifest than instances.yaml. --tiles and --out may be given once.

examples:
  {prog} --list --filter 'rms_*_mv_n4096'
  {prog} --out my_kernels --where 'dtype_in=bf16, fquant=dynamic|smooth_dynamic, n<=8192'
  {prog} --manifest mine.yaml --manifest more.yaml --out my_kernels --list-files

exit status: 0 done; 1 --check found differences; 2 nothing was done, and standard error says why.
"""


def main(argv: Sequence[str] | None = None, prog: str = "python generate.py") -> int:
    """Run the generator.

    Args:
        argv: the arguments after the program's name; None takes the process's own.
        prog: the program's name in help and messages.

    Returns:
        The exit status: 0 done, 1 --check found differences, 2 refused.

    Raises:
        SystemExit: --help was asked for, or the arguments are no command; argparse has said so.
    """
    request = parser(prog).request(sys.argv[1:] if argv is None else argv)
    return run(prog, lambda: carry_out(request))


def carry_out(arguments: argparse.Namespace) -> int:
    """Do what parsed arguments ask for, and return the exit status.

    Raises:
        NormforgeError: a manifest, a folder or a table of tiles does not allow it.
    """
    again = arguments.again
    tables = own_tables()
    if arguments.tiles is not None:
        tables = {**tables, arguments.tiles.stem: read_table(arguments.tiles)}
    manifest = select(load_all(arguments.manifest, tables), _joined(arguments.filter), _joined(arguments.where))
    if arguments.verb in _REPORTS:
        print(_REPORTS[arguments.verb](manifest))
        return DONE
    files = render_folder(manifest.instances)
    planned = plan(arguments.out, own_files() | files if arguments.own else files)
    selects = arguments.filter is not None or arguments.where is not None
    if arguments.verb == "write" and arguments.own and not arguments.prune and (selects or not arguments.own_manifest):
        _refuse_to_prune(planned, "this selection" if selects else "this manifest")
    status = _ACTIONS[arguments.verb](manifest, planned, again)
    # Like `own_files`, the functions emitted into the runtime depend on no manifest, so only runs into a checkout's own
    # folder write them.
    calls = calls_files(_ROOT, _shown(_ROOT)) if arguments.own else []
    return max(status, *[_with_calls(arguments.verb, each, again) for each in calls], DONE)


def _refuse_to_prune(planned: Plan, asked: str) -> None:
    if planned.stale or planned.changed:
        raise FolderError(
            f"{asked} would remove {counted(len(planned.stale), 'file')} from {planned.folder} and change "
            f"{len(planned.changed)}; nothing was written or removed. Name another folder with --out, look with "
            "--dry-run, or confirm with --prune"
        )


def _with_calls(verb: str, calls: CallsFile, again: str) -> int:
    if verb == "list-files":
        print(calls.shown)
        return DONE
    if calls.is_clean:
        return DONE
    if verb == "check":
        sys.stdout.writelines(calls.diff())
        sys.stdout.flush()
        print(f"{calls.shown} differs from its template; to bring it up to date: {again}", file=sys.stderr)
        return DIFFERS
    if verb == "write":
        calls.write()
    print(f"{calls.shown}: {'written' if verb == 'write' else 'would be written'}")
    return DONE


def _joined(names: list[str] | None) -> str | None:
    return None if names is None else ",".join(names)


def _write(manifest: Manifest, planned: Plan, again: str) -> int:
    planned = planned.apply()
    written = len(planned.missing) + len(planned.changed)
    print(
        f"{_size(manifest)}: {counted(written, 'file')} written, {len(planned.unchanged)} unchanged, "
        f"{len(planned.stale)} removed in {planned.folder}"
    )
    return DONE


def _list_files(manifest: Manifest, planned: Plan, again: str) -> int:
    for name in sorted(planned.files):
        print(planned.folder / name)
    return DONE


def _dry_run(manifest: Manifest, planned: Plan, again: str) -> int:
    planned.refuse_foreign()
    for verb, names in (("write", planned.missing), ("change", planned.changed), ("remove", planned.stale)):
        for name in names:
            print(f"{verb:<6}  {name}")
    print(
        f"{_size(manifest)}: would write {counted(len(planned.missing), 'file')}, change {len(planned.changed)}, "
        f"remove {len(planned.stale)} and leave {len(planned.unchanged)} in {planned.folder}"
    )
    return DONE


def _check(manifest: Manifest, planned: Plan, again: str) -> int:
    if planned.is_clean:
        print(f"{_size(manifest)}: {planned.folder} is up to date")
        return DONE
    sys.stdout.writelines(planned.diff())
    problems = (("missing", planned.missing), ("changed", planned.changed), ("stale", planned.stale))
    differs = [f"{len(names)} {what}" for what, names in problems if names]
    if planned.foreign:
        differs.append(f"{len(planned.foreign)} not made by normforge ({planned.foreign_names}), to be moved elsewhere")
    sys.stdout.flush()
    print(
        f"{planned.folder} differs from {manifest.path}: {', '.join(differs)}; to bring it up to date: {again}",
        file=sys.stderr,
    )
    return DIFFERS


_REPORTS: dict[str, Callable[[Manifest], str]] = {"list": listing, "count": counts}
_ACTIONS: dict[str, Callable[[Manifest, Plan, str], int]] = {
    "write": _write,
    "list-files": _list_files,
    "dry-run": _dry_run,
    "check": _check,
}


def _size(manifest: Manifest) -> str:
    instances = sum(len(asked.groups) for asked in manifest.asked)
    return f"{counted(instances, 'instance')} in {counted(len(manifest.asked), 'module')}"


def parser(prog: str) -> Parser:
    """Return the parser of the generator's command line."""
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(prog=prog), resolve=_complete)
    parser.add_argument(
        "--manifest",
        type=Path,
        action="append",
        metavar="FILE",
        help="the manifest (default: instances.yaml of a checkout); given several times, the union of the manifests",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder to write (default: generated/ of a checkout)"
    )
    parser.add_argument(
        "--tiles",
        type=Path,
        metavar="FILE",
        help="tiles of an architecture, as normforge tune writes them (sm_90.yaml)",
    )
    for name, metavar, text in (
        ("filter", "GLOB[,GLOB]", "keep the instances whose name matches a glob"),
        ("where", "CONDITION[,CONDITION]", "keep the instances that meet every condition"),
    ):
        parser.add_argument(f"--{name}", action="append", metavar=metavar, help=f"{text}; may be given several times")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="with a selection or --manifest: remove other modules from a checkout's generated/",
    )
    parser.set_defaults(verb="write")
    verbs = parser.add_argument_group("instead of writing (at most one)").add_mutually_exclusive_group()
    for verb, text in (
        ("list", "print each instance's name and what it does"),
        ("count", "print how many there are, by group and by value of each axis"),
        ("list-files", "print the path of every file that the folder will hold, for build systems"),
        ("dry-run", "print which files would be written, changed and removed"),
        ("check", "print a unified diff and exit 1 if any file is missing, stale, changed or not ours"),
    ):
        verbs.add_argument(f"--{verb}", dest="verb", action="store_const", const=verb, help=text)
    return parser


def _complete(parser: Parser, arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in a checkout's own manifest and folder where the user named none."""
    in_checkout = _MANIFEST.is_file()
    reports = arguments.verb in _REPORTS
    if reports and arguments.out is not None:
        parser.error(f"--{arguments.verb} writes nothing, so --out means nothing beside it; leave one of them out")
    if arguments.manifest is None:
        if not in_checkout:
            parser.error("an installed normforge has no instances.yaml of its own; name a manifest: --manifest FILE")
        arguments.manifest = [_shown(_MANIFEST)]
    arguments.own = arguments.out is None
    arguments.own_manifest = [path.resolve() for path in arguments.manifest] == [_MANIFEST.resolve()]
    if arguments.out is None and not reports:
        if not in_checkout:
            parser.error("an installed normforge has no generated/ of its own; name a folder: --out DIR")
        arguments.out = _shown(_FOLDER)
    arguments.again = _without_check(parser.prog, arguments.argv)
    return arguments


def _shown(path: Path) -> Path:
    """Return the shortest form of a path from the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _without_check(prog: str, argv: Sequence[str]) -> str:
    return " ".join([prog, *(shlex.quote(argument) for argument in argv if argument != "--check")])
