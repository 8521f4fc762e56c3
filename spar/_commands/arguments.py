# SPDX-License-Identifier: Apache-2.0
"""The arguments of `python -m spar`, and which command they start."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

from . import doctor, info
from .bench import run as bench
from .check import run as check
from .plan import run as plan
from .ranks import UsageError

# modules, of which each has SUMMARY, DESCRIPTION, add_arguments and run, which returns the exit status
COMMANDS: dict[str, Any] = {"info": info, "plan": plan, "check": check, "doctor": doctor, "bench": bench}
FIRST_PRINTS = 10.0  # seconds: a launcher ends all ranks once one failed, but rank 0 is to print why
EPILOG = """\
examples:
  python -m spar info
  python -m spar plan --ranks 8 --tokens 131072 --heads 32 --key-heads 8
  torchrun --standalone --nproc-per-node 4 -m spar check
  torchrun --standalone --nproc-per-node 2 -m spar doctor train.py
  torchrun --standalone --nproc-per-node 2 -m spar bench --only all_to_all

exit status: 0 success, 1 a check failed, 2 wrong arguments or an unusable environment"""


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m spar",
        description="Show what spar finds here and what a set-up costs; check and time operations.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        part = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_arguments(part)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit status."""
    first = os.environ.get("RANK", "0") == "0"  # prints the help, and what is wrong with the arguments
    with contextlib.ExitStack() as stack:
        if not first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            args = make_parser().parse_args(arguments)
        except SystemExit as ended:
            if ended.code and not first:
                time.sleep(FIRST_PRINTS)
            raise
    try:
        status: int = COMMANDS[args.command].run(args)
        return status
    except UsageError as error:
        if first or error.rank is not None:
            where = "" if error.rank is None else f" on rank {error.rank}"
            print(f"spar {args.command}{where}: {error}", file=sys.stderr)
        else:
            time.sleep(FIRST_PRINTS)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
