"""Slices of texts as micro-batches of a pipeline (TeraPipe, Figure 13 of Zhou et al. 2025), predicted.

A slice of l tokens computes their queries, keys and values, and attends to the keys of all S tokens of its texts. By
count this is what the slices of a text attend to together where causality is not counted, as for whole texts here, and
no slice takes longer than another, as TeraPipe chooses their lengths. So the times favour slices. The keys of other
slices are copied in front of its own.

A backward pass begins with the last slice of a text, whose loss the gradients of all keys need. Until then a stage
keeps the activations of all slices of it, and 1F1B has nothing to free.

Four layers are counted; the others are like the second.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.page import paragraph, table
from benchmarks.pipeline.models import GPT, Block
from lightning_amp.costs.device_rates import Rates
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.techniques.pipeline.schedule.micro_batches import LayerSeconds, LayerTimes, gpipe_seconds, search_all
from lightning_amp.techniques.pipeline.stage_facts import stages_of

COUNTED = 4
"""Layers that are counted."""
SLICES = (1, 2, 4, 8, 16, 32, 64, 1024)
STAGES = 8
Split = tuple[int, int]
"""Parts of the rows, and slices of each text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """A row of Table V, with token size.

    Attributes:
        sizes: Of a GPT; that of Llama is taken for one of its size.
        batches: Texts of a batch: the paper's first.
        paper: Average ratios of its Table VI, which are over batches of rows too.
    """

    sizes: dict[str, int]
    batches: tuple[int, ...]
    paper: str


LENGTH = 1024
LANGUAGES = {
    "GPT of the size of Llama 2 70B": Language(
        sizes={"dim": 8192, "heads": 64, "layers": 80}, batches=(8, 1, 64), paper="4.42, 1.53, 10.79"
    ),
    "GPT-3 175B": Language(
        sizes={"dim": 12288, "heads": 96, "layers": 96}, batches=(4, 1, 64), paper="6.35, 2.01, 7.75"
    ),
}


class SliceBlock(Block):
    """A block for some tokens of a text, with the keys and values of the others."""

    def __init__(self, dim: int, heads: int, others: int) -> None:
        super().__init__(dim, heads)
        self.register_buffer("others", torch.empty(2, 1, heads, others, dim // heads))

    def forward(self, x: Tensor) -> Tensor:
        """[text, token of the slice, dim] -> the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        k, v = (
            torch.cat([old.expand(len(x), -1, -1, -1), new], 2) for old, new in zip(self.others, (k, v), strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def sliced(slices: int, *, dim: int, heads: int, layers: int) -> GPT:
    """A GPT for one of so many slices; with one it is the GPT itself."""
    tokens = LENGTH // slices
    module = GPT(words=50_257, length=tokens + 1, dim=dim, heads=heads, layers=layers)
    if slices > 1:
        module.blocks = torch.nn.ModuleList(SliceBlock(dim, heads, LENGTH - tokens) for _ in range(layers))
    return module


def slice_times(sizes: dict[str, int], rows: int, slices: int, of: Rates) -> dict[int, LayerTimes]:
    """Of every layer for one slice, by the parts that the rows are split into.

    Args:
        sizes: As of `GPT`.
        rows: Texts of a batch.
        slices: Of each text.
        of: Rates of a device, with its links.
    """
    with torch.device("meta"):
        module = sliced(slices, **{**sizes, "layers": COUNTED})
    # one row alone is computed by other operators; a slice of one token has a target too
    most, tokens = max(rows, 4), LENGTH // slices + (slices == LENGTH)
    batch = torch.zeros(most, tokens, dtype=torch.int64, device="meta")
    facts = stages_of(StepOfModule(module, lambda: batch, run_settings=RunSettings()).profiled(of))
    assert facts.passes is not None, facts.reason
    whole, least = facts.passes(None), facts.passes(2)
    if isinstance(whole, str) or isinstance(least, str):
        raise SystemExit(f"a GPT of {slices} slices has no stages: {whole}, {least}")
    found, parts = dict[int, LayerTimes](), 1
    while parts <= rows:
        part = whole if parts == 1 and rows == most else whole.at(least, rows // parts)
        assert part is not None, "operators of a batch of another length are the same"
        one = LayerSeconds.of(part, whole, links=of.links, crossing=(True,), micro_batches=1, at_once=False)
        count = parts * slices
        found[parts] = as_long(LayerTimes.of({count: one}), sizes["layers"])
        parts *= 2
    return found


def as_long(times: LayerTimes, layers: int) -> LayerTimes:
    """The times of so many layers, of which those in the middle are like the second."""

    def longer(table: Any) -> Any:
        return np.repeat(table, [1, layers - COUNTED + 1, *[1] * (COUNTED - 2)], axis=1)

    names = ("forward", "backward", "send_forward", "send_backward")
    return replace(times, **{name: longer(getattr(times, name)) for name in names})


def seconds_of(sizes: dict[str, int], rows: int, of: Rates) -> dict[Split, LayerTimes]:
    """Times for all splits of the rows and of the texts."""
    return {
        (parts, slices): times for slices in SLICES for parts, times in slice_times(sizes, rows, slices, of).items()
    }


def section(of: Rates) -> Iterator[str]:
    """The table, and what follows from it."""
    made = list[list[str]]()
    for name, language in LANGUAGES.items():
        for rows in language.batches:
            times = seconds_of(language.sizes, rows, of)
            best = {split: search_all(one, STAGES).seconds for split, one in times.items()}
            by_rows = min((s for s in best if s[1] == 1), key=best.__getitem__)
            by_tokens = min((s for s in best if s[0] == 1), key=best.__getitem__)
            both = min(best, key=best.__getitem__)
            layers = language.sizes["layers"]
            even = tuple(layers * (s + 1) // STAGES for s in range(STAGES))
            fixed = [float(gpipe_seconds(times[1, n], even)[0]) / best[by_tokens] for n in (1, 4, LENGTH)]
            kept = min(STAGES * rows / by_rows[0], rows)
            made.append(
                [
                    f"{name}, {rows} x {LENGTH:,}",
                    f"{best[by_rows]:.2f} s ({by_rows[0]})",
                    f"{best[by_tokens]:.2f} s ({by_tokens[1]})",
                    f"{best[both]:.2f} s ({both[0]} x {both[1]})",
                    ", ".join(f"{ratio:.2f}" for ratio in fixed),
                    language.paper if rows == language.batches[0] else "",
                    f"{kept:g}, {rows}",
                ]
            )
    header = ["model, texts x tokens", "by rows (p)", "by tokens (p)", "both (rows x slices)"]
    header += ["E-1, E-4, E-SL to tokens", "the paper's averages", "texts kept: 1F1B by rows, by tokens"]
    yield from ["### Figure 13, slices of texts", ""]
    yield from paragraph(
        f"""Predicted: seconds of a step (Eq. 8) on {STAGES} stages, the fastest cut for each p; float32, the same
        device, links of {of.links.intra_bandwidth / 1.25e8:g} Gb/s. The last column has the texts whose activations the
        first stage keeps: under 1F1B those of {STAGES} micro-batches at most; with slices alone all of them."""
    )
    yield from table(header, made)
