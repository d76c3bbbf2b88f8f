"""`lightning-amp convert DIR --out FILE.ckpt`: write a sharded checkpoint as a single plain file."""

import argparse
from pathlib import Path

from lightning_amp.errors import DataError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("directory", metavar="DIR", help="a checkpoint that is a directory of shards")
    parser.add_argument("--out", required=True, metavar="FILE.ckpt", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--trust", action="store_true", help="read classes of your own, which may run code, as weights_only=False does"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    directory, out = Path(arguments.directory), Path(arguments.out)
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise DataError(
            f"cannot convert DIR {str(directory)!r}, found {found}; give a directory that a run with"
            " AMPStrategy(save_distributed_checkpoint=True) has written. A file needs no conversion"
        )
    if out.is_dir() or not out.parent.is_dir():
        found = "is a directory" if out.is_dir() else "lies in a folder that does not exist"
        raise DataError(f"--out {str(out)!r} {found}; give the name of a file to write")
    if out.exists() and not arguments.overwrite:
        raise DataError(f"--out {str(out)!r} exists; choose another name, or add --overwrite")

    # imported late: torch takes seconds to import, and mistakes are reported before
    from lightning_amp.lightning.checkpoints.write_checkpoint import convert_checkpoint

    convert_checkpoint(directory, out, weights_only=not arguments.trust)
    print(f"wrote {out}")
