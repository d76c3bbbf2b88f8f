"""Tables 6 and 9 of the AMP paper next to predicted seconds of a step; for benchmarks/paper/__main__.

The paper's epochs are five steps. Predicted are plans of the library, and the paper's own S1 to S5: probabilities
kept, and its chunks of queries, which are shorter than a bucket of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from benchmarks.page import table
from benchmarks.paper.runs import BUDGET, COARSE, FINE, GENES, GIB, LIGHT_COARSE, LIGHT_FINE, Setting, beside_rna
from lightning_amp.costs.device_rates import Rates, rates_for
from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.sizes import RankSizes, strata_of
from lightning_amp.planning.time.collectives import region_traffic
from lightning_amp.planning.time.operator_costs import parts, there_and_back
from lightning_amp.planning.time.step_seconds import COMPUTING, SENDING, TimedSizes
from lightning_amp.simulation.models_without_values import decoder_subject

RATES = rates_for("RTX 3090")
NO_LAUNCHES = replace(RATES, overhead_seconds=0.0)
STEPS = 5
"""Of an epoch (Section 4)."""
CELLS = {COARSE: 256, FINE: 128, LIGHT_COARSE: 256, LIGHT_FINE: 128}
CHUNK = {COARSE: 128, FINE: 32}
"""Queries of a chunk (Section 4)."""
LIGHT = {(LIGHT_COARSE, 1): 1.59, (LIGHT_COARSE, 4): 1.09, (LIGHT_FINE, 1): 2.34, (LIGHT_FINE, 4): 4.67}
HEAVY = {(COARSE, 4): 137.5, (COARSE, 8): 69.0, (FINE, 4): 5000.0, (FINE, 8): 1320.0}
"""Seconds of an epoch by configuration and GPUs: Tables 6 and 9."""
PAPER_AXES = Axes(placement="hidden", features="sharded", attention="chunked-retained", decode="key-first")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSizes(TimedSizes):
    """A stratum whose chunks have so many queries, whatever its buckets are."""

    chunk: int

    @property
    def queries(self) -> int:
        """Queries that attention takes at a time."""
        return self.chunk


def planned(setting: Setting, policy: str, devices: int, cells: int) -> Plan:
    """Of a policy, at the rates of an RTX 3090."""
    shape = describe(decoder_subject(setting.decoder(), batch_size=cells).module, batch_size=cells)
    return plan(
        beside_rna(profile_of_module(shape)),
        devices=devices,
        device_memory=BUDGET,
        policy=policy,
        batch_size=cells,
        shape=shape,
        rates=RATES,
    )


def paper_seconds(setting: Setting, ranks: int, rates: Rates = RATES) -> float:
    """Of a step under S1 to S5 as the paper describes them."""
    cells, decoder = CELLS[setting], replace(setting.decoder(), launched=True)
    kind: type[TimedSizes] = ChunkSizes
    strata = strata_of(
        kind, decoder, PAPER_AXES, ranks=ranks, cells=cells, element=4, rates=rates, chunk=CHUNK[setting]
    )
    region = region_traffic(decoder, PAPER_AXES, cells=cells, ranks=ranks)
    every = sum(sum(strata.column(term, PAPER_AXES)) for term in (*COMPUTING, SENDING))
    return every + sum(c.seconds(ranks, rates.links) for c in region)


def free(rates: Rates, *, latency: float = 0.0, bandwidth: float = inf) -> Rates:
    """The same devices, on other links; the usual are those that cost nothing."""
    return replace(rates, links=replace(rates.links, latency=latency, intra_bandwidth=bandwidth))


def light() -> Iterator[str]:
    """Table 6."""
    rows = []
    for (setting, gpus), epoch in LIGHT.items():
        batches = (CELLS[setting],) if gpus == 1 else (CELLS[setting], CELLS[setting] // gpus)
        for cells in batches:
            plans = [planned(setting, policy, gpus, cells) for policy in ("paper", "auto")]
            rows.append([setting.name, str(gpus), str(cells), f"{epoch / STEPS:.2f}", *map(_said, plans)])
    header = ["configuration", "GPUs", "cells per GPU", "the paper, s of a step", "policy paper", "auto"]
    yield from table(header, rows)


def heavy() -> Iterator[str]:
    """Table 9, and Table 8's seconds."""
    rows = []
    for (setting, gpus), epoch in HEAVY.items():
        plans = [planned(setting, policy, gpus, CELLS[setting]) for policy in ("paper", "auto")]
        whole, light_one = paper_seconds(setting, gpus), LIGHT_COARSE if setting == COARSE else LIGHT_FINE
        chunks = (setting.strata - 1) * -(-setting.anchors // CHUNK[setting])
        rows.append(
            [
                f"{setting.name}, {gpus} GPUs",
                f"{epoch / STEPS:.1f}",
                f"{LIGHT[light_one, 1] / STEPS * (setting.strata - 1) / (light_one.strata - 1):.2f}",
                f"{epoch / STEPS / chunks * 1e3:.2f} ms",
                f"{whole:.1f}",
                f"{whole - paper_seconds(setting, gpus, free(RATES)):.1f}",
                f"{whole - paper_seconds(setting, gpus, NO_LAUNCHES):.1f}",
                *map(_said, plans),
            ]
        )
    header = ["configuration", "the paper, s of a step", "from its light step", "by chunk"]
    ours = ["its S1-S5, predicted", "of it sent", "launches", "policy paper", "auto"]
    yield from table([*header, *ours], rows)


def scaling() -> Iterator[str]:
    """What the speed-ups of Table 9 could be."""
    sheet, rows = RATES.links.intra_bandwidth, []
    cases = {
        "RTX 3090": RATES,
        "5.7 us a message": free(RATES, latency=5.7e-6, bandwidth=sheet),
        "messages start at once": free(RATES, bandwidth=sheet),
        "free links": free(RATES),
        "free links and launches": free(NO_LAUNCHES),
    }
    for setting in (COARSE, FINE):
        ratios = (paper_seconds(setting, 4, r) / paper_seconds(setting, 8, r) for r in cases.values())
        plans = [[planned(setting, policy, n, CELLS[setting]) for n in (4, 8)] for policy in ("paper", "auto")]
        rows.append(
            [
                setting.name,
                f"{HEAVY[setting, 4] / HEAVY[setting, 8]:.2f}",
                *(f"{ratio:.2f}" for ratio in ratios),
                *(f"{_per_cell(four) / _per_cell(eight):.2f}" for four, eight in plans),
            ]
        )
    yield from table(["speed-up from 4 to 8", "the paper", *cases, "policy paper", "auto, by cell"], rows)


def scale() -> Iterator[str]:
    """How much larger Hi-C is than RNA, by features and by what its decoder computes."""
    rows = []
    for setting, cells in CELLS.items():
        decoder, features = setting.decoder(), setting.strata * setting.features
        sizes = [RankSizes(decoder=decoder, axes=Axes(), k=k, cells=n, ranks=1) for n in (1, cells) for k in (0, 1)]
        flops = [sum(there_and_back(part).flops for part in parts(s).values()) for s in sizes]
        rna = 6.0 * GENES * setting.dim
        ratios = [
            (first + (setting.strata - 1) * other) / (n * rna)
            for first, other, n in ((*flops[:2], 1), (*flops[2:], cells))
        ]
        rows.append([setting.name, f"{features / GENES:.0f}", f"{setting.strata * features / GENES:,.0f}"])
        rows[-1] += [f"{ratio:,.0f}" for ratio in ratios]
    header = ["configuration", "features", "features x strata", "operations, 1 cell", "operations, the batch"]
    yield from table(header, rows)


def _per_cell(made: Plan) -> float:
    assert made.predicted_step_seconds is not None, "of a decoder"
    return made.predicted_step_seconds / made.mesh.data


def _said(made: Plan) -> str:
    strategies = ", ".join(made.strategies) or "none"
    placed = f"{made.mesh.data} x {made.mesh.model}, {made.predicted_peak_bytes / GIB:.1f} GiB"
    return f"{made.predicted_step_seconds:.2f} ({strategies}; {placed})"
