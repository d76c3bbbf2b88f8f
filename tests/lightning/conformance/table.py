"""The conformance matrix: every feature at every site, and the table of what came of it.

    python -m tests.lightning.conformance.table --write

Two groups of processes run all features, one after the other: one process has plain Lightning, "ddp" and "amp" on one
rank, a pair has "ddp" and "amp" on two ranks. `judge` compares and makes a `Row` of the table in
docs/reference/conformance.md.
"""

import argparse
import logging
import os
import re
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

import tests.lightning.conformance.callbacks
import tests.lightning.conformance.data
import tests.lightning.conformance.loop
import tests.lightning.conformance.modules
import tests.lightning.conformance.optimisation
import tests.lightning.conformance.pipelines  # noqa: F401  they add rows
from tests.lightning.conformance.cases import (
    FEATURES,
    NODES,
    PIPELINE,
    RECOMPUTED,
    STRATA,
    WIDE,
    Feature,
    Outcome,
    Site,
)
from tests.paths import ROOT
from tests.ranks import run_ranks

DOCUMENT = ROOT / "docs" / "reference" / "conformance.md"
PLAIN, DDP_1, AMP_1, DDP_2, AMP_2 = "plain", "ddp 1", "1", "ddp 2", "2"
FLOOR = 1e-13
SAME_RANKS = 1e-12
SELDOM = {
    "test", "fast_dev_run", "overfit_batches", "sanity check", "max_steps, max_time", "barebones", "inference_mode on",
    "limit_{train,val,test}_batches, whole and as a fraction", "val_check_interval, check_val_every_n_epoch",
    "detect_anomaly, deterministic", "SimpleProfiler", "AdvancedProfiler", "precision 64-true", "precision bf16-true",
    "GradientAccumulationScheduler", "schedulers by step, with estimated_stepping_batches", "AsyncCheckpointIO",
    "schedulers by a monitored loss", "ModelCheckpoint: top-k by a monitored loss, last", "DeviceStatsMonitor",
    "WeightAveraging", "BackboneFinetuning: layers unfrozen in the middle", "LearningRateMonitor, CSVLogger",
    "LR finder: Tuner.lr_find", "a custom sampler", "IterableDataset", "torch.compile of the LightningModule",
    "use_distributed_sampler=False with a sampler of one's own", "stages: fit, blocks in chunks",
    "reload_dataloaders_every_n_epochs, LightningDataModule", "stages: clipping by value", "stages: BackboneFinetuning",
    "stages: precision bf16-mixed", "stages: self.log with sync_dist, and a metric", "stages: manual optimisation",
    "stages: accumulation and clipping by the global norm", "stages: LBFGS",
    "manual optimisation, two optimisers in turn (GAN)", "PyTorchProfiler(record_module_names=False)",
    "torch.compile of the decoder", "torch.compile of a layer",
}  # fmt: skip
"""Left to a release: what they have beside other rows is Lightning's work, or tests of tests/lightning claim it."""
Found = dict[str, dict[str, Outcome]]
"""By feature and site."""


def sites(rank: int, ranks: int, feature: Feature, *, few: bool) -> dict[str, Site]:
    """The places of one group of processes where a feature is run, by name.

    Args:
        few: Of two data ranks and the plans of the model axis one, in turn, and one where the feature is refused;
            "ddp" only where nothing else says what is right, and one rank where that is compared with it.
    """
    places = (AMP_2, *feature.plans)
    if few:
        turn = list(FEATURES).index(feature.name) % len(places)
        refused = [p for p in places if p in feature.refused]
        places = tuple(dict.fromkeys([places[turn], *(refused[turn % len(refused) :][:1] if refused else ())]))
    if ranks == 1:
        found = {} if few and set(places) <= feature.refused.keys() else {PLAIN: Site(strategies="")}
        if not few or feature.against == "ddp" or AMP_1 in feature.refused:
            found[AMP_1] = Site(strategies="S1")
        return found | ({DDP_1: Site(strategies="ddp")} if feature.against == "ddp" else {})
    needed = AMP_2 in places and (feature.against in ("ddp", "sampler") or (feature.against == "plain" and not few))
    found = {DDP_2: Site(strategies="ddp", rank=rank, ranks=ranks)} if needed else {}
    for place in places:
        alone = {"strategies": "S1"} if place == AMP_2 else {"strategies": place, "model_ranks": ranks}
        found[place] = Site(**alone, rank=rank, ranks=ranks)  # type: ignore[arg-type]
    return found


def run_group(rank: int, ranks: int, folder: Path, names: list[str], few: bool) -> Found:
    """Run features in turn; an error is an outcome too."""
    for library in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: Found = {}
    for name in names:
        found[name] = {}
        for place, site in sites(rank, ranks, FEATURES[name], few=few).items():
            own = folder / f"{re.sub('[^a-z]+', '_', name.lower())}-{re.sub('[^a-z0-9]+', '_', place.lower())}"
            own.mkdir(parents=True, exist_ok=True)
            seed_everything(7, verbose=False)
            start = time.monotonic()
            site = Site(**{**vars(site), "folder": own})
            try:
                outcome = FEATURES[name].run(site)
            except Exception as error:
                message = " ".join(str(error).split())
                outcome = {"error": f"{type(error).__name__}: {message}", "where": traceback.format_exc()}
            found[name][place] = outcome | {"seconds": time.monotonic() - start}
    return found


def run_all(folder: Path, names: list[str] | None = None, *, few: bool = False) -> list[Found]:
    """What every process has found: the single one first, then the pair; at all places, or at few."""
    assert FEATURES.keys() >= SELDOM
    chosen = names or [name for name in FEATURES if not (few and name in SELDOM)]
    found: list[Found] = []
    for ranks in (1, 2):
        meet = folder / f"meet{ranks}"
        meet.mkdir()
        found += run_ranks(run_group, ranks, meet, folder / f"runs{ranks}", chosen, few, timeout=900)
    return found


def differences(found: Outcome, expected: Outcome, rtol: float) -> list[str]:
    if "error" in found or "error" in expected:
        return [f"{o['error']}\n{o['where']}" for o in (found, expected) if "error" in o]
    wrong = [f"{name}: only in one of them" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys() - {"seconds"}:
        mine, theirs = found[name], expected[name]
        if isinstance(theirs, float | torch.Tensor):
            mine, theirs = (torch.as_tensor(v, dtype=torch.float64) for v in (mine, theirs))
            if mine.shape != theirs.shape:
                wrong.append(f"{name}: shape {tuple(mine.shape)} beside {tuple(theirs.shape)}")
            elif not (error := (mine - theirs).norm()) <= rtol * theirs.norm() + FLOOR:
                wrong.append(f"{name}: off by {error / theirs.norm():.1e}")
        elif mine != theirs:
            wrong.append(f"{name}: {mine!r} beside {theirs!r}")
    return wrong


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table, and what speaks against it."""

    feature: Feature
    cells: dict[str, str]
    messages: list[str]
    problems: list[str]


def judge(feature: Feature, processes: list[Found]) -> Row:
    cells: dict[str, str] = {}
    messages: dict[str, str] = {}
    problems: list[str] = []
    single = processes[0][feature.name]
    for rank, process in enumerate(processes):
        for place, outcome in process[feature.name].items():
            if place in (PLAIN, DDP_1, DDP_2):
                continue
            refused = feature.refused.get(place)
            if refused is None:
                cells[place] = "worked"
                references = _references(feature, place, single, process[feature.name])
                assert references, f"{feature.name} at {place} is compared with nothing"
                problems += [
                    f"{place}, process {rank}, against {name}: {line}"
                    for name, (expected, rtol) in references.items()
                    for line in differences(outcome, expected, rtol)
                ]
            else:
                cells[place] = "refused"
                raised = outcome.get("error", "nothing was raised")
                shown = as_shown(raised)
                messages[refused] = min(shown, messages.get(refused, shown))
                if refused not in raised:
                    problems.append(f"{place}, process {rank}: {refused!r} expected, found {raised!r}")
    return Row(feature=feature, cells=cells, messages=sorted(messages.values()), problems=problems)


def as_shown(message: str) -> str:
    """A message without what differs from rank to rank and from run to run."""
    message = re.sub(r"; rank \d+ ends with it, of .*", "", message)
    message = re.sub(r"^\w+: rank \d+ \(.*?\) failed in .*?\): ", "", message)
    message = re.sub(r"its rank \d+", "its rank 0", message)
    return message.replace("|", "\\|")


def _references(
    feature: Feature, place: str, single: dict[str, Outcome], pair: dict[str, Outcome]
) -> dict[str, tuple[Outcome, float]]:
    """What an outcome must equal, by the reference's name, and how closely."""
    one = DDP_1 if feature.against == "ddp" else PLAIN
    if place == AMP_1:
        return {one: (single[one], SAME_RANKS)}
    if place == AMP_2:
        found = {} if feature.against in ("ddp", "sampler") else {one: (single[one], feature.rtol)}
        return found | ({DDP_2: (pair[DDP_2], SAME_RANKS)} if DDP_2 in pair else {})
    return {one: (single[one], feature.rtol)}


HEAD = """# Lightning's features under `strategy="amp"`

Every feature runs with a tiny model under plain Lightning on one device, under `strategy="ddp"` on two CPU ranks, and
under `strategy="amp"`.

- **worked**: the results in the column "compared" are equal in double precision. One rank equals one device to
  1e-12. Two ranks of the data axis equal one device with the samples of both to 1e-9, and `ddp` to 1e-12. Two ranks
  of the model axis equal one device to 1e-9. Notes list exceptions.
- **refused**: the run stopped on every rank, with the message below the table.

Three things differ from a plain Trainer by design:

- `train_dataloader` is called before `configure_optimizers`, because the plan requires a batch. If it draws random
  numbers it is called again, so that the run draws the numbers of a plain run.
- `trainer.callbacks` contains callbacks of the strategy.
- A fit first profiles one step on copies of the module and the data module, and calls their hooks. This leaves no
  trace in the process, but what a step sends to other processes, such as by `wandb.log`, is sent.

Plans of the model axis: W is {wide}, T is {strata}, N is {nodes}. In rows that begin with "stages" the module has a
list of blocks instead of the decoder; there P is {pipeline} and R is {recomputed}.

<!-- written by tests.lightning.conformance.table --write -->
"""
ORDER = ("loop", "optimisation", "callbacks", "data", "modules", "pipelines")
NAMES = {WIDE: "W", STRATA: "T", NODES: "N", PIPELINE: "P", RECOMPUTED: "R"}


def document(rows: list[Row]) -> str:
    rows = sorted(rows, key=lambda row: ORDER.index(row.feature.run.__module__.rpartition(".")[2]))
    head = HEAD.format(wide=WIDE, strata=STRATA, nodes=NODES, pipeline=PIPELINE, recomputed=RECOMPUTED)
    columns = "| feature | 1 rank | 2 ranks | 2 ranks, model axis | compared | note |"
    lines = [head, columns, "|---|---|---|---|---|---|", *map(_line, rows)]
    refusals = [row for row in rows if row.messages]
    lines += ["", f"{len(rows)} rows, of which {len(refusals)} are refused somewhere:", ""]
    lines += [f"- {row.feature.name}: ``{message}``" for row in refusals for message in row.messages]
    return "\n".join([*lines, "", "<!-- end of tests.lightning.conformance.table -->"]) + "\n"


def _line(row: Row) -> str:
    plans: dict[str, list[str]] = {}
    for plan, name in NAMES.items():
        if plan in row.cells:
            plans.setdefault(row.cells[plan], []).append(name)
    model = "; ".join(f"{outcome} ({', '.join(names)})" for outcome, names in plans.items())
    feature = row.feature
    reference = "" if feature.against == "plain" else AGAINST[feature.against]
    note = "; ".join(part for part in (reference, _tolerance(feature), feature.note) if part)
    shown = feature.name.replace("|", "\\|")
    return f"| {shown} | {row.cells[AMP_1]} | {row.cells[AMP_2]} | {model or '-'} | {feature.checked} | {note} |"


AGAINST = {
    "one": "not compared with ddp",
    "ddp": "compared with ddp alone, on 1 and 2 ranks",
    "sampler": "one data rank is compared with one device, two with ddp",
}


def _tolerance(feature: Feature) -> str:
    return "" if feature.rtol == 1e-9 else f"to {feature.rtol:g} between different numbers of ranks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    asked = parser.parse_args()
    # else Lightning sets as many threads as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(Path(folder))
    rows = [judge(feature, found) for feature in FEATURES.values()]
    problems = [f"{row.feature.name}: {problem}" for row in rows for problem in row.problems]
    if problems:
        raise SystemExit("\n".join(problems))
    if asked.write:
        DOCUMENT.write_text(document(rows))
    else:
        print(document(rows))


if __name__ == "__main__":
    main()
