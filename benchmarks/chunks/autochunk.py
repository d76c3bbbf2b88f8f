"""Compute the tables of docs/paper/autochunk.md: figures of AutoChunk (Zhao et al. 2024) next to ours.

    python -m benchmarks.chunks.autochunk [--only NAME ...] [--write]
    python -m benchmarks.chunks.autochunk --tune

Predicted seconds are those of the time model: at the rates of an A100 for models as wide as the paper's, on fake
tensors, and of one CPU core for small ones. `--write` puts the tables into the page, `--tune` prints the weights of the
paper's cost that coordinate search finds for the small models; each takes some minutes of one core.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from statistics import mean

import torch
from torch import nn

import lightning_amp
from benchmarks.chunks.measure import count, forward, largest_difference, seconds
from benchmarks.chunks.models import GPT, ViT
from benchmarks.chunks.paper_models import KINDS, ROWS, evoformer, table_args
from benchmarks.page import ROOT, asked_tables, origin, show_tables, table
from lightning_amp._torch import FakeTensorMode
from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.captures import Captures
from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import OPERATOR
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel, OverBudget
from lightning_amp.techniques.chunk.regions.costs import WEIGHTS, Seconds, Weights
from lightning_amp.techniques.chunk.regions.region import ChunkPlan
from lightning_amp.techniques.chunk.run.lower import table_of
from lightning_amp.techniques.chunk.run.planned import lower_within

PAGE, PART = ROOT / "docs" / "paper" / "autochunk.md", "chunks.autochunk"
SHARES = (0.5, 0.4, 0.2)
RATES = {"paper": rates_for("A100"), "small": CPU_CORE}
WITHOUT = {
    "No computation density": ("density", 84.5),
    "No dimension strides": ("stride", 75.2),
    "No number of nodes": ("nodes", 89.2),
    "No flops": ("flops", 91.9),
}
"""Terms of the paper's ablation, with its speeds in per cent."""
GRID = (0.0, *(10.0**k for k in range(-8, 4)))
"""Values of a weight that coordinate search tries."""
DEEP = {
    "GPT": ("GPT-2 small, 12 layers", partial(GPT, 768, 12, heads=12)),
    "ViT": ("ViT-L, 24 layers", partial(ViT, 1024, 24, patch=16, heads=16)),
}
"""All layers of two models, which run on the inputs of `KINDS`."""
LENGTHS = (256, 384)
LOSSES = (0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15)
"""Shares of fused attention's bytes that are tried."""


@cache
def captured(name: str, size: str, *, fused: bool = False) -> Capture:
    """The graph of a model in inference, of fake tensors."""
    return graph_of(lambda: KINDS[name].make(fused, size), lambda: KINDS[name].args(size))


def graph_of(make: Callable[[], nn.Module], args: Callable[[], tuple[torch.Tensor, ...]]) -> Capture:
    """The graph of a module without values."""
    with FakeTensorMode():
        module, given = make().eval(), args()
    with torch.no_grad():
        return Captures().of(module, given, {})


@cache
def plan(capture: Capture, costs: CostModel, n_bytes: int = 2**62) -> ChunkPlan | None:
    """The plan within so many bytes; None if there is none."""
    with torch.no_grad():
        try:
            return lower_within(capture, n_bytes, costs=costs)[1]
        except OverBudget:
            return None


@cache
def eager_bytes(name: str, size: str, *, fused: bool = False) -> int:
    """Most bytes of a model as it is written."""
    return run_bytes(lambda: KINDS[name].make(fused, size), lambda: KINDS[name].args(size))


def speed(size: str, costs: CostModel, *, repeat: bool = False) -> float:
    """Mean speed of the four models at all budgets that can be met, relative to eager; predicted.

    Args:
        repeat: Every piece computes what the graph optimization has moved out of it.
    """
    found = []
    for name in KINDS:
        capture = captured(name, size)
        for share in SHARES:
            made = plan(capture, costs, int(share * eager_bytes(name, size)))
            if made is not None:
                more = repeated(capture, made, costs) if repeat else 0.0
                found.append(made.whole_seconds / (made.seconds + more))
    return mean(found)


def repeated(capture: Capture, made: ChunkPlan, costs: CostModel) -> float:
    """Seconds of the rows before the regions in every piece but the first."""
    with torch.no_grad():
        rows = Seconds(table_of(capture, near=True), costs.rates, train=False).rows
    return sum((region.n_chunks - 1) * rows[i] for region in made.regions for i in region.before)


def tune() -> Weights:
    """Weights by coordinate search: one at a time, the value of the highest speed, until none is better."""
    best = Weights()
    top = speed("small", CostModel(policy="paper", weights=best))
    while True:
        before = top
        for name in Weights._fields:
            for value in GRID:
                tried = best._replace(**{name: value})
                found = speed("small", CostModel(policy="paper", weights=tried))
                if found > top * (1 + 1e-9):
                    best, top = tried, found
        print(f"{best} {top:.4f}", flush=True)
        if top == before:
            return best


def nodes() -> Iterator[str]:
    """Figure 4: how many operators hold how much of the peak."""
    rows = []
    for name, kind in KINDS.items():
        with torch.no_grad():
            found = table_of(captured(name, "paper"), near=True)
        held = block_bytes(found.rows, found.outputs).forward
        own = [n for n, row in zip(held, found.rows, strict=True) if row.kind == OPERATOR]
        below = sum(n < 0.3 * max(own) for n in own) / len(own)
        rows.append([name, kind.sizes["paper"], f"{len(own)}", format_bytes(max(own)), f"{below:.0%}"])
    yield from table(["model", "size", "operators", "peak", "below 30% of it (paper: over 70%)"], rows)


def budgets(size: str) -> Iterator[str]:
    """Figure 5: predicted time at shares of eager's bytes, by both criteria; of small models measured too."""
    policies = [CostModel(policy=policy, rates=RATES[size]) for policy in ("auto", "paper")]
    header = ["model", "size", "budget", "the paper's bound", "auto", "bytes", "policy paper", "bytes"]
    if size == "small":
        header += ["auto, run", "policy paper, run", "difference"]
    rows = []
    for name, kind in KINDS.items():
        capture = captured(name, size)
        run = runs(name) if size == "small" else {}
        for share in SHARES:
            row = [name, kind.sizes[size], f"{share:.0%}", "-3%" if share > 0.3 else "-10%"]
            for costs in policies:
                n_bytes = eager_bytes(name, size)
                made = plan(capture, costs, int(share * n_bytes))
                row += ["not met", ""] if made is None else [slowdown(made), f"{made.peak_bytes / n_bytes:.0%}"]
            rows.append([*row, *run.get(share, ())])
    yield from table(header, rows)


def all_layers() -> Iterator[str]:
    """Figure 5: peaks of models with all of their layers, both counted on fake tensors."""
    rows = []
    for name, (title, make) in DEEP.items():
        with FakeTensorMode(), torch.no_grad():
            module, args = make().eval(), KINDS[name].args("paper")
            eager = count(forward(module, args))[0]
            for share in SHARES:
                n_bytes = int(share * eager)
                made = lightning_amp.chunk(module, *args, budget=n_bytes, rates=RATES["paper"])
                found = count(forward(made, args))[0]
                assert found <= n_bytes, f"{title} is above its budget"
                rows.append([title, KINDS[name].sizes["paper"], format_bytes(eager), f"{share:.0%}",
                             format_bytes(found), f"{found / eager:.0%}"])  # fmt: skip
    yield from table(["model", "size", "as it is", "budget", "in chunks", "of it"], rows)


def runs(name: str) -> dict[float, list[str]]:
    """A small model at all budgets: throughput of both policies relative to eager, and the largest difference."""
    torch.manual_seed(0)
    module, args = KINDS[name].make(False, "small").eval(), KINDS[name].args("small")
    eager, found = forward(module, args), dict[float, list[str]]()
    n_bytes = count(eager)[0]
    for share in SHARES:
        try:
            forms = [
                lightning_amp.chunk(module, *args, budget=int(share * n_bytes), policy=policy)
                for policy in ("auto", "paper")
            ]
        except OverBudget:
            found[share] = ["not met", "not met", ""]
            continue
        chunked = [forward(one, args) for one in forms]
        assert max(count(run)[0] for run in chunked) <= share * n_bytes, f"{name} is above its budget"
        _, *times = seconds([eager, *chunked])
        wrong = max(largest_difference(eager(), run()) for run in chunked)
        found[share] = [*(f"{1 / t - 1:+.0%}" for t in times), f"{wrong:.0e}"]
    return found


def slowdown(made: ChunkPlan) -> str:
    """Of the throughput, predicted."""
    return f"{made.whole_seconds / made.seconds - 1:+.1%}"


def fused() -> Iterator[str]:
    """Figure 6: the least of some budgets at which 5% of the throughput or less is lost, after fused attention."""
    costs, rows = CostModel(rates=RATES["paper"]), []
    for name, kind in KINDS.items():
        one, n_bytes = captured(name, "paper", fused=True), eager_bytes(name, "paper", fused=True)
        found = [plan(one, costs, int(share * n_bytes)) for share in LOSSES]
        fast = [made for made in found if made is not None and made.seconds <= 1.05 * made.whole_seconds]
        best = min(fast, key=lambda made: made.peak_bytes)
        rows.append([name, kind.sizes["paper"], *map(format_bytes, (eager_bytes(name, "paper"), n_bytes)),
                     f"{best.peak_bytes / n_bytes - 1:+.0%}", slowdown(best)])  # fmt: skip
    yield from table(["model", "size", "written out", "fused", "chunks (paper: over -70%)", "throughput"], rows)


def expert() -> Iterator[str]:
    """Figures 7 and 8: one Evoformer block next to chunks of its attentions, transitions and outer product by hand."""
    costs, rows = CostModel(rates=RATES["paper"]), []
    for side in LENGTHS:
        args = partial(table_args, "paper", side=side)
        ours = graph_of(partial(evoformer, False, "paper"), args)
        by_hand = partial(evoformer, False, "paper")
        least, at = (run_bytes(partial(by_hand, n), args) for n in (1, ROWS))
        try:
            with torch.no_grad():
                lower_within(ours, 1, costs=costs)
            raise AssertionError("nothing is computed in one byte")
        except OverBudget as error:
            fewest = error.least_bytes
        made, theirs = plan(ours, costs, at), plan(graph_of(partial(by_hand, ROWS), args), costs)
        assert theirs is not None
        faster = "not met" if made is None else f"{theirs.whole_seconds / made.seconds - 1:+.1%}"
        rows.append([f"{side}", format_bytes(run_bytes(by_hand, args)), format_bytes(least), format_bytes(fewest),
                     f"{fewest / least - 1:+.0%}", format_bytes(at), faster])  # fmt: skip
    header = ["length", "eager", "expert, one row", "ours, the least", "difference (paper: -31 to -34%)"]
    yield from table([*header, f"expert, {ROWS} rows", "faster at that (paper: +9 to +15%)"], rows)


def run_bytes(make: Callable[[], nn.Module], args: Callable[[], tuple[torch.Tensor, ...]]) -> int:
    """Most bytes of a forward pass beyond parameters and arguments, on fake tensors."""
    with FakeTensorMode(), torch.no_grad():
        module, given = make().eval(), args()
        with LiveBytes() as live:
            module(*given)
    return int(live.peak)


def ablation() -> Iterator[str]:
    """The paper's Table of strategies: speed without each term, relative to that with all of them."""
    rows = {"All strategies": ["100%"], **{name: [f"{paper}%"] for name, (_, paper) in WITHOUT.items()}}
    rows |= {"No graph optimization": ["67.3%"], "Weights of 1": [""], "Seconds (`auto`)": [""]}
    for size, rates in RATES.items():
        costs = CostModel(policy="paper", rates=rates)
        top = speed(size, costs)
        tried = {"All strategies": costs, "Weights of 1": replace(costs, weights=Weights())}
        tried |= {n: replace(costs, weights=WEIGHTS._replace(**{term: 0.0})) for n, (term, _) in WITHOUT.items()}
        tried["Seconds (`auto`)"] = CostModel(rates=rates)
        for name, way in tried.items():
            rows[name].append(f"{speed(size, way) / top:.1%}")
        rows["No graph optimization"].append(f"{speed(size, costs, repeat=True) / top:.1%}")
    yield from table(
        ["strategies", "the paper", *(f"{size} size" for size in RATES)], ([n, *r] for n, r in rows.items())
    )


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "Figure 4, memory of nodes": nodes,
    "Figure 5, predicted on an A100": partial(budgets, "paper"),
    "Figure 5, all layers, counted": all_layers,
    "Figure 5, small models on one core": partial(budgets, "small"),
    "Figure 6, after fused attention": fused,
    "Figures 7 and 8, chunks by an expert": expert,
    "Table of the ablation": ablation,
}
"""Heading of every part, and its table."""


def main() -> None:
    """Print or write the tables, or tune."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true", help="print tuned weights")
    asked = asked_tables(__doc__, PAGE, SECTIONS, parser)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if asked.tune:
        print(tune())
        return
    show_tables(asked, PAGE, PART, SECTIONS, first=origin("python -m benchmarks.chunks.autochunk --write"))


if __name__ == "__main__":
    main()
