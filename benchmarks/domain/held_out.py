"""Which pairs of bins will a cell have a contact between? Expected contacts of `GLUE` beside a random walk's.

    python -m benchmarks.domain.held_out [FOLDER] [--seeds 0 1 2] [--epochs 10] [--set NAME=VALUE ...] [--write]

FOLDER, --set and --write are those of benchmarks.domain.integration. A fifth of every cell's contacts is held out (each
contact by itself, drawn with the seed), and all methods see the rest. Of each cell and stratum, the pairs without a
contact that is seen are ranked; the score is the area under precision and recall (average precision) of those with a
held-out contact, the mean over cells and strata that have both kinds.

    expected      `GLUE`'s expected contacts
    nearby        the same, given the cell's own contacts at nearby pairs: `impute(output="nearby")`
    random walk   as scHiCluster (Zhou et al. 2019, doi 10.1073/pnas.1901423116): log2(1 + x) of the symmetric map, the
                  mean of 3 x 3 bins, rows scaled to 1, random walk with restart 0.5 to its limit, made symmetric
    all cells     sum of all cells, the same ranks for every cell
    all, nearby   the same scaled to a cell's depth, given the cell's own contacts as "nearby" is: no model
    own type      sum of the cells of the same type, which needs labels
    chance        share of the pairs that have a held-out contact
"""

import argparse
import logging
import shutil
import tempfile
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
from lightning_amp.models.inputs import StrataInputs
from lightning_amp.models.nearby import nearby

HELD_OUT, RESTART = 0.2, 0.5
HEADER = ["cells", "seed", "expected", "nearby", "random walk", "all cells", "all, nearby", "own type", "chance"]
Maps = NDArray[np.floating[Any]]


def hold_out(data_dir: Path, out: Path, seed: int) -> Any:
    """Copy a data directory with four fifths of the contacts; return the others, a sparse matrix [cell, feature]."""
    import anndata

    shutil.copytree(data_dir, out)
    (file,) = (out / "hic").glob("*.h5ad")
    cells = anndata.read_h5ad(file)
    whole = sp.csr_matrix(cells.X)
    seen = whole.copy()
    seen.data = np.random.default_rng(seed).binomial(whole.data.astype(np.int64), 1 - HELD_OUT).astype(whole.dtype)
    held = whole - seen
    held.eliminate_zeros()
    seen.eliminate_zeros()
    cells.X = seen
    cells.write_h5ad(file)
    return held.tocsr()


def random_walk(counts: Maps, layout: Any) -> Maps:
    """Return one cell's contacts [feature] after convolution and random walk with restart."""
    from scipy.ndimage import uniform_filter

    places = [(one.anchors, one.anchors + one.k, slice(one.start, one.stop)) for one in layout.strata]
    whole = np.zeros((layout.n_anchors, layout.n_anchors))
    for row, column, own in places:
        whole[row, column] = whole[column, row] = np.log2(1 + counts[own])
    smooth = uniform_filter(whole, 3, mode="constant")
    sums = smooth.sum(axis=1)
    # a bin without contacts stays where it is
    smooth[sums == 0, sums == 0] = 1
    steps = smooth / smooth.sum(axis=1, keepdims=True)
    # limit of Q = (1 - r) Q P + r I
    limit = RESTART * np.linalg.inv(np.eye(len(steps)) - (1 - RESTART) * steps)
    limit = limit + limit.T
    return np.concatenate([limit[row, column] for row, column, _ in places])


def shared_map(seen: Maps, strata: StrataInputs) -> Maps:
    """Return the sum of all cells, scaled to each cell's depth and given its own contacts nearby, [cell, feature]."""
    sums = torch.from_numpy(seen.sum(axis=0, dtype=np.float64))
    x = torch.from_numpy(seen.astype(np.float64))
    found: Maps = nearby(x.sum(dim=1, keepdim=True) * sums / sums.sum(), x, strata).numpy()
    return found


def average_precision(scores: Maps, positive: NDArray[np.bool_]) -> float:
    """Return the area under precision and recall; equal scores are in one step of recall."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    found = hits[last]
    return float((np.diff(found, prepend=0) * found / (last + 1)).sum() / hits[-1])


def score(maps: Maps, seen: Maps, held: Maps, layout: Any) -> float:
    """Return the mean average precision over cells and strata."""
    found = []
    for stratum in layout.strata:
        own = slice(stratum.start, stratum.stop)
        for values, before, after in zip(maps[:, own], seen[:, own], held[:, own], strict=True):
            positive = after[before == 0] > 0
            if positive.any() and not positive.all():
                found.append(average_precision(values[before == 0], positive))
    return float(np.mean(found))


def one_seed(data_dir: Path, seed: int, arguments: argparse.Namespace, settings: dict[str, Any]) -> list[float]:
    """Hold out, train once; return the scores in the order of the header."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        held = hold_out(data_dir, Path(folder) / "seen", seed).toarray()
        model, data = trained(
            Path(folder) / "seen", seed, epochs=arguments.epochs, batch_size=arguments.batch_size, settings=settings
        )
        cells = data.tables["hic"]
        seen, layout = cells.counts.toarray(), data.layout
        with torch.no_grad():
            batch = cells.rows(np.arange(cells.n_cells))
            expected, near = (model.impute("hic", batch, output=one).numpy() for one in ("expected", "nearby"))
        shared = shared_map(seen, model.inputs.strata)
        types, own = np.unique(cells.read_obs()["celltype"].to_numpy().astype(str), return_inverse=True)
        of_types = np.stack([seen[own == one].sum(axis=0) for one in range(len(types))])
    walked = np.stack([random_walk(one, layout) for one in seen])
    # the cell itself has no contact at the pairs that are ranked
    same = np.broadcast_to(seen.sum(axis=0), seen.shape)
    maps = [expected, near, walked, same, shared, of_types[own], np.zeros_like(seen)]
    return [score(one, seen, held, layout) for one in maps]


def rows_of(name: str, data_dir: Path, arguments: argparse.Namespace, settings: dict[str, Any]) -> list[list[str]]:
    """Return a row for each seed, and the medians."""
    found, rows = list[list[float]](), list[list[str]]()
    one = partial(one_seed, data_dir, arguments=arguments, settings=settings)
    for seed, scores in seeds_in_turn(one, arguments.seeds):
        found.append(scores)
        rows.append([name, str(seed), *(f"{each:.3f}" for each in scores)])
        print(*rows[-1], sep=" | ", flush=True)
    return [*rows, [f"**{name}**", "median", *(f"{one:.3f}" for one in np.median(found, axis=0))]]


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
    show("domain.held_out", list(table(HEADER, rows)), arguments)


if __name__ == "__main__":
    main()
