"""Processor seconds that a plan of a language model takes, by techniques and budget.

    python -m benchmarks.any_module.planning_time [--depth 24] [--precision bf16-mixed] [--rounds 2] [--quick]

The model is that of benchmarks/gpu/language_model.py without memory, with 16 rows of 1024 positions, for an H100. Every
plan is made in a new process, a fork of one that has imported all and planned nothing, as at the start of a fit. A row
has the least seconds of its rounds, how often a step was run on fake tensors, the plan's share of the plain peak, its
seconds of a step, and its digest: two versions that plan the same have the same digests. About ten minutes, with
--quick (two blocks, three plans, one round) half a minute.
"""

import argparse
import hashlib
import time
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gpu.language_model import LanguageModel
from benchmarks.page import origin, paragraph
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.footprint import profile_module
from lightning_amp.footprint.run import inner_run
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.plan_of_module import ModulePlan, plan_of_module

NAMED = ("S1", "S1,logits", "S1,replay", "S1,logits,replay", "S1,recompute", "S1,logits,recompute", "S1,chunk")
WITHIN = (("S1,replay", 0.6), ("S1,replay,offload", 0.6), ("S1,replay,offload", 0.2))
"""Techniques that are planned within a share of the plain peak, of which the last is less than they can reach."""
AMPLE = 2**50
SHARES = (None, 0.75, 0.6, 0.5, 0.35)
"""Of the plain peak, which the policy gets as its budget; None is more than the step takes."""


class Planned:
    """A model and a batch to plan; `runs` counts how often a step was run on fake tensors in this process."""

    runs = 0

    def __init__(self, depth: int, precision: str) -> None:
        with torch.device("meta"):
            self._module = LanguageModel(width=1024, heads=16, depth=depth, words=32_000, positions=1024)
        self._batch, self._run_settings = torch.zeros(16, 1025, dtype=torch.int64), RunSettings(precision=precision)
        run = inner_run.run_two_steps

        def counted(*args: Any, **kwargs: Any) -> Any:
            Planned.runs += 1
            return run(*args, **kwargs)

        vars(profile_module)["run_two_steps"] = counted

    def plan(self, strategies: str | None, budget: int) -> ModulePlan:
        """Plan it."""
        request = {"devices": 1, "policy": "auto", "model_parallel_size": "auto"}
        return plan_of_module(
            self._module,
            self._batch,
            run_settings=self._run_settings,
            # budgets of tensors, which may be less than the context of a GPU
            rates=replace(rates_for("H100"), memory=None),
            request={**request, "strategies": strategies, "device_memory": budget},
            options={},
        )


def row(planned: Planned, name: str, strategies: str | None, budget: int, plain: int) -> str:
    """Plan a case, and say what it took."""
    begun = time.process_time()
    plan = planned.plan(strategies, budget).plan
    seconds = time.process_time() - begun
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]
    peak, took = (plan.predicted_peak_bytes or 0) / plain, 1e3 * (plan.predicted_step_seconds or 0)
    of_each = {one: sum(rule.strategy == one for rule in plan.rules) for one in plan.strategies}
    said = ", ".join(f"{n} x {one}" if n > 1 else one for one, n in of_each.items())
    # the numbers after the name begin with the seconds
    return f"{name:>22} {seconds:8.2f} {Planned.runs:5} {peak:6.3f} {took:8.1f}  {digest}  {said}"


def peak_of(planned: Planned) -> int:
    """Of the plain step."""
    return planned.plan("S1", AMPLE).profile.peak_bytes


def main() -> None:
    """Plan, and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two blocks, three plans, one round")
    asked = parser.parse_args()
    depth, rounds, named, within, shares = (
        (2, 1, NAMED[:2], (), SHARES[1:2]) if asked.quick else (asked.depth, asked.rounds, NAMED, WITHIN, SHARES)
    )
    torch.set_num_threads(1)
    planned = Planned(depth, asked.precision)
    print("\n".join(paragraph(origin("python -m benchmarks.any_module.planning_time"))))
    print(f"{'case':>22} {'seconds':>8} {'runs':>5} {'peak':>6} {'step ms':>8}  digest    plan")
    with get_context("fork").Pool(1, maxtasksperchild=1) as new:
        plain = new.apply(peak_of, (planned,))
        cases: list[tuple[str, str | None, int]] = [(name, name, AMPLE) for name in named]
        cases += [(f"{name} {share}", name, int(share * plain)) for name, share in within]
        cases += [(f"budget {share or 'ample'}", None, int((share or 0) * plain) or AMPLE) for share in shares]
        for case in cases:
            print(min(new.apply(row, (planned, *case, plain)) for _ in range(rounds)), flush=True)


if __name__ == "__main__":
    main()
