"""Claim: a rank's own columns of a file, in any layout and with workers, are those of the whole matrix."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata
import h5py
import numpy as np
import pytest
import torch
from scipy import sparse
from torch.utils.data import DataLoader

from lightning_amp import OwnBins, OwnColumns, ShardError, SingleCellDataModule, as_sharded, own_part, prepare
from lightning_amp.data.files import read_h5ad as reading
from lightning_amp.data.files.read_h5ad import read_header
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.data.prepare.read_scool import ScoolFile
from lightning_amp.dist.own_parts import OwnParts
from lightning_amp.errors import DataError
from tests.data.tiny_data import edit, make_bins, write_all

CELLS, FEATURES = 9, 12
LAYOUTS: dict[str, Any] = {
    "csr": sparse.csr_matrix,
    "csc": sparse.csc_matrix,
    "dense": lambda counts: counts,
    "dense float64": lambda counts: counts.astype(np.float64),
}
RUNS = (slice(0, 5), slice(5, 12), slice(3, 4), slice(0, 12))


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    found = np.random.default_rng(2).poisson(0.7, (CELLS, FEATURES)).astype(np.float32)
    found[4], found[:, 3] = 0, 0
    return found


def write(folder: Path, layout: str, counts: np.ndarray) -> Path:
    path = folder / f"{layout.replace(' ', '_')}.h5ad"
    anndata.AnnData(LAYOUTS[layout](counts)).write_h5ad(path)
    return path


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_own_columns_are_those_of_the_matrix(
    tmp_path: Path, counts: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several blocks, also where a row or a column has more entries than one
    monkeypatch.setattr(reading, "BLOCK_ENTRIES", 7)
    for layout in LAYOUTS:
        path = write(tmp_path, layout, counts)
        np.testing.assert_array_equal(reading.read_totals(path, "X"), counts.sum(1))
        for own in RUNS:
            found = reading.read_columns(path, "X", own)
            np.testing.assert_array_equal(found.toarray(), counts[:, own], err_msg=f"{layout} {own}")
            found.check_format()
            cells = OwnColumns(path, own)
            assert (len(cells), cells.n_features) == (CELLS, FEATURES)
            np.testing.assert_array_equal(cells.rows([7, 2, 7]), counts[[7, 2, 7], own])
        table = CellTable(path, "rna", slice(5, 12))
        np.testing.assert_array_equal(table.rows(np.array([1, 0]))["library"][:, 0], counts[[1, 0]].sum(1))
        assert (table.n_features, table.counts.shape) == (FEATURES, (CELLS, 7))
        # an open file is not taken into a worker, neither by fork nor by a copy
        assert torch.equal(pickle.loads(pickle.dumps(cells))[1], cells[1])
        loader = DataLoader(cells, batch_size=4, num_workers=2, multiprocessing_context="fork")
        np.testing.assert_array_equal(torch.cat([*loader]), counts)


def test_only_own_columns_of_csc_are_read(tmp_path: Path, counts: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = write(tmp_path, "csc", counts), []
    take = h5py.Dataset.__getitem__

    def noted(self: Any, *key: Any) -> Any:
        found = take(self, *key)
        read.append(len(found) if self.name == "/X/data" else 0)
        return found

    monkeypatch.setattr(h5py.Dataset, "__getitem__", noted)
    OwnColumns(path, slice(4, 8))
    assert sum(read) == np.count_nonzero(counts[:, 4:8])


def test_own_bins_are_those_of_the_contact_maps(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    scool, bins = ScoolFile(files.hic), make_bins()
    whole = OwnBins(files.hic, strata=4)
    expected = np.zeros((len(whole), 4, len(bins)), np.float32)
    for cell, name in enumerate(scool.cells):
        for low, high, count in next(scool.iterate([name]))[1].itertuples(index=False):
            if high - low < 4 and bins["chrom"][low] == bins["chrom"][high]:
                expected[cell, high - low, low] += count
    assert expected.any()
    np.testing.assert_array_equal(torch.stack([*whole]), expected)
    for own in (slice(0, 7), slice(7, 20)):
        loader = DataLoader(OwnBins(files.hic, own, strata=4), batch_size=4)
        np.testing.assert_array_equal(torch.cat([*loader]), expected[:, :, own])


def test_prepared_counts_are_stored_by_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_all(tmp_path)
    right = prepare(**files.arguments())
    monkeypatch.setattr("lightning_amp.data.files.read_h5ad.MOST", 50)
    found = prepare(**files.arguments() | {"out": tmp_path / "columns"}, by_columns=True)
    for modality, path in found.modalities.items():
        one, other = anndata.read_h5ad(path), anndata.read_h5ad(right.modalities[modality])
        assert isinstance(one.X, sparse.csc_matrix), modality
        assert [*one.layers] == [*other.layers]
        np.testing.assert_array_equal(one.X.toarray(), other.X.toarray())
        assert one.obs.equals(other.obs)
        assert one.var.equals(other.var)
        assert read_header(path).n_nonzero == one.X.nnz
    batches = []
    for root in (files.out, tmp_path / "columns"):
        data = SingleCellDataModule(root, batch_size=3)
        data.setup()
        batches.append(next(iter(data.train_dataloader())))
    torch.testing.assert_close(batches[0], batches[1], rtol=0, atol=0)


def test_what_is_no_part_is_refused(tmp_path: Path, counts: np.ndarray) -> None:
    path = write(tmp_path, "csr", counts)
    for columns in (slice(5, 5), slice(0, 4, 2), slice(8, 13)):
        with pytest.raises(DataError, match="allowed is a slice with step 1"):
            OwnColumns(path, columns)
    with pytest.raises(DataError, match=r"there is no 'layers/counts', found \['X', "):
        OwnColumns(path, source="layers/counts")
    edit(path, lambda file: file["X/data"].__setitem__(0, -1.0))
    with pytest.raises(DataError, match="found negative values"):
        CellTable(path, "rna", slice(0, FEATURES))


def test_a_part_is_that_of_the_place_in_the_model_axis() -> None:
    def trainer(**place: Any) -> Any:
        return SimpleNamespace(strategy=SimpleNamespace(own_parts=OwnParts(**place)))

    assert [own_part(7, trainer(rank=rank, size=3)) for rank in range(3)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    x, plain = torch.ones(2, 7), SimpleNamespace(strategy=object())
    for other in (None, plain):
        assert own_part(7, other) == slice(0, 7)
        assert as_sharded(x, other, dim=1, length=7) is x
    for words, call in {
        "leaves the size of the model axis to the plan": lambda: own_part(7, trainer(size=0)),
        "at least one index per rank": lambda: own_part(2, trainer(size=3)),
        "owns 3 indices": lambda: as_sharded(x[:, :2], trainer(size=3), dim=1, length=7),
        "no technique of this run splits": lambda: as_sharded(x[:, :3], trainer(size=3), dim=1, length=7),
    }.items():
        with pytest.raises(ShardError, match=words):
            call()
