"""Claim: counts by their entries train as dense ones do, no dense [B, F] is built, and other uses are refused.

The class against dense slices; the encoder's layer, the decoder under its techniques, and the reference model from
files, on one process and on two ranks, in double precision; what reads a batch; what is refused.
"""

import pickle
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from scipy import sparse
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.data import sparse_counts
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError, ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.install import install
from lightning_amp.lightning.consistency.replicas import make_sure_of_same_batch
from lightning_amp.models.glue import GLUE
from lightning_amp.models.latents import Encoder
from lightning_amp.techniques.hic.features import share_rows
from lightning_amp.techniques.hic.rows import RowParallelLinear
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import Case, Model, Results, differences, make_plan, model_mesh, reference, train

RTOL = 1e-12
CELLS, FEATURES = 7, 53
CASES = {
    "chained": Case(chained=True),
    "one batch": Case(n_batches=1, features={2: 3}),
    "binarized": Case(binarized=True, chained=True),
    "convolution": Case(key="convolution", n_batches=1),
}
ALONE = ((), ("stream",), ("recompute",), ("S3", "S4", "stream"), ("S4", "sparse"), ("sparse", "stream"))
TOGETHER = (("S2", "S5"), ("S2", "sparse", "stream"), ("stream", "strata"), ("nodes", "sparse", "stream"))


def counts(cells: int = CELLS, features: int = FEATURES, *, rate: float = 0.2, seed: int = 0) -> Tensor:
    """A first cell and a last feature without counts, and a cell with many."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.poisson(torch.full((cells, features), rate, dtype=torch.float64), generator=generator)
    x[0], x[:, -1], x[-1, ::2] = 0, 0, 3
    return x


def same(found: SparseCounts, expected: Tensor) -> None:
    assert isinstance(found, SparseCounts)
    assert found.shape == tuple(expected.shape)
    assert len(found) == len(expected)
    assert found.numel() == expected.numel()
    assert torch.equal(found.to_dense(), expected)
    assert len(found.value) == expected.count_nonzero()
    order = found.column * max(len(found), 1) + found.row
    assert bool((order.diff() > 0).all()), "by column, then by row"


def test_cuts_are_those_of_the_dense_matrix() -> None:
    x = counts()
    found = SparseCounts.from_dense(x)
    same(found, x)
    index = torch.randperm(FEATURES, generator=torch.Generator().manual_seed(1))[:20]
    runs = [slice(0, 9), slice(9, 50), slice(50, None), slice(4, 4), slice(-3, None), slice(None)]
    for run in runs:
        same(found[:, run], x[:, run])
        same(found[..., run], x[..., run])
    for block in (slice(0, 3), slice(2, 6), slice(6, 99), slice(3, 3), slice(None)):
        same(found[block], x[block])
        same(found[block][:, 5:40][..., index[index < 35]], x[block][:, 5:40][..., index[index < 35]])
    for chosen in (index, index.sort()[0], index[:0], torch.arange(FEATURES).flip(0)):
        same(found[..., chosen], x[..., chosen])
        same(found[:, chosen][1:5], x[:, chosen][1:5])
    same(found.with_values(2 * found.value), 2 * x)


def test_counts_of_a_file_are_taken_as_they_are() -> None:
    x = counts().numpy().astype(np.float32)
    matrix = sparse.csr_matrix(x)
    backwards = matrix.copy()
    for start, stop in pairwise(matrix.indptr):
        backwards.indices[start:stop] = matrix.indices[start:stop][::-1]
        backwards.data[start:stop] = matrix.data[start:stop][::-1]
    backwards.has_sorted_indices = False
    stored = sparse.csr_matrix(
        (np.r_[matrix.data, 0], np.r_[matrix.indices, 5], np.r_[matrix.indptr[:-1], matrix.nnz + 1]), x.shape
    )
    doubled = sparse.csr_matrix((np.r_[matrix.data, 1], np.r_[matrix.indices, 0], stored.indptr), x.shape)
    more = x.copy()
    more[-1, 0] += 1
    for given, expected in ((matrix, x), (backwards, x), (stored, x), (doubled, more)):
        before = given.nnz
        same(SparseCounts.from_csr(given), torch.from_numpy(expected))
        assert given.nnz == before, "the file's matrix is left alone"
        made = SparseCounts.from_csr(given)
        checked = SparseCounts(*made.tensors(), made.shape)
        for place, expected_place in zip(made._host, checked._host, strict=True):
            np.testing.assert_array_equal(place, expected_place)
    same(SparseCounts.from_csr(matrix[[3, 3, 0]]), torch.from_numpy(x[[3, 3, 0]]))


def test_travels_as_a_tensor_does() -> None:
    x = counts()
    found = SparseCounts.from_dense(x)
    assert len(found._host) == 2
    again = pickle.loads(pickle.dumps(found))
    assert "_host" not in vars(again), "places travel once"
    same(again, x)
    single = found.to("cpu", torch.float32)
    assert single.dtype == single.to_dense().dtype == torch.float32
    assert single.row.dtype == torch.int64
    assert torch.equal(single.to_dense(torch.float64), x)
    assert single.device == x.device
    (loaded,) = DataLoader([{"hic": {"x": found}}], batch_size=None)
    same(loaded["hic"]["x"], x)
    # without values entries are spread evenly
    found = SparseCounts.from_dense(torch.ones(6, 10)).to("meta")
    assert [
        len(part.value) for part in (found[:, 2:7], found[..., torch.arange(4)], found[1:3], found[1:3][:, :5])
    ] == [30, 24, 20, 10]
    layer = nn.Linear(10, 3, device="meta")
    layer(found).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize("block", [1, 40, 2**20])
def test_a_linear_layer_is_the_dense_one(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_counts, "BLOCK", block)
    x, torch_seed = counts(), torch.manual_seed(0)
    assert torch_seed is not None
    for bias in (True, False):
        layer = nn.Linear(FEATURES, 5, bias=bias).double()
        values = []
        for given in (x, SparseCounts.from_dense(x)):
            layer.zero_grad()
            y = layer(given)
            y.sin().sum().backward()
            values.append({"y": y.detach(), **{n: p.grad.clone() for n, p in layer.named_parameters()}})
        assert differences(values[1], values[0], RTOL) == []
    frozen = nn.Linear(FEATURES, 5).double().requires_grad_(False)
    assert not frozen(SparseCounts.from_dense(x)).requires_grad


def test_the_encoder_never_holds_a_dense_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_counts, "BLOCK", 2**12)
    cells, features = 64, 2**13
    x = SparseCounts.from_dense(torch.poisson(torch.full((cells, features), 0.02)))
    library = torch.full((cells, 1), 100.0)
    encoder = Encoder(features, 2, hidden_dim=4, hidden_depth=1, dropout=0.0, total=5e4, stream=0)
    with LiveBytes() as live:
        encoder(x, library)[0].sum().backward()
    gradient = 4 * features * 4
    assert live.peak - gradient < cells * features * 4 / 8, "an eighth of a dense x"
    assert live.current < 1.2 * gradient


def alone(case: Case, strategies: tuple[str, ...], kind: type[Model] = Model) -> Results:
    model = kind(case)
    return train(model, 3, install(model, make_plan(strategies, 1)))


class Sparse(Model):
    """The model of a case with its counts by their entries, in float32 as a batch holds them."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.batch["x"] = SparseCounts.from_dense(self.batch["x"].float())  # type: ignore[assignment]


@pytest.mark.parametrize("name", CASES)
def test_the_decoder_is_the_dense_one(name: str) -> None:
    case = replace(CASES[name], cells=5)
    expected = reference(case)
    for strategies in ALONE:
        if (case.key == "attention" or "S3" not in strategies) and not (case.binarized and "sparse" in strategies):
            assert differences(alone(case, strategies, Sparse), expected) == [], strategies


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "synthetic"
    synthesize(out, cells=24, rna_cells=18, bins=30, strata=3, genes=20, seed=2)
    return out


class Peeks(pl.Callback):
    """Notes what the steps' x of Hi-C are."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.kinds.add(type(batch["hic"]["x"]))
        assert isinstance(batch["rna"]["x"], Tensor)

    on_validation_batch_start = on_predict_batch_start = on_train_batch_start  # type: ignore[assignment]


def fitted(data_dir: Path, *, sparse: bool, make: Any) -> Results:
    """Two epochs, their validation and a prediction; `make` gives a trainer some callbacks."""
    seed_everything(3)
    peeks = Peeks()
    model = GLUE(latent_dim=8, hidden_dim=16, window=8, edges_per_step=64, align_burnin=2)
    data = SingleCellDataModule(data_dir, batch_size=8, val_fraction=0.25, sparse=sparse)
    trainer = make(callbacks=[peeks])
    trainer.fit(model, data)
    assert peeks.kinds == {SparseCounts if sparse else Tensor}
    scores = {name: value.double() for name, value in trainer.callback_metrics.items()}
    u = [batch["hic"]["embedding"] for batch in make(callbacks=[peeks]).predict(model, data) if "hic" in batch]
    return scores | {"u": torch.cat(u)} | {n: v.double() for n, v in model.state_dict().items()}


def other_results(found: Results, expected: Results) -> list[str]:
    """RMSprop divides biases' gradients, which BatchNorm leaves at rounding, by their own size."""
    own = {n for n in expected if "." in n}
    parts = [({n: v for n, v in r.items() if n not in own}, {n: r[n] for n in own}) for r in (found, expected)]
    (scores, state), (expected_scores, expected_state) = parts
    return differences(scores, expected_scores, 1e-9) + differences(state, expected_state, 1e-8)


def one_process(**options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=1, precision="64-true", max_epochs=2, **quiet, **options)


def test_the_reference_model_trains_alike(root: Path) -> None:
    found, expected = (fitted(root, sparse=sparse, make=one_process) for sparse in (True, False))
    assert other_results(found, expected) == []


def over_ranks(rank: int, ranks: int, data_dir: Path) -> list[str]:
    """What differs between dense and sparse, on all that two ranks can share."""
    warnings.simplefilter("ignore")
    mesh, wrong = model_mesh(ranks), []
    for case in (Case(), Case(chained=True, n_batches=1, features={2: 3})):
        expected = reference(case)
        for strategies in TOGETHER:
            model = Sparse(case)
            found = train(model, 3, install(model, make_plan(strategies, ranks), mesh), mesh)
            wrong += [f"{strategies}: {line}" for line in differences(found, expected)]
    wrong += [f"wide layer: {line}" for line in wide_layer(mesh)]

    x = counts()
    x[2, 1] += rank
    batch = {"x": SparseCounts.from_dense(x)}
    with pytest.raises(DataError, match=r"different ones.*shapes here are \[\(7, 53\)\]"):
        make_sure_of_same_batch(batch, mesh["model"], device=torch.device("cpu"))
    return wrong


def wide_layer(mesh: Any) -> list[str]:
    x = counts()
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, 3).double()
    change = share_rows(layer, RowParallelLinear(), mesh)
    shared, (weight,) = change.swaps[""], change.sharded
    expected, found = layer(x), shared(SparseCounts.from_dense(x))
    expected.sin().sum().backward()
    found.sin().sum().backward()
    results = {"y": found.detach(), "weight": weight.join(weight.shard.grad)}
    return differences(results, {"y": expected.detach(), "weight": layer.weight.grad}, RTOL)


@pytest.mark.ranks
def test_ranks_share_sparse_counts_as_dense_ones(root: Path, tmp_path: Path) -> None:
    assert run_ranks(over_ranks, 2, tmp_path, root, timeout=120) == [[], []]


def module(root: Path, **options: Any) -> SingleCellDataModule:
    data = SingleCellDataModule(root, batch_size=4, **options)
    data.setup()
    return data


def kinds(data: SingleCellDataModule, modality: str = "hic") -> set[type]:
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader())
    return {type(batch[modality]["x"]) for loader in loaders for batch in loader if modality in batch}


def test_auto_is_sparse_where_it_pays_and_the_model_takes_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = module(root)
    table = data.tables["hic"]
    dense, given = table.share, {"distributed_sampler_kwargs": None, "overfit_batches": 0, "strategy": None}
    assert dense == pytest.approx((table.counts.toarray() != 0).mean())

    def auto(model: Any, few: float, many: int) -> set[type]:
        monkeypatch.setattr("lightning_amp.data.loading.datamodule.FEW_ENTRIES", few)
        monkeypatch.setattr("lightning_amp.data.loading.datamodule.MANY_FEATURES", many)
        data.trainer = SimpleNamespace(lightning_module=model, **given)  # type: ignore[assignment]
        return kinds(data)

    glue, own = GLUE(), pl.LightningModule()
    assert kinds(data) == {Tensor}, "without a trainer nobody says that it takes them"
    assert auto(glue, dense, table.n_features - 1) == {SparseCounts}
    assert auto(glue, dense, table.n_features) == {Tensor}
    assert auto(glue, dense * 0.99, table.n_features - 1) == {Tensor}
    assert auto(own, dense, table.n_features - 1) == {Tensor}
    # of these every rank would have another share, and only a tensor can be a part of a sharded one
    table.columns = slice(0, table.n_features // 2)
    assert auto(glue, dense, table.n_features - 1) == {Tensor}


def test_other_uses_are_refused(root: Path) -> None:
    dense = counts()
    x = SparseCounts.from_dense(dense)
    for key in (3, torch.tensor([1]), (slice(1, 3), slice(None)), (..., slice(None), 1)):
        with pytest.raises(DataError, match=r"allowed are x\[a:b\] for cells"):
            x[key]
    with pytest.raises(DataError, match="allowed are steps of 1"):
        x[..., slice(9, 2, -1)]
    for index in ([0, 0], [FEATURES], [-1]):
        with pytest.raises(DataError, match=r"53 features were indexed with .* outside of 0\.\.52 or"):
            x[..., torch.tensor(index)]
    uses = {"add": lambda: x + dense, "lgamma": lambda: torch.lgamma(x), "conv1d": lambda: F.conv1d(x, dense)}
    for name, use in uses.items():
        with pytest.raises(DataError, match=f"torch's '{name}', which needs a dense matrix"):
            use()
    with pytest.raises(DataError, match=r"53 features were given to a layer whose weight has the shape \(2"):
        nn.Linear(9, 2)(x)
    with pytest.raises(DataError, match="the gradient of sparse counts is not computed"):
        nn.Linear(FEATURES, 2).double()(x.with_values(x.value.clone().requires_grad_()))
    model = Sparse(Case())
    with pytest.raises(ModelError, match="got x with 61 columns, but its strata have 62"):
        model.decoder(model.u, model.v, **model.batch | {"x": model.batch["x"][:, 1:]})


def test_other_data_are_refused(root: Path) -> None:
    x = SparseCounts.from_dense(counts())
    with pytest.raises(DataError, match="give three equally long vectors"):
        SparseCounts(x.row[1:], x.column, x.value, x.shape)
    wrong = (
        SparseCounts(x.row.flip(0), x.column.flip(0), x.value, x.shape),
        SparseCounts(x.row[[0, 0]], x.column[[0, 0]], x.value[[0, 0]], x.shape),
        SparseCounts(x.row, x.column, x.value, (CELLS, 5)),
        SparseCounts(x.row - CELLS, x.column, x.value, x.shape),
    )
    for found in wrong:
        with pytest.raises(DataError, match="has entries out of order, repeated, or outside of the matrix"):
            found[:, :2]
    with pytest.raises(DataError, match=r"sparse='yes' is not supported; allowed are True, False and 'auto'"):
        SingleCellDataModule(root, sparse="yes")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"sparse=True is for 'hic'; loaded are \['rna'\]"):
        module(root, sparse=True, modalities=["rna"])
    # an entry is not zero
    value = x.value.clone()
    value[2:4] = 0
    with pytest.raises(DataError, match="has 2 entries whose count is 0"):
        SparseCounts(x.row, x.column, value, x.shape)[:, 1:4]
    stored = sparse.csr_matrix((value, (x.row, x.column)), shape=x.shape)
    assert (SparseCounts.from_csr(stored).value != 0).all()
