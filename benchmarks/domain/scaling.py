"""Predict a training step of a large vision transformer on 1 to 16 B200, every sample split: seconds and memory.

    python -m benchmarks.domain.scaling [--ranks 1 2 4 8 16] [--sides 1024 2048 4096] [--volume 1024]

The transformer has 16 layers of width 768 over patches of 16 (113 million parameters), as that of Figure 3 of the
ShardTensor paper as far as its text says. Steps are counted on fake tensors in one process; seconds follow from the
operators, with the rates of a B200's data sheet (TF32), and from the collectives, none of them hidden. These are
predictions: nothing was run on a GPU. As in the paper's machine all ranks are in one domain of NVLink; its figures are
of GB200.
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence

from benchmarks.domain.paper import counted
from benchmarks.page import table
from lightning_amp.quantities import format_bytes

HEADER = ["one sample", "ranks", "a step", "faster than 1 rank", "peak of a rank", "sent by a rank"]


def rows(sides: Sequence[int], volumes: Sequence[int], numbers: Sequence[int]) -> Iterator[list[str]]:
    """Of images and of volumes, on numbers of ranks of which the first is 1."""
    for side, dims in [*((side, 2) for side in sides), *((side, 3) for side in volumes)]:
        one = None
        for ranks in numbers:
            found = counted(side, dims, ranks)
            one = one or found["seconds"] * ranks
            yield [
                " x ".join([f"{side:,}"] * dims),
                f"{ranks}",
                f"{found['seconds']:.3f} s",
                f"{one / found['seconds']:.1f}",
                format_bytes(found["peak"]),
                format_bytes(found["sent"]),
            ]


def main() -> None:
    """Count, and print a table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sides", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--volume", type=int, nargs="*", default=[1024])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for line in table(HEADER, rows(asked.sides, asked.volume, asked.ranks)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
