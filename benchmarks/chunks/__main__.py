"""Write docs/reports/chunks.md: chunks of any module in inference and in training.

    python -m benchmarks.chunks [--quick] [--only budgets ...] [--out docs/reports/chunks.md]

After Zhao et al. 2024 (AutoChunk), Figures 1 and 5, on small models of the same kinds, and in training, which theirs
has not. Bytes are exact; times are medians of 5 rounds that take turns, and tell something on a machine that does
nothing else. About 12 minutes on a quiet core; with --quick two, for a look only.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.chunks.inference import SHARES, budgets, caps, fused
from benchmarks.chunks.lengths import PAPER, lengths
from benchmarks.chunks.measure import ROUNDS
from benchmarks.chunks.plan_time import plan_time
from benchmarks.chunks.promises import promises
from benchmarks.chunks.training import training
from benchmarks.page import ROOT, origin, paragraph

PICTURE = ROOT / "docs" / "reports" / "chunks.png"
TEXTS = {
    "budgets": f"""## Inference under a budget

        `lightning_amp.chunk` at {SHARES[0]:.0%} and {SHARES[1]:.0%} of what eager's tensors take beyond parameters
        and arguments; attention is written out in the first four models. Bytes by the meter, which counts tensors
        that operators make; times as medians of {ROUNDS} rounds, relative to eager in the same round; the difference
        is that of the largest value, in float32. If a budget cannot be met, the row has the least possible one.""",
    "fused": """## Together with attention in one kernel

        Fused attention leaves projections, feed-forward and norms, which run in chunks.""",
    "lengths": f"""## Longer inputs

        The longest input within what eager takes at a length, by the generated forward on fake tensors; and a run with
        values at {PAPER[1]:g} times that length for inputs of one dimension and {PAPER[2]:g} times for two, which is
        what AutoChunk reports, on other models and a GPU. Time is that of one run in which the meter sees every
        operator.""",
    "caps": """## Fixed caps

        Models of the kinds that AutoChunk's own tests run, smaller than theirs: caps of those tests that are below
        eager's bytes here, and lower ones; results compared at 1e-4. Caps above eager's bytes hold by themselves and
        are left out.""",
    "training": """## Training

        Forward and backward pass of a whole module, gradients included. Bytes are those that torch's allocator has
        given out beyond parameters and batch, in kernels and in compiled code too; budgets of chunks are shares of
        eager's bytes by the meter. `activation_memory_budget` is that of torch's partitioner (its own operators
        behind it), which compiles.""",
    "promises": """## What is promised

        25 random budgets per module in training, between the least and the bytes without chunks. *Larger and slower*
        counts larger budgets whose plan has more predicted time.""",
    "plan_time": """## Time to plan

        A GPT of 48 blocks, and 12 blocks of which no two are alike.""",
}
PARTS: dict[str, Callable[..., Iterator[str]]] = {
    "budgets": budgets,
    "fused": fused,
    "lengths": partial(lengths, PICTURE),
    "caps": caps,
    "training": training,
    "promises": promises,
    "plan_time": plan_time,
}


def page(parts: list[str], *, quick: bool) -> Iterator[str]:
    """The document."""
    command = "python -m benchmarks.chunks" + (" --quick" if quick else "")
    yield from ["# Chunks of any module", "", origin(command), ""]
    for name in parts:
        title, _, text = TEXTS[name].partition("\n")
        yield from [title, "", *paragraph(text)]
        yield from PARTS[name](quick=quick)


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short inputs")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some parts")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "reports" / "chunks.md", help="document to write"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with asked.out.open("w") as file:
        # as they come: of a run that was ended early the rows so far are there
        for line in page(asked.only, quick=asked.quick):
            print(line, file=file, flush=True)
            print(line, flush=True)
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
