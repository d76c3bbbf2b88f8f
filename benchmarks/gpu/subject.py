"""What most parts run steps of: a decoder, a batch and an optimiser on a device, with techniques installed.

Cells are made in memory: a decoder's batch, and a data module without files and the packages that read them.

Legend: cell (B), feature (F in all).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.decoders import Size
from benchmarks.gpu.device import Precision
from lightning_amp.costs.model_shape import DecoderShape, profile_of_module
from lightning_amp.data.files.graphml import Graph
from lightning_amp.data.files.strata_layout import FeatureLayout, StratumLayout
from lightning_amp.data.loading.datamodule import HIC, SingleCellDataModule
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.simulation.models_without_values import DecoderAlone, decoder_subject
from lightning_amp.techniques.rates_of import rates_of

EAGER = ("S1",)
OURS = ("S1", "S4", "fused", "sparse", "stream")
Settings = Mapping[str, object]
"""Fields of specs, for every rule whose spec has them."""
NONZERO = 0.02
"""Share of the counts that are not zero."""
LATENT_SCALE = 0.1


def decoder_batch(shape: DecoderShape, cells: int, *, sparse: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What a decoder reads, in the host's memory, the same for the same sizes; latents need gradients."""
    n_features = sum(shape.features)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    # in the order of columns, each place once
    flat = np.unique(rng.integers(0, cells * n_features, max(1, int(NONZERO * cells * n_features))))
    row, column = (torch.from_numpy(part) for part in (flat % cells, flat // cells))
    value = (1 + column % 4).to(dtype)
    counts = SparseCounts(row, column, value, (cells, n_features))
    library = torch.ones(cells, dtype=dtype).index_add_(0, row, value)[:, None]
    u, v = (
        LATENT_SCALE * torch.randn(n, shape.dim, generator=generator, dtype=torch.float64)
        for n in (cells, shape.anchors)
    )
    return {
        "u": u.to(dtype).requires_grad_(),
        "v": v.to(dtype).requires_grad_(),
        "x": counts if sparse else counts.to_dense(),
        "library": library,
        "batch": torch.arange(cells) % shape.n_batches,
    }


def batch_bytes(shape: DecoderShape, cells: int, *, sparse: bool) -> int:
    """Bytes of about such a batch in float32: places of entries are two whole numbers of 8 bytes."""
    numbers = cells * sum(shape.features)
    counts = int(NONZERO * numbers) * (8 + 8 + 4) if sparse else 4 * numbers
    return counts + 4 * (cells + shape.anchors) * shape.dim + 12 * cells


def moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on a device; latents are leaves there."""

    def move(part: Tensor | SparseCounts) -> Tensor | SparseCounts:
        if isinstance(part, Tensor) and part.requires_grad:
            return part.detach().to(device).requires_grad_()
        return part.to(device)

    return {name: move(part) for name, part in batch.items()}


class _Table(CellTable):
    """Cells of one modality that were never in a file."""

    def __init__(self, modality: str, counts: sp.csr_matrix) -> None:
        self.modality, self.counts, self.columns = modality, counts, None
        self.n_cells, self.n_features = counts.shape
        self.contacts = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
        self.batch, self.n_batches = np.zeros(self.n_cells, dtype=np.int64), 1
        self.batch_names = np.array(["0"])

    def feature_names(self) -> list[str]:
        """Number the features."""
        return [str(i) for i in range(self.n_features)]


class CellsInMemory(SingleCellDataModule):
    """Hi-C and RNA cells of random counts, one chromosome of so many bins, and a graph that joins both.

    Args:
        cells: Of each modality.
        bins: Anchors N.
        strata: K.
        genes: Features of RNA.
        options: Of SingleCellDataModule, such as batch_size and num_workers.
    """

    def __init__(self, *, cells: int, bins: int, strata: int, genes: int, **options: Any) -> None:
        super().__init__(".", val_fraction=0.0, **options)
        # there is no directory to read a profile from
        self.data_dir = None  # type: ignore[assignment]
        rng, widths = np.random.default_rng(0), [bins - k for k in range(strata)]
        ends = np.cumsum(widths).tolist()
        found = tuple(
            StratumLayout(k=k, resolution=None, start=end - n, stop=end, anchors=np.arange(n))
            for k, (n, end) in enumerate(zip(widths, ends, strict=True))
        )
        self.layout = FeatureLayout(strata=found, anchor_names=_names("bin", bins))
        features = {HIC: ends[-1], "rna": genes}
        self.tables = {name: _Table(name, _counts(rng, cells, n)) for name, n in features.items()}
        self.graph = _graph(bins, genes)

    def vertices(self, modality: str) -> NDArray[np.int64]:
        """Anchors first, then genes."""
        bins = len(self.layout.anchor_names) if self.layout is not None else 0
        return np.arange(bins) if modality == HIC else bins + np.arange(self.tables[modality].n_features)


def _counts(rng: np.random.Generator, cells: int, features: int) -> sp.csr_matrix:
    flat = np.unique(rng.integers(0, cells * features, int(NONZERO * cells * features) + cells))
    row, column = np.divmod(flat, features)
    value = (1 + flat % 4).astype(np.float32)
    return sp.csr_matrix((value, (row, column)), shape=(cells, features))


def _graph(bins: int, genes: int) -> Graph:
    """Every vertex joined to itself, each gene to a bin."""
    n = bins + genes
    source = np.concatenate([np.arange(n), bins + np.arange(genes)])
    target = np.concatenate([np.arange(n), np.arange(genes) * bins // max(genes, 1)])
    ones = np.ones(len(source), dtype=np.float32)
    return Graph(vertices=_names("v", n), source=source, target=target, weight=ones, sign=ones)


def _names(kind: str, n: int) -> NDArray[np.str_]:
    return np.array([f"{kind}{i}" for i in range(n)])


def plan_of(
    shape: DecoderShape,
    strategies: tuple[str, ...] | None,
    *,
    cells: int,
    device: torch.device,
    sparse: bool = True,
    budget: int | None = None,
    settings: Settings | None = None,
) -> Plan:
    """What the library plans for a decoder by itself on one device.

    Args:
        strategies: Those named; None for the choice of policy "auto" within `budget` bytes.
        sparse: As for Subject; the prediction counts the batch.
        settings: Other forms of the techniques.
    """
    meta = decoder_subject(shape, batch_size=cells).module
    described = describe(meta, batch_size=cells, base_activation_bytes=batch_bytes(shape, cells, sparse=sparse))
    made = plan(
        profile_of_module(described),
        strategies=strategies,
        device_memory=budget,
        batch_size=cells,
        shape=described,
        rates=rates_of(device)[0],
    )
    return _with(made, settings or {})


def _with(made: Plan, settings: Settings) -> Plan:
    def changed(spec: Any) -> Any:
        own = {name: value for name, value in settings.items() if hasattr(spec, name)}
        return replace(spec, **own) if own else spec

    rules = tuple(replace(rule, spec=changed(rule.spec)) for rule in made.rules)
    return replace(made, rules=rules, axes=Axes.of(made.strategies, (rule.spec for rule in rules)))


class Subject:
    """A decoder that trains.

    Args:
        size: The decoder and its cells.
        plan: What is installed, made by `plan_of`.
        precision: Of its numbers and products.
        sparse: Whether counts come by their entries, as the data module gives them where there are many features.

    Attributes:
        batch: What it reads.
    """

    def __init__(self, size: Size, plan: Plan, *, device: torch.device, precision: Precision, sparse: bool) -> None:
        shape = size.decoder()
        self._device, self._precision = device, precision
        self.batch = moved(decoder_batch(shape, size.cells, sparse=sparse, dtype=precision.dtype), device)
        torch.manual_seed(0)
        with device:
            self._module: Any = DecoderAlone(shape)
        install(self._module, plan)
        optimizers = self._module.configure_optimizers()
        self._module.optimizers = lambda: optimizers[0]
        self._module.manual_backward = torch.Tensor.backward
        self._optimizers = optimizers

    def step(self) -> None:
        """One training step: forward and backward pass, and the optimiser's."""
        for name in ("u", "v"):
            self.batch[name].grad = None
        with self._precision.computing(self._device):
            self._module.training_step(self.batch, 0)

    @property
    def held(self) -> list[Any]:
        """What there is before a step."""
        parameters = list(self._module.parameters())
        states = [dict(optimizer.state) for optimizer in self._optimizers]
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [parameters, list(self._module.buffers()), gradients, states, self.batch]
