"""Modules that nobody wrote for lightning_amp under budgets: plan, predicted and measured peak, and the numbers.

    python -m benchmarks.any_module.budgets [--quick] [--only NAME ...] [--write]

Every module of examples/any_module, unedited, with 75, 50 and 30 % of the bytes that a plain step takes, on 1, 2 and 4
ranks: the largest part, the plan, the meter's peak in the second step of a real run and the predicted one by it, and
how far losses, the last gradients and the parameters are from one plain process after 3 steps in float64; or what the
refusal says.

On one rank the plain run draws what amp's draws, dropout included. On several ranks each draws for itself, so there the
two are compared without dropout, with noise that is a function of the row, and with batch statistics of all ranks.
Ranks that are stages of a pipeline share the rows of one loader: a step has fewer of them then, and so has that of the
plain process. `--write` puts the table into docs/reports/any_module.md as it grows. About an hour on two quiet cores,
with --quick (the wide MLP on 1 and 2 ranks) one minute.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.any_module.__main__ import PAGE, UNUSED, available, first_sentence
from benchmarks.any_module.one_run import Found, Wanted, run
from benchmarks.page import origin, write_as_it_grows
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes
from tests.any_module import NAMES

PART, SHARES, RANKS = "any_module.budgets", (0.75, 0.5, 0.3), (1, 2, 4)
ROWS = {"evoformer": ("samples", 4), "gpt2": ("texts", 8), "unet": ("images", 8), "vit": ("images", 8),
        "cnn": ("samples", 8)}  # fmt: skip
"""What `make_batch` calls the rows of a batch over all ranks, and how many they are; 8 cells elsewhere."""
HEADER = ["module", "ranks", "budget", "largest", "plan", "peak by the meter", "predicted / peak", "loss", "gradients",
          "parameters"]  # fmt: skip


def budget_rows(names: list[str], *, quick: bool) -> Iterator[list[str]]:
    """A row for every module, number of ranks and share of the plain step's bytes."""
    todo = [(name, ranks) for name in names for ranks in (RANKS[:2] if quick else RANKS)]
    plain = dict[tuple[str, int, bool], Found]()
    for name, ranks in track(todo, description="budgets", total=len(todo)):
        kind, n = ROWS.get(name, ("cells", 8))
        asked = Wanted(name=name, ranks=ranks, sizes={kind: n}, strategy=UNUSED if ranks > 1 else "auto")
        eager = run(asked)
        for share in SHARES[: 1 if quick else None]:
            budget = int(share * eager.peak)
            got = run(replace(asked, strategy={"device_memory": budget}))
            first = [name, f"{ranks}", f"{share:.0%} of {format_bytes(eager.peak)}"]
            first.append(str((got.plan.get("diagnosis") or {}).get("largest", "")))
            if got.refused:
                yield [*first, "refused", first_sentence(got.refused), "", "", "", ""]
                continue
            key = name, n // ranks * got.plan["mesh"]["data"], ranks > 1
            with tempfile.TemporaryDirectory() as folder:
                # in float64 the same plan needs twice the bytes
                options = {"plan": doubled(got.plan, Path(folder)), "unfit": "train"}
                same = run(replace(asked, strategy=options, double=True, alike=ranks > 1))
            if key not in plain:
                alone = replace(asked, ranks=1, strategy="auto", rows=key[1], double=True, alike=ranks > 1)
                plain[key] = run(alone)
            above = "" if got.peak <= budget else " **above**"
            ratio = got.plan["predicted_peak_bytes"] / got.peak
            first += [got.strategies, f"{format_bytes(got.peak)}{above}", f"{ratio:.3f}"]
            if failed := same.refused or plain[key].refused:
                yield [*first, first_sentence(failed), "", ""]
                continue
            pairs = zip(same.numbers, plain[key].numbers, strict=True)
            yield [*first, *(relative_difference(one, other) for one, other in pairs)]


def doubled(plan: dict[str, Any], folder: Path) -> str:
    """A file with the plan for numbers of twice the bytes."""
    plan = json.loads(json.dumps(plan))
    for rule in plan["rules"]:
        if "budget_bytes" in rule["spec"]:
            rule["spec"]["budget_bytes"] *= 2
    file = folder / "plan.json"
    file.write_text(json.dumps(plan))
    return str(file)


def relative_difference(some: dict[str, Any], others: dict[str, Any]) -> str:
    """The largest difference of tensors by their names, as a share of the largest; "in parts" if ranks have parts."""
    assert some.keys() == others.keys(), f"{sorted(some.keys() ^ others.keys())} are on one side only"
    if any(some[name].shape != others[name].shape for name in some):
        return "in parts"
    largest = max(float(abs(value).max()) for value in others.values())
    return f"{max(float(abs(some[name] - others[name]).max()) for name in some) / largest:.1e}"


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the wide MLP, two ranks at most, one budget")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these modules")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/any_module.md")
    asked = parser.parse_args()
    names = available(asked.only or (["wide_mlp"] if asked.quick else list(NAMES)))
    first = f"""{origin("python -m benchmarks.any_module.budgets --write")} Bytes of the second step; the most of any
        rank."""
    write_as_it_grows(PAGE, PART, first, HEADER, budget_rows(names, quick=asked.quick), write=asked.write)


if __name__ == "__main__":
    main()
