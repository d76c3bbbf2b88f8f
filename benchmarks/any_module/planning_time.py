"""Processor seconds that a plan of a language model takes, by techniques and budget.

    python -m benchmarks.any_module.planning_time [--depth N] [--precision P] [--rounds N]

The model is that of benchmarks/gpu/language_model.py without memory, with 16 rows of 1024 positions, for an H100. A case
is planned a few times in one process, after one plan that does not count; its row has the least seconds, how often a
step was run on fake tensors, the plan, and its digest: two versions that plan the same have the same digests.
"""

import argparse
import hashlib
import time
from typing import Any

import torch

from benchmarks.gpu.language_model import LanguageModel
from lightning_amp.footprint import profile_module
from lightning_amp.footprint.inner_run import Around
from lightning_amp.lightning.first_look.plan_of_module import ModulePlan, plan_of_module
from lightning_amp.planning.time.device_rates import rates_for

NAMED = ("S1", "S1,logits", "S1,replay", "S1,logits,replay", "S1,recompute", "S1,logits,recompute", "S1,chunk")
SHARES = (None, 0.75, 0.6, 0.5, 0.35)
"""Of the plain peak, which the policy gets as its budget; None is more than the step takes."""


class Planned:
    """A model and a batch to plan, and how often a step was run."""

    def __init__(self, depth: int, precision: str) -> None:
        with torch.device("meta"):
            self._module = LanguageModel(width=1024, heads=16, depth=depth, words=32_000, positions=1024)
        self._batch = torch.zeros(16, 1025, dtype=torch.int64)
        self._around, self.runs = Around(precision=precision), 0
        run = profile_module.run_two_steps

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        profile_module.run_two_steps = counted  # type: ignore[assignment]

    def plan(self, strategies: str | None, budget: int) -> ModulePlan:
        """Plan it."""
        request = {"devices": 1, "policy": "auto", "model_parallel_size": "auto"}
        return plan_of_module(
            self._module,
            self._batch,
            around=self._around,
            rates=rates_for("H100"),
            request={**request, "strategies": strategies, "device_memory": budget},
            options={},
        )


def main() -> None:
    """Plan, and print a row for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    planned = Planned(arguments.depth, arguments.precision)
    begun = time.process_time()
    plain = planned.plan("S1", 2**50).profile.peak_bytes
    print(f"the first plan takes {time.process_time() - begun:.2f} s, of a peak of {plain / 2**30:.2f} GiB")
    print(f"{'case':>20} {'seconds':>8} {'runs':>5} {'peak':>6} {'step ms':>8}  digest    plan")
    cases = [(named, named, 2**50) for named in NAMED]
    cases += [(f"budget {share or 'ample'}", None, int(share * plain) if share else 2**50) for share in SHARES]  # type: ignore[misc]
    for name, strategies, budget in cases:
        least = float("inf")
        for _ in range(arguments.rounds):
            planned.runs, begun = 0, time.process_time()
            plan = planned.plan(strategies, budget).plan
            least = min(least, time.process_time() - begun)
        digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]
        peak, took = plan.predicted_peak_bytes / plain, 1e3 * (plan.predicted_step_seconds or 0)
        of_each = {one: sum(rule.strategy == one for rule in plan.rules) for one in plan.strategies}
        said = ", ".join(f"{n} x {one}" if n > 1 else one for one, n in of_each.items())
        print(f"{name:>20} {least:8.2f} {planned.runs:5} {peak:6.3f} {took:8.1f}  {digest}  {said}", flush=True)


if __name__ == "__main__":
    main()
