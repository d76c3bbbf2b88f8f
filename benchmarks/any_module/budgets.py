"""The table of budgets: largest part, plan, peak beside its prediction, and the numbers beside one plain process.

On one rank the plain run draws what amp's draws, dropout included. On several ranks each draws for itself, so there the
two are compared without dropout, with noise that is a function of the row, and with batch statistics of all ranks.
Ranks that are stages of a pipeline share the rows of one loader: a step has fewer of them then, and so has that of the
plain process.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.any_module.one_run import Found, Wanted, run
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes

SHARES, RANKS = (0.75, 0.5, 0.3), (1, 2, 4)
SAMPLES = {"evoformer": 4, "unet": 8, "vit": 8}
"""Rows of the batch over all ranks; 8 elsewhere."""
ROWS = {
    "evoformer": "samples",
    "gpt2": "texts",
    "unet": "images",
    "vit": "images",
    "cnn": "samples",
}
"""What `make_batch` calls them; "cells" elsewhere."""
HEADER = [
    "module",
    "ranks",
    "budget",
    "largest",
    "plan",
    "peak by the meter",
    "predicted / peak",
    "loss",
    "gradients",
    "parameters",
]
PLAIN = "ddp_find_unused_parameters_true"


def budget_rows(names: list[str], folder: Path, *, quick: bool) -> Iterator[list[str]]:
    """A row for every module, number of ranks and share of the plain step's bytes."""
    todo = [(name, ranks) for name in names for ranks in (RANKS[:2] if quick else RANKS)]
    one: dict[tuple[str, int, bool], Found] = {}
    for name, ranks in track(todo, description="budgets", total=len(todo)):
        rows = SAMPLES.get(name, 8)
        asked = Wanted(name=name, ranks=ranks, sizes={ROWS.get(name, "cells"): rows}, strategy=PLAIN)
        eager = run(replace(asked, strategy="auto") if ranks == 1 else asked, folder)
        alike = ranks > 1
        for share in SHARES:
            budget = int(share * eager.peak)
            got = run(replace(asked, strategy={"device_memory": budget}), folder)
            same = plain = None
            if not got.refused:
                # in float64 the same plan needs twice the bytes
                plan = doubled(got.plan, folder)
                own = replace(asked, strategy={"plan": plan, "unfit": "train"}, double=True, alike=alike)
                same = run(own, folder)
                key = name, rows // ranks * got.plan["mesh"]["data"], alike
                if key not in one:
                    steps = replace(own, ranks=1, strategy="auto", rows=key[1])
                    one[key] = run(steps, folder)
                plain = one[key]
            yield [
                name,
                f"{ranks}",
                f"{share:.0%} of {format_bytes(eager.peak)}",
                *_results(budget, got, same, plain),
            ]


def _results(budget: int, got: Found, same: Found | None, one: Found | None) -> list[str]:
    largest = str((got.plan.get("diagnosis") or {}).get("largest", ""))
    if same is None or one is None:
        return [largest, "refused", first_sentence(got.refused), "", "", "", ""]
    above = "" if got.peak <= budget else " **above**"
    ratio = got.plan["predicted_peak_bytes"] / got.peak
    head = [largest, got.strategies, f"{format_bytes(got.peak)}{above}", f"{ratio:.3f}"]
    if same.refused or one.refused:
        return [*head, first_sentence(same.refused or one.refused), "", ""]
    return [*head, *(f"{away:.1e}" for away in differences(same.numbers, one.numbers))]


def first_sentence(error: str) -> str:
    """For a cell of a table."""
    return error.split(". ")[0].splitlines()[0].replace("|", "/")


def doubled(plan: dict[str, Any], folder: Path) -> str:
    """A file with the plan for numbers of twice the bytes."""
    plan = json.loads(json.dumps(plan))
    for rule in plan["rules"]:
        spec = rule["spec"]
        if "budget_bytes" in spec:
            spec["budget_bytes"] *= 2
    file = folder / f"plan_{abs(hash(json.dumps(plan)))}.json"
    file.write_text(json.dumps(plan))
    return str(file)


def differences(some: tuple[Path, ...], others: tuple[Path, ...]) -> tuple[float, float, float]:
    """Largest difference of the losses, the last gradients and the parameters, as a share of the largest value.

    Args:
        some, others: Files of the ranks of two runs; what a rank lacks, another has.
    """
    one, other = _together(some), _together(others)
    return _apart(one["losses"], other["losses"]), *(
        _apart(one[kind], other[kind]) for kind in ("gradients", "parameters")
    )


def _together(files: tuple[Path, ...]) -> dict[str, Any]:
    import torch

    found = [torch.load(file) for file in files]
    merged: dict[str, Any] = {
        kind: {name: value for one in reversed(found) for name, value in one[kind].items()}
        for kind in ("gradients", "parameters")
    }
    # ranks have as many rows each
    losses = torch.tensor([one["losses"] for one in found], dtype=torch.float64).mean(0)
    return merged | {"losses": {str(i): loss for i, loss in enumerate(losses)}}


def _apart(some: dict[str, Any], others: dict[str, Any]) -> float:
    assert some.keys() == others.keys(), f"{sorted(some.keys() ^ others.keys())} are on one side only"
    largest = max(float(value.abs().max()) for value in others.values())
    return max(float((some[name] - others[name]).abs().max()) for name in some) / largest
