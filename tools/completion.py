"""`normforge completion`: what a shell completes after `normforge`."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from .cli import VERBS


def main(args: argparse.Namespace) -> int:
    """Run `normforge completion`; returns 0."""
    print(shtab.complete(every_verb(), args.shell))
    return 0


def every_verb() -> argparse.ArgumentParser:
    """Return one parser of all verbs, made of the verbs' own."""
    parser = argparse.ArgumentParser("normforge")
    parser.add_argument("--version", action="store_true")
    verbs = parser.add_subparsers()
    for name, verb in VERBS.items():
        own = verb.parser_of(f"normforge {name}")
        for action in own._actions:
            if action.type is Path:
                vars(action)["complete"] = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
        verbs.add_parser(name, help=verb.summary, parents=[own], add_help=False)
    return parser
