"""Fits of streams under amp beside plain fits, for every feature of a Trainer that decides what is read.

    python -m benchmarks.any_module.streams [--only STREAM ...] [--write]

A fit is equal if it saw the same batches, left the same parameters bit by bit, and its step was counted; for the
others the row says what differs. `--write` puts the table into docs/reports/any_module.md as it grows. Takes two
minutes on a quiet core.
"""

import argparse
import logging
import warnings

from benchmarks.page import ROOT, origin, write_as_it_grows
from tests.lightning.profiling.stream_cases import FEATURES, STREAMS, equal_with

PAGE, PART = ROOT / "docs" / "reports" / "any_module.md", "any_module.streams"


def main() -> None:
    """Compare, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STREAMS, default=list(STREAMS), help="these streams")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Your `IterableDataset`|Found .* dataloader|You requested to overfit")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    first = f"{origin('python -m benchmarks.any_module.streams --write')} Fits with {', '.join(FEATURES)}."
    rows = map(row_of, options.only)
    write_as_it_grows(PAGE, PART, first, ["stream", "equal fits", "others"], rows, write=options.write)


def row_of(stream: str) -> list[str]:
    """Return the row of a stream."""
    found = {feature: equal_with(stream, feature) for feature in FEATURES}
    others = [f"{feature}: {what}" for feature, what in found.items() if what != "equal"]
    return [stream, f"{len(found) - len(others)} of {len(found)}", "; ".join(others)]


if __name__ == "__main__":
    main()
