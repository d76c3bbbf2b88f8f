"""How often the plan of a decoder is the fastest that fits, of all whose steps are counted.

    python -m benchmarks.memory.choice_of_decoder [--only attention] [--budgets 12] [--rates A100] [--quick] [--write]

Closed forms rank sets of the decoder's techniques, and only some sets are counted. Here every set is counted once, on
one CPU rank, without techniques beyond the decoder, and budgets are planned as `lightning_amp.plan` does. Seconds are
those of the planner: of the decoder by closed forms, of the rest of the step, and what techniques beyond it add.

    as fast     budgets whose plan fits, and takes at most the planner's tie longer than the fastest set that fits: from
                the least of these peaks to that of the step as it is, each the same factor above the last
    near peaks  the same of budgets at, 1 % and 2 % above the peaks of sets that are faster than all leaner ones
    slower      mean and largest excess of the others' seconds, in per cent
    counts      sets of the decoder's techniques with which a plan counts the step, mean and most
    s           processor seconds of a plan, mean

`--write` puts the table into docs/reports/benchmarks.md. About four minutes; with --quick (one decoder, three budgets)
half a minute.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import lightning_amp
from benchmarks.page import ROOT, origin, write_as_it_grows
from lightning_amp.costs.device_rates import CPU_CORE, Rates, rates_for
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.lightning.profiling import make_step_plan
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.simulation.parse_shape import parse_shape
from lightning_amp.simulation.plan_of_data import plan_of_data, plan_of_shape
from lightning_amp.techniques.table import is_of_decoder

Make = Callable[[dict[str, Any], Rates], Plan]
"""(request, rates) -> plan."""
AMPLE = 2**50
SHAPES = {
    "attention": ("anchors=200,dim=32,strata=6,batch=16", (4, 16, 64)),
    "chained": ("anchors=300,dim=32,strata=8,chained=yes,batch=16", (16,)),
}
"""Decoders by their sizes, and cells of a step."""
ABOVE = (1.0, 1.01, 1.02)
GLUE = "reference model"
HEADER = ["decoder", "cells", "sets", "as fast", "near peaks", "slower, %", "counts", "s"]
PAGE, PART = ROOT / "docs" / "reports" / "benchmarks.md", "memory.choice_of_decoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """A set of the decoder's techniques: its peak by a count, seconds of the decoder, and seconds of everything."""

    peak_bytes: int
    seconds: float
    whole_seconds: float


def subjects(folder: Path, only: list[str] | None) -> Iterator[tuple[str, int, Make]]:
    """Yield the name of a decoder, cells of a step, and what plans it."""
    for name, (sizes, batches) in SHAPES.items():
        for cells in batches if only is None or name in only else ():
            yield name, cells, partial(_of_shape, sizes, cells)
    if only is None or GLUE in only:
        synthesize(folder / "data", cells=64, bins=240, strata=8, genes=150)
        profile = lightning_amp.profile(folder / "data")
        yield GLUE, 32, partial(_of_data, profile, 32)


def _of_shape(sizes: str, cells: int, request: dict[str, Any], rates: Rates) -> Plan:
    return plan_of_shape(parse_shape(sizes).decoder, request, batch_size=cells, rates=rates)


def _of_data(profile: Any, cells: int, request: dict[str, Any], rates: Rates) -> Plan:
    return plan_of_data(profile, request, batch_size=cells, latent_dim=32, window=20, rates=rates)


def chosen(plan: Plan) -> frozenset[str]:
    """The techniques of the decoder in a plan."""
    return frozenset(rule.strategy for rule in plan.rules if is_of_decoder(rule)) - {"S1"}


def whole_seconds(plan: Plan) -> float:
    """Seconds of a step."""
    return (plan.predicted_step_seconds or 0.0) + (plan.predicted_rest_seconds or 0.0)


def count_all(make: Make, rates: Rates) -> dict[frozenset[str], Counted]:
    """Count every set of the decoder's techniques that the policy compares."""
    found = dict[frozenset[str], Counted]()
    for one in make({"device_memory": AMPLE}, rates).candidates:
        names = frozenset(one.strategies) - {"S1"}
        plan = make({"device_memory": AMPLE, "strategies": ",".join(sorted(names)) or "S1"}, rates)
        found[names] = Counted(
            peak_bytes=plan.predicted_peak_bytes, seconds=one.step_seconds, whole_seconds=whole_seconds(plan)
        )
    return found


def boundaries(counted: Iterable[Counted]) -> list[int]:
    """Budgets at the peak of every set that no leaner set beats by the tie, and up to 2 % above."""
    found = list[Counted]()
    for one in sorted(counted, key=lambda one: (one.peak_bytes, one.seconds)):
        if not found or one.seconds * TIE < found[-1].seconds:
            found.append(one)
    return [round(one.peak_bytes * above) for one in found for above in ABOVE]


def row(name: str, cells: int, make: Make, rates: Rates, budgets: int, *, verbose: bool) -> list[str]:
    """Plan a decoder for all budgets, and compare."""
    counted = count_all(make, rates)
    least, most = min(one.peak_bytes for one in counted.values()), counted[frozenset()].peak_bytes
    even = [round(least * (most / least) ** (k / (budgets - 1))) for k in range(budgets)]
    # the rest of a step is the same with all sets; counts that are less than the closed forms of the decoder hide it
    rest = min(one.whole_seconds - one.seconds for one in counted.values())
    said, slower, steps, processor = list[str](), list[float](), list[int](), list[float]()
    for these in (even, boundaries(counted.values())):
        found = list[float]()
        for budget in these:
            names, fastest = min(
                ((names, one.seconds) for names, one in counted.items() if one.peak_bytes <= budget),
                key=lambda pair: pair[1],
            )
            begun = time.process_time()
            with _counting() as made:
                plan = make({"device_memory": budget}, rates)
            processor.append(time.process_time() - begun)
            steps.append(len(made))
            own = counted[chosen(plan)]
            # what techniques beyond the decoder add
            seconds = rest + own.seconds + max(0.0, whole_seconds(plan) - own.whole_seconds)
            fits = plan.predicted_peak_bytes <= budget
            found.append(seconds / (rest + fastest) if fits else float("inf"))
            if verbose:
                own_names = ",".join(plan.strategies)
                print(
                    f"{budget:>13,} {found[-1]:.3f} {len(made)} {own_names:<28} {','.join(sorted(names))}", flush=True
                )
        others = [100 * (one - 1) for one in found if one > TIE]
        said.append(f"{len(found) - len(others)} of {len(found)}")
        slower += others
    worst = f"{mean(slower):.1f}, {max(slower):.1f}" if slower else ""
    return [
        name,
        f"{cells}",
        f"{len(counted)}",
        *said,
        worst,
        f"{mean(steps):.1f}, {max(steps)}",
        f"{mean(processor):.1f}",
    ]


class _counting:
    """Keep the rules that every counted step of a decoder has."""

    def __enter__(self) -> list[Any]:
        self._count = count = make_step_plan.on_top_of
        found = list[Any]()

        def counted(step: Any, rules: Any, *args: Any, **named: Any) -> Any:
            found.append(rules)
            return count(step, rules, *args, **named)

        vars(make_step_plan)["on_top_of"] = counted
        return found

    def __exit__(self, *_: object) -> None:
        vars(make_step_plan)["on_top_of"] = self._count


def main() -> None:
    """Count, plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SHAPES, GLUE], help="some of the decoders")
    parser.add_argument("--budgets", type=int, default=12, help="budgets of a decoder")
    parser.add_argument("--rates", help="device by whose rates times are predicted; one CPU core without it")
    parser.add_argument("--verbose", action="store_true", help="print every budget, its plan and the fastest set")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/benchmarks.md")
    parser.add_argument("--quick", action="store_true", help="one decoder, three budgets")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rates = CPU_CORE if asked.rates is None else rates_for(asked.rates)
    only, budgets = (["chained"], 3) if asked.quick else (asked.only, asked.budgets)
    first = f"""{origin("python -m benchmarks.memory.choice_of_decoder --write")} Of {budgets} budgets from
    the leanest set's peak to the eager step's, and of those at and up to 2 % above the peaks of sets, those whose plan
    takes at most 2 % longer than the fastest counted set that fits; the others' excess, mean and largest; steps counted
    in a plan, mean and most; and its processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        rows = (row(*one, rates, budgets, verbose=asked.verbose) for one in subjects(Path(folder), only))
        write_as_it_grows(PAGE, PART, first, HEADER, rows, write=asked.write)


if __name__ == "__main__":
    main()
