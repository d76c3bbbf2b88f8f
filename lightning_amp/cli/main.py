"""`lightning-amp`: demo, prepare, profile, plan, simulate, calibrate, tune, convert, verify, and Lightning's four.

For data directories, the first four do not import torch, so they start fast; the last four are Lightning's command line
with its flags.
`simulate` and `calibrate` import torch after their arguments have been checked.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from lightning_amp.cli.commands import calibrate, convert, demo, plan, prepare, profile, report, simulate, tune, verify
from lightning_amp.cli.verbs import PROGRAM, VERBS, described
from lightning_amp.data.files.directory import FULL, cannot_write
from lightning_amp.errors import STATUS_OF_INTERRUPT, AmpError

TRAINING = ("fit", "validate", "test", "predict")
COMMANDS = (demo, prepare, profile, plan, simulate, calibrate, tune, convert, verify, report)
"""Modules that define a command: `add_flags` sets its flags and its function. All other commands are Lightning's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0: success; 2: an error that the user can correct; 3: nothing fits the memory; 130: Ctrl-C; 143: SIGTERM in a fit.
    """
    words, status = list(sys.argv[1:] if argv is None else argv), 0
    # torch warns at import if another package has installed pynvml
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    try:
        if words and words[0] in TRAINING:
            from lightning_amp.cli.commands.train import train

            train(words)
        else:
            arguments = _parser().parse_args(words)
            status = arguments.run(arguments) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()  # the reader, such as `head`, has seen enough
    except KeyboardInterrupt:
        print("lightning-amp: interrupted", file=sys.stderr)
        return STATUS_OF_INTERRUPT
    except Exception as error:
        mistake = _mistake_in(error)
        if mistake is None:
            raise
        _drop_output()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"lightning-amp: error: {mistake}", file=sys.stderr)
        return mistake.status if isinstance(mistake, AmpError) else AmpError.status
    return status


def _drop_output() -> None:
    """Discard pending output of a closed pipe: Python would report it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mistake_in(error: BaseException | None) -> BaseException | str | None:
    """Return the user's mistake behind an error, or None.

    A mistake is an AmpError or a full disk anywhere in the chain of errors (jsonargparse and torch wrap them), a
    MisconfigurationException of Lightning, or a file that is missing or cannot be opened.
    """
    first, seen = error, set()
    while error is not None and id(error) not in seen:
        if isinstance(error, AmpError):
            return error
        if isinstance(error, OSError) and error.errno in FULL:
            return cannot_write(error.filename, error)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    refusal = type(first).__name__ == "MisconfigurationException"
    return first if refusal or isinstance(first, (FileNotFoundError, PermissionError)) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train multi-modal single-cell Hi-C models within the memory you have.",
        epilog="fit, validate, test and predict take Lightning's flags: lightning-amp fit --help",
    )
    # imported by name: the package imports modules above this folder
    version = import_module("lightning_amp").__version__
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    parsers = {
        verb: verbs.add_parser(verb, help=words[0], formatter_class=raw, **described(verb))
        for verb, words in VERBS.items()
    }
    for command in COMMANDS:
        command.add_flags(parsers[command.__name__.rpartition(".")[2]])
    return parser
