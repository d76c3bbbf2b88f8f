"""Make the report of a run: pictures, and checks of losses, embeddings and contacts, each beside a baseline."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lightning_amp.data.files.directory import written_aside
from lightning_amp.data.files.write_results import UNKNOWN, cells_of_types, celltype_column, labels_of, same_type_share
from lightning_amp.data.loading.datamodule import HIC, SingleCellDataModule
from lightning_amp.lightning.callbacks.predictions import draw_cells, draw_maps
from lightning_amp.models.draw_losses import draw_losses
from lightning_amp.models.glue import GLUE
from lightning_amp.report.draw_decay import NEAR, draw_decay
from lightning_amp.report.find_run import Run
from lightning_amp.report.measures import (
    adjusted_rand,
    by_distance,
    cluster,
    components_of_counts,
    other_label_shares,
    same_label_share,
    silhouette,
    standardised,
)

MOST_CELLS, MOST_MAPS, MOST_TYPES = 2_000, 400, 6
"""Most cells of a modality that are measured, most cells whose contacts are imputed, and most types that are drawn."""
MIXED, FEW_NAMES = 0.5, 3
"""Least share of neighbours in the other modality, of what even mixing gives; names of types that are shown."""
ALIKE = 0.02
"""A value counts as good as the baseline's if it is not lower by more."""
Contacts = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report."""

    what: str
    found: str
    reference: str  # what it is compared with
    good: bool | None  # None where there is nothing to judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The checks of a run, and the files that were written."""

    checks: list[Check]
    files: list[Path]


def make_report(
    run: Run, out: Path, *, celltype_key: str | None = None, batch_key: str = "batch", seed: int = 0
) -> Report:
    """Write losses.png, embedding.png, maps.png, decay.png, report.md and report.json to a folder.

    Args:
        run: From `find_run`.
        out: The folder; created if absent.
        celltype_key: Column of obs with the types of cells; None takes "celltype" or "cell_type".
        batch_key: Column of obs with experimental batches.
        seed: Of the cells that are measured where there are more than 2,000 of a modality.

    Raises:
        AmpError: The checkpoint or the data cannot be read, or do not go together.
    """
    model, data = GLUE.load(run.checkpoint), SingleCellDataModule(**run.data)
    embeddings = model.embed(data)
    out.mkdir(parents=True, exist_ok=True)
    obs = {name: data.tables[name].read_obs() for name in embeddings}
    types = {name: labels_of(table, celltype_column(table, celltype_key)) for name, table in obs.items()}
    batches = {name: labels_of(table, batch_key if batch_key in table else None) for name, table in obs.items()}
    files, checks = [], _losses(model.history, len(embeddings))
    if len(model.history):
        files.append(out / "losses.png")
        with written_aside(files[-1]) as aside:
            draw_losses(aside, model.history)
    labels: dict[str, Mapping[str, NDArray[np.str_]]] = {"cell type": types}
    if len(np.unique(np.concatenate(list(batches.values())))) > 1:
        labels[batch_key] = batches
    files.append(out / "embedding.png")
    with written_aside(files[-1]) as aside:
        draw_cells(aside, embeddings, labels, projection="pca")
    rng = np.random.default_rng(seed)
    for name, embedding in embeddings.items():
        checks += _embedding(name, embedding, data, types[name], batches[name], rng)
    checks += _together(embeddings, types, rng)
    if HIC in embeddings:
        found, drawn = _contacts(model, data, types[HIC], out)
        checks, files = checks + found, files + drawn
    report = Report(checks=checks, files=[*files, out / "report.md", out / "report.json"])
    (out / "report.md").write_text(_markdown(run, report, files))
    (out / "report.json").write_text(json.dumps([asdict(check) for check in checks], indent=2))
    return report


def _losses(history: pd.DataFrame, n_modalities: int) -> list[Check]:
    if not len(history):
        return [Check(what="losses", found="not in the checkpoint", reference="", good=None)]
    name = "val_loss" if history.get("val_loss", pd.Series(dtype=float)).notna().any() else "train_loss"
    values = history[name].dropna().to_numpy()
    n = max(1, len(values) // 10)
    late, earlier = values[-n:].mean(), values[-2 * n : -n].mean() if len(values) > n else np.nan
    fall = (earlier - late) / abs(earlier)
    checks = [
        Check(
            what=f"{name}, last {n} epochs",
            found=f"{late:.3f}, {'falls' if fall > 0 else 'rises'} by {abs(fall):.1%}",
            reference=f"the {n} before; more than 1 %: train longer",
            good=bool(fall <= 0.01),
        )
    ]
    if "train_alignment" in history and n_modalities > 1:
        last, blind = float(history["train_alignment"].iloc[-1]), float(np.log(n_modalities))
        checks.append(
            Check(
                what="adversary",
                found=f"{last:.3f}",
                reference=f"{blind:.3f} if it cannot tell the modalities apart",
                good=last > 0.9 * blind,
            )
        )
    return checks


def _some(rows: NDArray[np.int64], most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return rows if len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


def _embedding(
    name: str,
    embedding: NDArray[np.float32],
    data: SingleCellDataModule,
    types: NDArray[np.str_],
    batches: NDArray[np.str_],
    rng: np.random.Generator,
) -> list[Check]:
    """Compare types and batches in the embedding of a modality with principal components of its counts."""
    rows, checks = _some(np.arange(len(embedding)), MOST_CELLS, rng), list[Check]()
    types, batches = types[rows], batches[rows]
    known = types != UNKNOWN
    n_types, several = len(np.unique(types[known])), len(np.unique(batches)) > 1
    if n_types < 2 and not several:
        return checks
    points = embedding[rows].astype(np.float64)
    plain = components_of_counts(data.tables[name].counts[rows].toarray().astype(np.float64))
    if n_types > 1:
        own = types[known]
        rand = [adjusted_rand(cluster(x[known], n_types), own) for x in (points, plain)]
        width = [silhouette(x[known], own) for x in (points, plain)]
        checks.append(
            Check(
                what=f"{name}: ARI of clusters and types",
                found=f"{rand[0]:.2f}",
                reference=f"{rand[1]:.2f}, PCA of the counts",
                good=rand[0] >= rand[1] - ALIKE,
            )
        )
        # not judged: it also depends on the number of dims
        reference = f"{width[1]:.2f}, PCA of the counts"
        checks.append(
            Check(what=f"{name}: silhouette of types", found=f"{width[0]:.2f}", reference=reference, good=None)
        )
    if several:
        share, chance = same_label_share(points, batches)
        baseline = same_label_share(plain, batches)[0]
        checks.append(
            Check(
                what=f"{name}: neighbours, same batch",
                found=f"{share:.0%}",
                reference=f"{chance:.0%} by chance, {baseline:.0%} in PCA",
                good=share <= baseline + ALIKE,
            )
        )
    return checks


def _together(
    embeddings: Mapping[str, NDArray[np.float32]], types: Mapping[str, NDArray[np.str_]], rng: np.random.Generator
) -> list[Check]:
    """Say whether cells of the modalities lie among each other, and those of a type side by side."""
    if len(embeddings) < 2:
        return []
    some = {name: x[_some(np.arange(len(x)), MOST_CELLS, rng)].astype(np.float64) for name, x in embeddings.items()}
    labels = np.repeat(np.array(list(some)), [len(x) for x in some.values()])
    checks = [
        Check(
            what=f"{name}: neighbours, other modality",
            found=f"{share:.0%}",
            reference=f"{chance:.0%} if modalities mix",
            good=share >= MIXED * chance,
        )
        for name, (share, chance) in other_label_shares(np.concatenate(list(some.values())), labels).items()
    ]
    known = {name: labels != UNKNOWN for name, labels in types.items()}
    found = same_type_share(
        {name: x[known[name]] for name, x in embeddings.items() if known[name].any()},
        {name: labels[known[name]] for name, labels in types.items() if known[name].any()},
    )
    what = "other modality: neighbours, same type"
    if found is None:
        named = (sorted(set(labels.tolist()) - {UNKNOWN}) for labels in types.values())
        without = " / ".join(", ".join(names[:FEW_NAMES]) or "no types" for names in named)
        reference = f"type names differ ({without}): give a type one name in all"
        return [*checks, Check(what=what, found="not known", reference=reference, good=None)]
    share, chance = found
    reference = f"{chance:.0%} by chance"
    return [*checks, Check(what=what, found=f"{share:.0%}", reference=reference, good=share >= 1.25 * chance)]


@torch.no_grad()
def _imputed(
    model: GLUE, data: SingleCellDataModule, rows: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    done = 0
    for cells in model.batches_of(data.tables[HIC], rows):
        values = model.impute(HIC, cells).float().cpu().numpy()
        yield from zip(rows[done : done + len(values)].tolist(), values, strict=True)
        done += len(values)


def _contacts(
    model: GLUE, data: SingleCellDataModule, types: NDArray[np.str_], out: Path
) -> tuple[list[Check], list[Path]]:
    """Compare expected contacts with measured ones by distance, and by type."""
    assert data.layout is not None, "a data module with Hi-C cells has their layout"
    counts = data.tables[HIC].counts
    strata = [s for s in data.layout.strata if s.resolution == data.layout.strata[0].resolution]
    names, sizes = np.unique(types, return_counts=True)
    named = [str(name) for name in names[np.argsort(-sizes, kind="stable")]]
    bulk = {name: np.asarray(counts[types == name].sum(axis=0), dtype=np.float64).ravel() for name in named}
    drawn = {row: types[row] for row in cells_of_types(types, data.tables[HIC].contacts, named[:MOST_TYPES])}
    even = np.unique(np.linspace(0, len(types) - 1, MOST_MAPS).astype(int))
    rows = np.unique(np.concatenate([even, list(drawn)]))
    expected, measured, maps = np.zeros(len(strata)), np.zeros(len(strata)), {}
    scaled = {name: standardised(total, strata) for name, total in bulk.items()}
    near: dict[str, list[bool]] = {"expected": [], "measured": []}
    for row, values in _imputed(model, data, rows):
        own = counts[[row]].toarray()[0].astype(np.float64)
        if row in drawn:
            maps[drawn[row]] = values, own
        expected, measured = expected + by_distance(values, strata), measured + by_distance(own, strata)
        mine = str(types[row])
        if mine == UNKNOWN or len(named) < 2 or (types == mine).sum() < 2:
            continue
        # the cell itself is left out of the sum of its type
        others = np.stack([standardised(bulk[mine] - own, strata) if n == mine else scaled[n] for n in named])
        for kind, contacts in (("expected", values), ("measured", own)):
            near[kind].append(named[int((others @ standardised(contacts, strata)).argmax())] == mine)
    start, end = data.layout.anchor_names[0].rpartition(":")[2].split("-")
    width = int(end) - int(start)
    checks = [_decay(expected, measured, [s.k * width / 1e6 for s in strata])]
    if near["expected"]:
        share, reference = (float(np.mean(near[kind])) for kind in ("expected", "measured"))
        checks.append(
            Check(
                what="maps nearest to own type's sum",
                found=f"{share:.0%}",
                reference=f"{reference:.0%} of the measured cells",
                good=share >= reference - ALIKE,
            )
        )
    files = [out / "decay.png", out / "maps.png"]
    with written_aside(files[0]) as aside:
        draw_decay(aside, [s.k * width / 1e6 for s in strata], expected / len(rows), measured / len(rows))
    shown = {
        name: {
            "one cell, measured": maps[name][1],
            "the cell, expected": maps[name][0],
            f"mean of {int((types == name).sum())} cells": bulk[name] / (types == name).sum(),
        }
        for name in named[:MOST_TYPES]
    }
    with written_aside(files[1]) as aside:
        draw_maps(aside, shown, data, title="Contacts")
    return checks, files


def _decay(expected: Contacts, measured: Contacts, distances: list[float]) -> Check:
    some = measured > 0
    ratio = expected[some] / measured[some]
    worst = int(np.abs(np.log(np.maximum(ratio, 1e-9))).argmax())
    at = np.array(distances)[some][worst]
    return Check(
        what="expected / measured, worst",
        found=f"{ratio[worst]:.2f} at {at:g} Mb",
        reference=f"{NEAR[0]} to {NEAR[1]}",
        good=bool(NEAR[0] <= ratio[worst] <= NEAR[1]),
    )


WORDS = {True: "good", False: "look", None: ""}


def _markdown(run: Run, report: Report, pictures: list[Path]) -> str:
    lines = ["# Is my result good?", "", f"Checkpoint `{run.checkpoint}`, data `{run.data['data_dir']}`.", ""]
    lines += ["| check | found | compared with | |", "|---|---|---|---|"]
    lines += [f"| {c.what} | {c.found} | {c.reference} | {WORDS[c.good]} |" for c in report.checks]
    return "\n".join([*lines, "", *(f"![{path.stem}]({path.name})" for path in pictures), ""])


def rows_of(report: Report) -> list[list[Any]]:
    """Return the checks as rows of a table."""
    return [[WORDS[check.good], check.what, check.found, check.reference] for check in report.checks]
