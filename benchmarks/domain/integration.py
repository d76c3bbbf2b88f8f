"""Are embeddings and expected contacts of real cells worth having? Scores of `GLUE` beside those of PCA.

    pip install scanpy leidenalg igraph scib-metrics
    python -m benchmarks.domain.integration [FOLDER] [--seeds 0 1 2] [--epochs 40] [--set NAME=VALUE ...] [--write]

FOLDER has the cortex files that docs/quickstart.md names; without it only the synthetic cells are tried. `--set`
changes settings of `GLUE`, which are else those of configs/cortex.yaml; `--write` puts the table into
docs/reports/integration.md.

    ARI        adjusted Rand index of cell types and Leiden clusters, by scanpy's defaults (mean over 5 of its seeds)
    PCA        the same of principal components of log1p(total x / depth): for Hi-C 20 of a total of 50,000, for RNA 50
               of 10,000, as scanpy does by default; components are exact, for those of a randomised solver move
               the clusters of RNA by 0.06 with its seed
    same type  share of a cell's 15 nearest cells in the other modality that are of its type; a type has to be in both
    RNA by Hi-C, Hi-C by RNA  share of the 30 nearest cells of a Hi-C cell that are RNA, and the reverse; in the cortex
               0.54 and 0.46 if modalities mix. Both matter: where RNA lies within the Hi-C cells, one is high, the
               other low
    PC1        share of the first component's variance that the modality explains
    own type   share of Hi-C cells whose expected contacts, each stratum divided by its sum and by that of all cells,
               correlate most with the sum of the other cells of their type; measured: the same of the counts
    nearby     the same of `impute(output="nearby")`, which reads the cell's own contacts at nearby pairs
    iLISI      of scib-metrics, 90 neighbours: 0 if every neighbour is of the same batch, 1 if batches mix evenly
    expected   sums of expected contacts over those of the counts, at distances of 0, 1, 2, 5, 10, 20 and 30 bins
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer, seed_everything
from numpy.typing import NDArray

import lightning_amp
from benchmarks.page import ROOT, origin, paragraph, table, write_part
from lightning_amp.data.prepare.synthetic import synthesize

Row = TypeVar("Row")
T = TypeVar("T")
PAGE = ROOT / "docs" / "reports" / "integration.md"
SETTINGS: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "cortex.yaml").read_text())["model"]["init_args"]
DISTANCES = (0, 1, 2, 5, 10, 20, 30)
NEIGHBOURS, LISI_NEIGHBOURS, LEIDEN_SEEDS = 30, 90, 5
TYPES = {"Astro": "astrocytes", "MG": "microglia", "ODC": "oligodendrocytes", "Sst": "neurons"}
"""Of the nuclei of Lee et al., names in the RNA of Darmanis et al."""
SYNTHETIC: dict[str, Any] = {"cells": 240, "bins": 120, "strata": 16, "genes": 150, "depth": 4000}
HEADER = [
    "cells",
    "seed",
    "ARI, Hi-C",
    "PCA",
    "ARI, RNA",
    "PCA",
    "same type",
    "RNA by Hi-C",
    "Hi-C by RNA",
    "PC1",
    "own type",
    "nearby",
    "measured",
    "expected / measured",
    "seconds",
]
MIXING = ["cells", "seed", "iLISI, batches of Hi-C", "PCA", "batches of RNA", "PCA", "modalities"]


def prepare_cortex(files: Path, out: Path) -> Path:
    """Prepare the cortex files as `examples/cortex.py` does."""
    lightning_amp.prepare(
        hic=files / "cortex_lee2019_chr1_1mb.scool",
        labels=files / "cortex_lee2019_ref.tsv",
        rna=files / "cortex_darmanis2015_rna.h5ad",
        genes=files / "hg19_genes.gtf.gz",
        strata=32,
        out=out,
    )
    return out


def trained(data_dir: Path, seed: int, *, epochs: int, batch_size: int, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model and its data module after a fit on one CPU core."""
    seed_everything(seed, verbose=False)
    data = lightning_amp.SingleCellDataModule(data_dir, batch_size=batch_size, val_fraction=0.0, seed=seed)
    model = lightning_amp.GLUE(**settings)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(strategy="amp", accelerator="cpu", devices=1, max_epochs=epochs, limit_val_batches=0, **quiet)
    trainer.fit(model, datamodule=data)
    return model.eval(), data


@torch.no_grad()
def scores(model: Any, data: Any) -> dict[str, Any]:
    """Return the embedding's scores and the expected contacts by distance."""
    cells = {name: one.rows(np.arange(one.n_cells)) for name, one in data.tables.items()}
    embeddings = {name: model.encode(name, part)[0].numpy() for name, part in cells.items()}
    labels = {name: one.read_obs()["celltype"].to_numpy().astype(str) for name, one in data.tables.items()}
    found: dict[str, Any] = {name: rand_index(values, labels[name]) for name, values in embeddings.items()}
    together = np.concatenate(list(embeddings.values()))
    modality = np.repeat(np.arange(len(embeddings)), [len(values) for values in embeddings.values()])
    found["same type"] = same_type(embeddings, labels)
    (found["RNA by Hi-C"], found["Hi-C by RNA"]), found["PC1"] = mixing(together, modality)
    measured, expected = cells["hic"]["x"].numpy(), model.impute("hic", cells["hic"]).numpy()
    found["batches hic"], found["batches rna"] = (
        ilisi(embeddings[name], data.tables[name].batch) for name in ("hic", "rna")
    )
    found["modalities"] = ilisi(together, modality)
    near = model.impute("hic", cells["hic"], output="nearby").numpy()
    found["nearby"] = own_type(near, measured, labels["hic"], data.layout)
    found["own type"] = own_type(expected, measured, labels["hic"], data.layout)
    found["measured"] = own_type(measured, measured, labels["hic"], data.layout)
    strata = [data.layout.strata[k] for k in DISTANCES if k < len(data.layout.strata)]
    runs = [slice(one.start, one.stop) for one in strata]
    found["expected"] = [float(expected[:, run].sum() / measured[:, run].sum()) for run in runs]
    return found


def rand_index(features: NDArray[Any], labels: NDArray[np.str_]) -> float:
    """Return the adjusted Rand index of Leiden clusters and labels, the mean over seeds of Leiden."""
    import scanpy  # type: ignore[import-not-found]
    from anndata import AnnData
    from sklearn.metrics import adjusted_rand_score

    cells = AnnData(obsm={"X": np.asarray(features, dtype=np.float32)})
    scanpy.pp.neighbors(cells, use_rep="X")
    found = []
    for seed in range(LEIDEN_SEEDS):
        scanpy.tl.leiden(cells, flavor="igraph", n_iterations=2, directed=False, random_state=seed)
        found.append(adjusted_rand_score(labels, cells.obs["leiden"]))
    return float(np.mean(found))


def ilisi(embedding: NDArray[Any], batch: NDArray[np.int64]) -> float:
    """Return the scaled median of the local inverse Simpson index of batches."""
    from scib_metrics import ilisi_knn  # type: ignore[import-not-found]
    from scib_metrics.nearest_neighbors import NeighborsResults  # type: ignore[import-not-found]
    from sklearn.neighbors import NearestNeighbors

    if len(np.unique(batch)) < 2:
        return float("nan")
    distances, indices = NearestNeighbors(n_neighbors=LISI_NEIGHBOURS).fit(embedding).kneighbors(embedding)
    return float(ilisi_knn(NeighborsResults(indices=indices, distances=distances), np.asarray(batch)))


def mixing(embedding: NDArray[Any], modality: NDArray[np.int64]) -> tuple[list[float], float]:
    """Return by modality the share of neighbours in another one, and the modality's share of the first component."""
    from sklearn.decomposition import PCA
    from sklearn.neighbors import NearestNeighbors

    near = NearestNeighbors(n_neighbors=NEIGHBOURS + 1).fit(embedding).kneighbors(embedding, return_distance=False)
    first = PCA(1, random_state=0).fit_transform(embedding)[:, 0]
    other = modality[near[:, 1:]] != modality[:, None]
    return [float(other[modality == one].mean()) for one in np.unique(modality)], float(
        np.corrcoef(first, modality)[0, 1] ** 2
    )


def same_type(embeddings: dict[str, NDArray[Any]], labels: dict[str, NDArray[np.str_]]) -> float:
    """Return the mean over both directions of the share of the other modality's nearest cells that have the type."""
    from sklearn.neighbors import NearestNeighbors

    types = {"hic": np.array([TYPES.get(one, one) for one in labels["hic"]]), "rna": labels["rna"]}
    shares = []
    for name, other in (("hic", "rna"), ("rna", "hic")):
        near = NearestNeighbors(n_neighbors=15).fit(embeddings[other])
        places = near.kneighbors(embeddings[name], return_distance=False)
        shared = np.isin(types[name], types[other])
        shares.append((types[other][places] == types[name][:, None])[shared].mean())
    return float(np.mean(shares))


def own_type(maps: NDArray[Any], counts: NDArray[Any], labels: NDArray[np.str_], layout: Any) -> float:
    """Return the share of cells whose maps correlate most with the other cells of their type."""
    types, own = np.unique(labels, return_inverse=True)
    sums = np.stack([counts[own == one].sum(axis=0) for one in range(len(types))])
    found = []
    for cell, (one, values) in enumerate(zip(own, maps, strict=True)):
        others = sums.copy()
        others[one] -= counts[cell]
        shapes = within_strata(np.concatenate([values[None], others]), sums.sum(axis=0), layout)
        found.append(np.corrcoef(shapes)[0, 1:].argmax() == one)
    return float(np.mean(found))


def within_strata(maps: NDArray[Any], all_cells: NDArray[Any], layout: Any) -> NDArray[Any]:
    """Return maps divided by the sums of their strata and by those of all cells, for features that have contacts."""
    parts = []
    for stratum in layout.strata[1:]:
        own = slice(stratum.start, stratum.stop)
        seen = all_cells[own] > 0
        share = maps[:, own] / np.maximum(maps[:, own].sum(axis=1, keepdims=True), 1e-9)
        parts.append((share / np.maximum(all_cells[own] / max(all_cells[own].sum(), 1), 1e-9))[:, seen])
    return np.concatenate(parts, axis=1)


def baselines(data: Any) -> dict[str, float]:
    """Return the Rand indices of principal components of the same counts."""
    from sklearn.decomposition import PCA

    found = {}
    for name, (total, n) in {"hic": (5e4, 20), "rna": (1e4, 50)}.items():
        counts = data.tables[name].counts.toarray()
        logs = np.log1p(total * counts / counts.sum(axis=1, keepdims=True))
        labels = data.tables[name].read_obs()["celltype"].to_numpy().astype(str)
        components = PCA(n, svd_solver="full").fit_transform(logs)
        found[name] = rand_index(components, labels)
        found[f"batches {name}"] = ilisi(components, data.tables[name].batch)
    return found


def row(name: str, seed: object, found: dict[str, Any], base: dict[str, float], seconds: float) -> list[str]:
    """Return a row of the table."""
    shown = [f"{found['hic']:.2f}", f"{base['hic']:.2f}", f"{found['rna']:.2f}", f"{base['rna']:.2f}"]
    own = [f"{found[key]:.2f}" for key in ("own type", "nearby", "measured")]
    ratios = " ".join(f"{one:.2f}" for one in found["expected"])
    return [
        name,
        f"{seed}",
        *shown,
        f"{found['same type']:.2f}",
        f"{found['RNA by Hi-C']:.2f}",
        f"{found['Hi-C by RNA']:.2f}",
        f"{found['PC1']:.2f}",
        *own,
        ratios,
        f"{seconds:.0f}",
    ]


def mixing_row(name: str, seed: object, found: dict[str, Any], base: dict[str, float]) -> list[str]:
    """Return a row of the table of batches."""
    values = [one[f"batches {modality}"] for modality in ("hic", "rna") for one in (found, base)]
    return [name, f"{seed}", *("" if np.isnan(one) else f"{one:.2f}" for one in (*values, found["modalities"]))]


def one_seed(
    data_dir: Path, seed: int, *, epochs: int, batch_size: int, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, float], float]:
    """Train once; return scores, those of principal components, and the seconds of the processor for the training."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    begun = time.process_time()
    model, data = trained(data_dir, seed, epochs=epochs, batch_size=batch_size, settings=settings)
    seconds = time.process_time() - begun
    return scores(model, data), baselines(data), seconds


def rows_of(
    name: str, data_dir: Path, arguments: argparse.Namespace, settings: dict[str, Any]
) -> list[list[list[str]]]:
    """Train once a seed; return a row of both tables for each, and the medians."""
    asked = {"epochs": arguments.epochs, "batch_size": arguments.batch_size, "settings": settings}
    rows, found, times, base = list[list[list[str]]](), list[dict[str, Any]](), list[float](), dict[str, float]()
    for seed, (own, base, seconds) in seeds_in_turn(partial(one_seed, data_dir, **asked), arguments.seeds):
        found.append(own)
        times.append(seconds)
        rows.append([row(name, seed, own, base, seconds), mixing_row(name, seed, own, base)])
        print(*rows[-1][0], *rows[-1][1], sep=" | ", flush=True)
    medians = {key: np.median([one[key] for one in found], axis=0) for key in found[0]}
    title = f"**{name}**"
    last = row(title, "median", medians, base, float(np.median(times)))
    return [*rows, [last, mixing_row(title, "median", medians, base)]]


def seeds_in_turn(one_seed: Callable[[int], T], seeds: Iterable[int]) -> Iterator[tuple[int, T]]:
    """Yield each seed with what is found with it, in a process of its own.

    A second fit in a process was seen to take ten times as long.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for seed in seeds:
            yield seed, pool.submit(one_seed, seed).result()


def show(name: str, lines: list[str], arguments: argparse.Namespace) -> None:
    """Print the tables of a benchmark; write them into the page, below the command that repeats them, if asked to."""
    print(*lines, sep="\n")
    if arguments.write:
        only = ["--only", arguments.only] if arguments.only else []
        given = " ".join([*only, "--seeds", *map(str, arguments.seeds), f"--epochs {arguments.epochs}", *arguments.set])
        first = origin(f"python -m benchmarks.{name} FOLDER {given} --write")
        write_part(PAGE, name, [*paragraph(first), *lines])


def rows_of_all(
    rows_of: Callable[[str, Path, argparse.Namespace, dict[str, Any]], list[Row]], arguments: argparse.Namespace
) -> list[Row]:
    """Return the rows of the cortex and of the synthetic cells, as far as they are asked for, with changed settings."""
    changed = {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in arguments.set)}
    settings, rows = SETTINGS | changed, list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.files is not None and arguments.only != "synthetic":
            rows += rows_of("cortex", prepare_cortex(arguments.files, Path(folder) / "cortex"), arguments, settings)
        if arguments.only != "cortex":
            synthesize(Path(folder) / "cells", **SYNTHETIC)
            rows += rows_of("synthetic", Path(folder) / "cells", arguments, settings)
    return rows


def main() -> None:
    """Read the arguments, train, print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", choices=["cortex", "synthetic"])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = rows_of_all(rows_of, arguments)
    lines = [*table(HEADER, (one[0] for one in rows)), *table(MIXING, (one[1] for one in rows))]
    show("domain.integration", lines, arguments)


if __name__ == "__main__":
    main()
