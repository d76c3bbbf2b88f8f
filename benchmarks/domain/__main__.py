"""What a rank holds and sends when samples are split over 1 to 16 ranks, counted without starting any.

    python -m benchmarks.domain [--ranks 1 2 4 8 16] [--weak] [--format json]

Steps run on fake tensors in one process, as `lightning-amp plan` counts them; about two minutes. With --weak samples
grow with the ranks.
"""

import argparse
import json
import warnings
from typing import Any

from benchmarks.domain.models import CASES, GROWING, Case
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.sequence.row import SequenceParallel


def counted(case: Case, ranks: int) -> dict[str, Any]:
    """Bytes of rank 0: at its peak, of activations beside the batch, which every rank has, and sent in a step."""
    batch = case.batch()
    steps = DrySteps("sequence", SequenceParallel(dims=case.dims), ranks) if ranks > 1 else None
    profile = StepOfModule(case.make(), lambda: batch, run_settings=BY_ITSELF, steps=steps).profiled(CPU_CORE).profile
    sent = sum(one.n_bytes for one in steps.sent) if steps is not None else 0
    most = max(moment.by_kind["activations"] for moment in profile.timeline) - batch.nbytes
    return {"ranks": ranks, "peak": profile.peak_bytes, "activations": most, "sent": sent}


def main() -> None:
    """Count, and print a table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--weak", action="store_true", help="samples that grow with the ranks")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.weak:
        print("| sample of one rank | " + " | ".join(f"{n} ranks" for n in asked.ranks) + " |")
        print("|---" * (len(asked.ranks) + 1) + "|")
        for name, grown in GROWING.items():
            held = [counted(grown(ranks), ranks)["activations"] for ranks in asked.ranks]
            print(f"| {name} | " + " | ".join(f"{n / held[0]:.2f}" for n in held) + " |", flush=True)
        return
    found = {name: [counted(case, ranks) for ranks in asked.ranks] for name, case in CASES.items()}
    if asked.format == "json":
        print(json.dumps(found, indent=2))
        return
    print("| one sample | ranks | peak of a rank | activations x ranks, of one device | sent by a rank in a step |")
    print("|---|---|---|---|---|")
    for name, rows in found.items():
        for row in rows:
            share = row["activations"] * row["ranks"] / rows[0]["activations"]
            cells = name, row["ranks"], format_bytes(row["peak"]), f"{share:.2f}", format_bytes(row["sent"])
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
