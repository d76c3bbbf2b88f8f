"""Do expected contacts of a cell have the insulation of its type? Tracks of `GLUE` beside those of the counts.

    python -m benchmarks.domain.insulation [FOLDER] [--seeds 0 1 2] [--epochs 10] [--set NAME=VALUE ...] [--write]

FOLDER, --set and --write are those of benchmarks.domain.integration. The insulation of a bin is the mean of contacts
across it, between WINDOW bins on either side, each divided by the mean of its stratum (the distance of its bins). A
cell's track is compared with that of the sum of the other cells of its type; the model has seen all of them.

    measured, nearby, expected   correlation of the two tracks, the median of the type's cells: of the counts, of
                                 `impute(output="nearby")` and of `impute()`
    all cells                    the same of the sum of all other cells: what needs neither the cell nor a model
    particular                   the same after the track of all cells is subtracted from both: what is a type's own
    own type                     share of cells whose particular track correlates most with their own type's
"""

import argparse
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from benchmarks.domain.integration import rows_of_all, seeds_in_turn, show, trained
from benchmarks.page import table

WINDOW, SEEN = 5, 0.5
"""Bins on either side; least share of the pairs around a bin that have contacts in any cell."""
KINDS = ("measured", "nearby", "expected")
HEADER = [
    *("cells", "seed", "type", *KINDS, "all cells"),
    *(f"particular, {kind}" for kind in KINDS),
    *(f"own type, {kind}" for kind in KINDS),
]
Maps = NDArray[np.floating[Any]]
Scores = dict[str, NDArray[np.float64]]


def across(layout: Any, seen: NDArray[np.bool_]) -> Any:
    """Return a sparse matrix [feature, bin] of the means over the pairs across each bin that has enough of them."""
    feature, left, right = [], [], []
    for stratum in layout.strata[1 : 2 * WINDOW]:
        feature.append(np.arange(stratum.start, stratum.stop))
        left.append(stratum.anchors)
        right.append(stratum.anchors + stratum.k)
    pair, first, last = (np.concatenate(parts) for parts in (feature, left, right))
    pairs, bins = [], []
    for step in range(WINDOW):
        # the pair is across the bin `step` after its first one, which is at most WINDOW before its last one
        some = (first + step < last) & (last <= first + step + WINDOW)
        pairs.append(pair[some])
        bins.append((first + step)[some])
    found = sp.csr_matrix(
        (np.ones(sum(map(len, pairs))), (np.concatenate(pairs), np.concatenate(bins))),
        shape=(layout.strata[-1].stop, layout.n_anchors),
    )
    whole = np.asarray(found.sum(axis=0)).ravel()
    found = sp.diags(seen.astype(float)) @ found
    present = np.asarray(found.sum(axis=0)).ravel()
    kept = np.flatnonzero((whole > 0) & (present >= SEEN * whole))
    return (found.tocsc()[:, kept] @ sp.diags(1 / present[kept])).tocsr()


def tracks(maps: Maps, layout: Any, matrix: Any) -> Maps:
    """Return the insulation [cell, bin] of contacts [cell, feature]."""
    scaled = maps.astype(np.float64)
    for stratum in layout.strata:
        own = slice(stratum.start, stratum.stop)
        scaled[:, own] /= np.maximum(scaled[:, own].mean(axis=1, keepdims=True), 1e-12)
    found: Maps = np.asarray(scaled @ matrix)
    return found


def correlations(one: Maps, others: Maps) -> NDArray[np.float64]:
    """Return the correlation of a track with each of some others."""
    a, b = one - one.mean(), others - others.mean(axis=1, keepdims=True)
    size = np.linalg.norm(a) * np.linalg.norm(b, axis=1)
    found: NDArray[np.float64] = (b @ a) / np.where(size > 0, size, np.inf)
    return found


def scores(maps: dict[str, Maps], labels: NDArray[np.str_], layout: Any) -> dict[str, Scores]:
    """Return by type the scores of the header, medians and shares over its cells."""
    counts = maps["measured"]
    total = counts.sum(axis=0)
    matrix = across(layout, total > 0)
    types, own = np.unique(labels, return_inverse=True)
    sums = np.stack([counts[own == one].sum(axis=0) for one in range(len(types))])
    of_cells = {kind: tracks(values, layout, matrix) for kind, values in maps.items()}
    of_all = tracks(total[None], layout, matrix)[0]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in types.tolist()}
    for cell, one in enumerate(own):
        others = sums.copy()
        others[one] -= counts[cell]
        of_types = tracks(others, layout, matrix)
        values = {"all cells": correlations(tracks((total - counts[cell])[None], layout, matrix)[0], of_types)[one]}
        for kind in KINDS:
            track = of_cells[kind][cell]
            values[kind] = correlations(track, of_types)[one]
            particular = correlations(track - of_all, of_types - of_all)
            values[f"particular, {kind}"] = particular[one]
            values[f"own type, {kind}"] = float(particular.argmax() == one)
        for name, value in values.items():
            found[str(types[one])].setdefault(name, []).append(float(value))
    return {
        name: {key: (np.mean if key.startswith("own") else np.median)(values) for key, values in of_type.items()}
        for name, of_type in found.items()
    }


def one_seed(data_dir: Path, seed: int, arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Scores]:
    """Train once; return the scores by type."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model, data = trained(data_dir, seed, epochs=arguments.epochs, batch_size=arguments.batch_size, settings=settings)
    cells = data.tables["hic"]
    batch = cells.rows(np.arange(cells.n_cells))
    maps = {kind: model.impute("hic", batch, output=kind).numpy() for kind in ("nearby", "expected")}
    maps["measured"] = cells.counts.toarray()
    return scores(maps, cells.read_obs()["celltype"].to_numpy().astype(str), data.layout)


def rows_of(name: str, data_dir: Path, arguments: argparse.Namespace, settings: dict[str, Any]) -> list[list[str]]:
    """Return a row for each type, with medians over the seeds."""
    found = []
    one = partial(one_seed, data_dir, arguments=arguments, settings=settings)
    for seed, scores_of_types in seeds_in_turn(one, arguments.seeds):
        found.append(scores_of_types)
        print(name, seed, found[-1], flush=True)
    return [
        [name, "median", kind, *(f"{np.median([one[kind][key] for one in found]):.2f}" for key in HEADER[3:])]
        for kind in found[0]
    ]


def main() -> None:
    """Read the arguments, train, print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", choices=["cortex", "synthetic"])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = rows_of_all(rows_of, arguments)
    show("domain.insulation", list(table(HEADER, rows)), arguments)


if __name__ == "__main__":
    main()
