"""`lightning-amp fit | validate | test | predict`: run the LightningCLI of command_line.py, and print its results."""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning_amp.cli.verbs import PROGRAM, described
from lightning_amp.errors import PlanError
from lightning_amp.lightning._compat import rank_zero_only
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.command_line import CommandLine
from lightning_amp.quantities import format_bytes
from lightning_amp.text_table import table


def train(words: Sequence[str]) -> CommandLine:
    """Run Lightning's command line with these arguments; rank 0 prints the files that were written.

    The arguments are stored in `sys.argv`, because launched ranks start from it.
    """
    sys.argv[1:] = list(words)
    # a user of the command line cannot act on Lightning's tips about other packages, nor on its calls of deprecated
    # torch functions
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: "Tip: For seamless cloud" not in record.getMessage())
    if words[0] == "predict" and not any(word.startswith(("--ckpt_path", "--help", "-h")) for word in words):
        raise PlanError(
            "predict requires --ckpt_path; predictions of untrained weights mean nothing: add --ckpt_path"
            " last for the checkpoint that fit of this configuration wrote, or name a file"
        )
    verb = words[0]
    # shown before Lightning's flags, of which there are a hundred
    usage = f"{PROGRAM} {verb} --config FILE.yaml [--ckpt_path FILE.ckpt] [options]"
    cli = CommandLine(prog=PROGRAM, help_of={verb: {"usage": usage, **described(verb)}})
    _print_results(cli)
    return cli


@rank_zero_only
def _print_results(cli: CommandLine) -> None:
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StratumMemoryMonitor) and callback.written:
            print(f"\n{memory_table(callback.table())}")
            if callback.modules():
                print(f"\n{memory_table(callback.modules(), of='module')}")
        for path in getattr(callback, "written", []):
            print(f"wrote {_short(path)}")
        for remark in getattr(callback, "remarks", []):
            print(fill(remark, 80))
    for path in getattr(cli.model, "written", []):
        print(f"wrote {_short(path)}")
    best = getattr(cli.trainer.checkpoint_callback, "best_model_path", "")
    if cli.subcommand == "fit" and best:
        print(f"wrote {_short(Path(best))}")


def memory_table(rows: Sequence[dict[str, Any]], *, of: str = "stratum") -> str:
    """Format predicted and measured memory as a table, one row per `of`: "stratum" or "module"."""
    cells = [
        [
            str(row[of]) or "(the module itself)",
            "-" if row["predicted"] is None else format_bytes(row["predicted"]),
            format_bytes(row["measured"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table([of, "predicted", "measured", "measured / predicted"], cells)


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
