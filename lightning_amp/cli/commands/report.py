"""`lightning-amp report`: check a trained model, and write pictures and a table of the checks."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from lightning_amp.text_table import table


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; torch is imported when it runs."""
    parser.add_argument("run_dir", metavar="RUN", help="folder of a run, such as lightning_logs/version_0, or a .ckpt")
    parser.add_argument("--data", metavar="DIR", help="data directory (default: the one in the run's configuration)")
    parser.add_argument("--out", metavar="DIR", help="folder to write to (default: RUN/report)")
    parser.add_argument("--celltype-key", help="column of obs with cell types (default: celltype or cell_type)")
    parser.add_argument("--batch-key", default="batch", help="column of obs with batches (default: batch)")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    # imported late: torch takes seconds to import
    from lightning_amp.report.find_run import find_run
    from lightning_amp.report.make_report import make_report, rows_of

    run = find_run(arguments.run_dir, data=arguments.data)
    out = run.folder / "report" if arguments.out is None else Path(arguments.out)
    report = make_report(run, out, celltype_key=arguments.celltype_key, batch_key=arguments.batch_key)
    if arguments.format == "json":
        print(json.dumps([asdict(check) for check in report.checks], indent=2))
        return
    print(f"checkpoint {run.checkpoint}, data {run.data['data_dir']}\n")
    print(table(["", "check", "found", "compared with"], rows_of(report)))
    print()
    for path in report.files:
        print(f"wrote {path}")
