"""A data directory becomes the same batches whatever the number of ranks, also of a rank's own columns; what cannot be
served is refused."""

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata
import h5py
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from scipy import sparse
from torch.utils.data import DataLoader

from lightning_amp import OwnBins, OwnColumns, ShardError, as_sharded, own_part, prepare
from lightning_amp.data.files import read_h5ad as reading
from lightning_amp.data.files.read_h5ad import read_header
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.data.prepare.read_scool import ScoolFile
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import inputs_from
from lightning_amp.sharding.own_parts import OwnParts
from tests.data.tiny_data import edit, make_bins, write_all

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "synthetic"
    synthesize(out, cells=30, rna_cells=21, bins=24, strata=4, genes=40, cell_types=2)
    return out


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "copy"))


def module(root: Path, **options: Any) -> SingleCellDataModule:
    data = SingleCellDataModule(root, **options)
    data.setup()
    return data


def as_rank(data: SingleCellDataModule, rank: int, n: int, *, balance: bool = False) -> SingleCellDataModule:
    """Attach what a trainer on one of several ranks would say."""
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        distributed_sampler_kwargs={"num_replicas": n, "rank": rank},
        overfit_batches=0,
        strategy=SimpleNamespace(balance_cells=balance),
    )
    return data


def cells(loader: Any, modality: str) -> list[int]:
    return [row for batch in loader if modality in batch for row in batch[modality]["index"].tolist()]


def test_a_batch_is_what_the_files_hold(root: Path) -> None:
    data = module(root, batch_size=8)
    source = {m: anndata.read_h5ad(path) for m, path in data.directory.modalities.items()}
    batch = next(iter(data.train_dataloader()))
    assert sorted(batch) == ["hic", "rna"]
    for modality, part in batch.items():
        expected = source[modality].X[part["index"].numpy()].toarray()
        np.testing.assert_array_equal(part["x"].numpy(), expected)
        np.testing.assert_array_equal(part["library"].numpy(), expected.sum(axis=1, keepdims=True))
        types = {name: (value.dtype, tuple(value.shape)[:1]) for name, value in part.items()}
        integers = dict.fromkeys(("batch", "index", "draw"), (torch.int64, (8,)))
        assert types == {"x": (torch.float32, (8,)), "library": (torch.float32, (8,)), **integers}


def test_cells_and_draws_do_not_depend_on_the_number_of_ranks(root: Path) -> None:
    def epoch(n: int, batch_size: int) -> list[set[tuple[int, int]]]:
        loaders = [
            as_rank(module(root, batch_size=batch_size), rank, n, balance=True).train_dataloader() for rank in range(n)
        ]
        pairs = [
            [set(zip(b["hic"]["index"].tolist(), b["hic"]["draw"].tolist(), strict=True)) for b in loader]
            for loader in loaders
        ]
        return [set().union(*step) for step in zip(*pairs, strict=True)]

    assert epoch(1, 8) == epoch(2, 4) == epoch(4, 2)


def test_held_out_cells_are_in_validation_only(root: Path) -> None:
    data = module(root, batch_size=4, val_fraction=0.2)
    for modality, n in (("hic", 30), ("rna", 21)):
        held, trained = cells(data.val_dataloader(), modality), cells(data.train_dataloader(), modality)
        assert len(held) == -(-n // 5)
        assert sorted(set(trained) | set(held)) == list(range(n))
        assert not set(trained) & set(held)
        assert cells(data.test_dataloader(), modality) == cells(data.predict_dataloader(), modality) == list(range(n))
    again = module(root, batch_size=9, val_fraction=0.2)
    assert cells(again.val_dataloader(), "hic") == cells(data.val_dataloader(), "hic")
    other = module(root, val_fraction=0.2, seed=1)
    assert cells(other.val_dataloader(), "hic") != cells(data.val_dataloader(), "hic")


def test_validation_counts_a_cell_once_on_any_number_of_ranks(root: Path) -> None:
    torch.manual_seed(0)
    model = GLUE(latent_dim=8, hidden_dim=16, hidden_depth=1, window=10).build(inputs_from(module(root))).eval()

    def validated(n: int, batch_size: int) -> torch.Tensor:
        sums = []
        for rank in range(n):
            model.on_validation_epoch_start()
            for batch in as_rank(module(root, batch_size=batch_size), rank, n).test_dataloader():
                model.validation_step(batch, 0)
            sums.append(model._validated)
        return torch.stack(sums).sum(0)

    with torch.no_grad():
        once, often = validated(1, 8), validated(7, 4)
    assert once[:, 1].tolist() == [30, 21]
    # the last 2 of 30 cells are those of 7 ranks, 5 of which have nothing else in this step
    torch.testing.assert_close(often, once, rtol=1e-4, atol=0)


def test_balance_follows_the_strategy_unless_said_otherwise(root: Path) -> None:
    for balance, of_strategy, expected in ((None, True, True), (None, False, False), (False, True, False)):
        data = as_rank(module(root, balance=balance), 0, 2, balance=of_strategy)
        assert data.train_dataloader().steps.balance is expected
    assert module(root).train_dataloader().steps.balance is False


def trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def test_one_modality_needs_no_graph(copy: Path) -> None:
    shutil.rmtree(copy / "graphs")
    data = module(copy, modalities=["hic"])
    assert (list(data.tables), data.graph) == (["hic"], None)
    with pytest.raises(DataError, match="guidance graph, and graphs/ holds none; `lightning-amp prepare`"):
        data.vertices("hic")
    with pytest.raises(DataError, match=r"modalities \['hic', 'rna'\].*`lightning-amp prepare` writes it"):
        module(copy)


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_size": 0}, r"batch_size=0 is not supported"),
    ({"val_fraction": 1.0}, r"val_fraction=1.0 is not supported; it is a share of the cells in \[0, 1\)"),
    ({"modalities": ["hic", "atac"]}, r"modalities=\['hic', 'atac'\] is not supported, found \['hic'"),
    ({"pin_memory": "yes"}, "pin_memory='yes' is not supported; allowed are True, False and 'auto'"),
    ({"setting": "other"}, r"no file of setting 'other'"),
])  # fmt: skip
def test_bad_arguments_are_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        module(root, **options)


def test_features_without_a_vertex_are_named(copy: Path) -> None:
    (path,) = (copy / "rna").glob("*.h5ad")
    rna = anndata.read_h5ad(path)
    rna.var_names = ["strange", *rna.var_names[1:]]
    rna.write_h5ad(path)
    data = module(copy)
    with pytest.raises(DataError, match=r"1 of \d+ features of modality 'rna' are no vertices.*e.g"):
        data.vertices("rna")
    with pytest.raises(DataError, match=r"modality 'atac' is not loaded; loaded are \['hic', 'rna'\]"):
        data.vertices("atac")


def write(path: Path, x: Any, **layers: Any) -> Path:
    anndata.AnnData(X=x, layers=layers).write_h5ad(path)
    return path


COUNTS = np.array([[1, 0, 2], [0, 0, 3]], dtype=np.float32)


@pytest.mark.parametrize("matrix", [COUNTS, sparse.csr_matrix(COUNTS), sparse.csc_matrix(COUNTS)])
def test_counts_are_read_from_any_encoding(tmp_path: Path, matrix: Any) -> None:
    table = CellTable(write(tmp_path / "a.h5ad", matrix), "rna")
    np.testing.assert_array_equal(table.rows(np.array([1, 0]))["x"], COUNTS[::-1])
    assert (table.n_cells, table.n_features, table.n_batches) == (2, 3, 1)


def test_the_counts_layer_is_preferred_to_x(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", COUNTS - 0.5, counts=sparse.csr_matrix(COUNTS))
    np.testing.assert_array_equal(CellTable(path, "rna").rows(np.arange(2))["x"], COUNTS)


@pytest.mark.parametrize(("value", "message"), [
    (-1, r"X: found negative values, e.g. -1.0; raw counts are needed"),
    (0.5, r"X: found fractional values, e.g. 0.5; raw counts are needed"),
    (np.nan, r"X: found missing or infinite values, e.g. nan"),
])  # fmt: skip
def test_matrices_that_are_no_counts_are_refused(tmp_path: Path, value: float, message: str) -> None:
    spoilt = COUNTS.copy()
    spoilt[1, 1] = value
    with pytest.raises(DataError, match=message):
        CellTable(write(tmp_path / "a.h5ad", sparse.csr_matrix(spoilt)), "hic")


def test_rates_are_allowed_for_methylation_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", COUNTS / 4)
    assert CellTable(path, "methyl").contacts.tolist() == [0.75, 0.75]
    with pytest.raises(DataError, match="fractional"):
        CellTable(path, "atac")


def test_a_modality_without_counts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its 2 cells has a count"):
        CellTable(write(tmp_path / "a.h5ad", np.zeros((2, 3), np.float32)), "hic")
    with pytest.raises(DataError, match="found nothing"):
        CellTable(tmp_path / "absent.h5ad", "hic")
    with h5py.File(write(tmp_path / "b.h5ad", COUNTS), "a") as file:
        del file["X"]
    with pytest.raises(DataError, match=r"neither X nor layers\['counts'\] found"):
        CellTable(tmp_path / "b.h5ad", "hic")


@pytest.mark.parametrize(
    ("asked", "device", "pins"),
    [("auto", "cuda", True), ("auto", "cpu", False), (False, "cuda", False), (True, "cpu", True)],
)
def test_batches_are_pinned_where_a_gpu_reads_them(root: Path, asked: Any, device: str, pins: bool) -> None:
    data = as_rank(module(root, batch_size=4, pin_memory=asked), 0, 1)
    data.trainer.strategy.root_device = torch.device(device)  # type: ignore[union-attr]
    loaders = (data.train_dataloader(), data.val_dataloader(), data.predict_dataloader())
    assert [loader.pin_memory for loader in loaders] == [pins] * 3
    assert not module(root).train_dataloader().pin_memory


class Doubled(SingleCellDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"twice": [batch, batch]}


def test_a_subclass_keeps_its_hook_where_ranks_read_own_columns(root: Path) -> None:
    parts = SimpleNamespace(size=2, dims={"rna.x": (1,)}, part=lambda n: slice(0, n // 2))
    parts.sharded = lambda x, dim, length: ("a part of", length)
    data = as_rank(Doubled(root, batch_size=4), 0, 1)
    data.trainer.strategy.own_parts = parts  # type: ignore[union-attr]
    data.setup()
    batch = next(iter(data.train_dataloader()))
    found = data.on_after_batch_transfer(batch, 0)["twice"][1]
    assert found["rna"]["x"] == ("a part of", data.tables["rna"].n_features)
    assert found["hic"]["x"] is batch["hic"]["x"]


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


def write_counts(folder: Path, layout: str, counts: np.ndarray) -> Path:
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
        path = write_counts(tmp_path, layout, counts)
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
    path, read = write_counts(tmp_path, "csc", counts), []
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
    path = write_counts(tmp_path, "csr", counts)
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
