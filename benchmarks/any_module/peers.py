"""The table of peers: peak and seconds of a step on two ranks, and the lines that a person writes for each.

"plain" is one process with the rows of one rank. amp runs without a budget, and with the peak of every peer that needs
less than ddp: at equal bytes it is to be as fast. Ratios are of the time of as many samples.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.any_module.budgets import first_sentence
from benchmarks.any_module.by_hand import lines_of
from benchmarks.any_module.one_run import Found, Wanted, run
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds

SIZES: dict[str, dict[str, int]] = {
    "gene_transformer": {"cells": 16, "length": 512},
    "geneformer": {"cells": 16, "length": 256},
    "gpt2": {"texts": 16, "length": 128},
    "vit": {"images": 16},
    "unet": {"images": 16, "side": 64},
    "evoformer": {"samples": 4, "side": 64},
    "wide_mlp": {"cells": 64},
    "cnn": {"samples": 32, "length": 2048},
}
"""At which products take longer than Python; the first is the number of rows."""
TIMED = 12
LESS = 0.97
"""Share of ddp's peak from which on a peer saves something."""
KEPT = (0.8, 0.5, 0.2, 0.0)
"""Settings of `activation_memory_budget`, shares of activations."""
HEADER = ["module", "by", "peak", "step", "ratio", "plan", "lines of code"]
FIRST = "ddp"
UNUSED = "ddp_find_unused_parameters_true"


def peer_rows(names: list[str], folder: Path, *, quick: bool, rounds: int) -> Iterator[list[str]]:
    """A row for every module and peer; without rounds by turns the first run of each is timed."""
    for name in names:
        asked, found = _once(name, folder, quick=quick)
        steps = {peer: [one.step] for peer, one in found.items() if one.step is not None}
        turns = [peer for _ in range(rounds) for peer in steps]
        for peer in track(turns, description=name, total=len(turns)):
            again = run(asked[peer], folder).step
            if again is not None:
                steps[peer].append(again)
        # the first run of each finds the peak, and is none of the rounds
        seconds = {peer: median(own[bool(rounds) :]) for peer, own in steps.items()}
        for peer, one in found.items():
            yield [
                name,
                peer,
                *_results(one, found[FIRST], seconds, peer),
                str(lines_of(asked[peer].by_hand)),
            ]


def _once(name: str, folder: Path, *, quick: bool) -> tuple[dict[str, Wanted], dict[str, Found]]:
    """Every peer once, then amp with the peaks that they had."""
    rows, *others = SIZES[name].items()
    base = Wanted(name=name, ranks=2, sizes=SIZES[name], strategy=FIRST, steps=TIMED)
    asked = {
        "plain": replace(base, ranks=1, strategy="auto", sizes={rows[0]: rows[1] // 2, **dict(others)}),
        FIRST: base,
        "ddp, blocks recomputed by hand": replace(base, by_hand="recompute"),
        **{
            f"ddp, activation_memory_budget {share}": replace(base, by_hand=share)
            for share in (KEPT[1:2] if quick else KEPT)
        },
        "FSDP2 by hand": replace(base, strategy="fsdp2", by_hand="fsdp2"),
        "FSDP2, blocks recomputed by hand": replace(base, strategy="fsdp2", by_hand="both"),
        "amp": replace(base, strategy={}),
    }
    found = {}
    for peer, wanted in asked.items():
        found[peer] = run(wanted, folder)
        if found[peer].refused and wanted.strategy == FIRST:
            # a module some of whose parameters get no gradient needs the other ddp
            asked[peer] = replace(wanted, strategy=UNUSED)
            found[peer] = run(asked[peer], folder)
    whole = found[FIRST].peak
    for peer in list(found):
        if peer != "plain" and not found[peer].refused and found[peer].peak < LESS * whole:
            of = f"amp with the bytes of: {peer}"
            asked[of] = replace(base, strategy={"device_memory": found[peer].peak})
            found[of] = run(asked[of], folder)
    return asked, found


def _results(one: Found, first: Found, seconds: dict[str, float], peer: str) -> list[str]:
    if one.refused:
        return ["", "", "", first_sentence(one.refused)]
    step = seconds[peer]
    peak = f"{format_bytes(one.peak)} ({one.peak / first.peak:.0%})"
    # ranks of a model axis have one batch where those of a data axis have one each
    as_many = step * one.plan.get("mesh", {}).get("model", 1)
    return [peak, format_seconds(step), f"{as_many / seconds[FIRST]:.2f}", one.strategies]
