"""Weight each rank's loss by its samples (cells), or by its labels.

For n_r cells on rank r

    w_r = n_r R / sum n,        (1 / R) sum_r w_r L_r = mean loss over the union of the ranks' batches

A mean over labels is weighed by its labels instead, if the loss of every rank is one (uneven_means.py).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import Work, all_reduce
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.batch import parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.techniques.ranks.collectives import wait_in_all_reduce


def count_cells(batch: object) -> int | None:
    """Count the cells of a batch; None if it has no tensors, or their first dims differ.

    The first dim of every tensor is the cell, as in Lightning's logging. Scalars are skipped, and so are all objects
    except tensors, sparse counts, mappings, lists, tuples and dataclasses. For a batch {modality: mapping}, this is
    the number of cells per modality if they agree, else their sum.
    """
    counts = _cells_by_modality(batch)
    return None if counts is None else counts[0] if len(set(counts)) == 1 else sum(counts)


def cells_to_weigh(batch: object) -> int | None:
    """Sum the cells of all modalities: one definition on all ranks, also if modalities agree on some ranks only."""
    counts = _cells_by_modality(batch)
    return None if counts is None else sum(counts)


def _cells_by_modality(batch: object) -> list[int] | None:
    several = isinstance(batch, Mapping) and batch and all(isinstance(part, Mapping) for part in batch.values())
    sizes = [sizes_of(part) for part in (batch.values() if several else (batch,))]  # type: ignore[attr-defined]
    # modalities without tensors, such as names, are ignored; an empty one has no cells, so the number is not defined
    if several and not all(batch.values()):  # type: ignore[attr-defined]
        return None
    known = [found for found in sizes if found]
    return [n for (n,) in known] if known and all(len(found) == 1 for found in known) else None


def sizes_of(batch: object) -> set[int]:
    """Return the different lengths of first dims in a batch."""
    parts = list(parts_in(batch))
    # `size(0)`, because nested tensors have no shape
    sizes = {part.size(0) for part in parts if isinstance(part, Tensor) and part.dim()}
    return sizes | {len(part) for part in parts if isinstance(part, SparseCounts)}


OTHER_LOSS = (
    "The loss of a step is not the result of one cross-entropy on every rank, as it was in the first step: gradients of"
    " such steps are averaged by samples, no longer by the labels that count. They are those of the union of batches if"
    " equally many labels count in every sample"
)


class CellWeight:
    """The weight of this rank's loss in the present training step: by samples, or by the labels of a mean over labels.

    Attributes:
        expects_labels: Whether all ranks call `take_labels` in this step.
        no_labels: Whether no label of this rank counts, so that its loss is nan, but some of other ranks do.
        otherwise: Called once, if the loss of the first step that has one is no mean over labels on every rank.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Store the mesh of the data axis: a mesh can be deep-copied, a process group cannot."""
        self._mesh = mesh
        self._device = device
        self._cells = 0
        self._counts = torch.empty(0)
        self._travelling: Work | None = None
        self._weight = 1.0
        self._warned = False
        self._labels = torch.empty(0)
        self._labels_travelling: Work | None = None
        self._by_labels: bool | None = None
        self._warned, self._lost = False, 0.0
        self.expects_labels = self.no_labels = False
        self.otherwise: Callable[[], None] = lambda: None

    def start(self, batch: object, *, may_be_of_labels: bool = False) -> None:
        """Begin a training step: start a collective, which `value` waits for.

        Args:
            batch: The batch.
            may_be_of_labels: Whether every rank calls `take_labels` after its forward pass, if `expects_labels` is set.
        """
        if self._mesh.size() > 1:
            # a previous step without a backward pass has not waited for its collectives
            self._samples_weight()
            self._labels_weight()
            self.no_labels = False
            self.expects_labels = may_be_of_labels and self._by_labels is not False
            n = cells_to_weigh(batch)
            self._cells = n or 0
            self._counts = torch.tensor([self._cells, n is None], dtype=torch.int64, device=self._device)
            self._travelling = all_reduce(self._counts, group=self._mesh.get_group(), async_op=True)

    def take_labels(self, count: Tensor | None, *, lost: bool = False) -> None:
        """Start a collective with what the loss of this rank divides by, once in a step.

        Args:
            count: None if the loss is no mean over labels.
            lost: Whether this rank has run out of memory, so that the step will not end.
        """
        if not self.expects_labels:
            return
        self.expects_labels = False
        own = torch.zeros((), dtype=torch.float64, device=self._device) if count is None else count.to(self._device)
        self._labels = torch.stack([own, own, torch.full_like(own, count is None), torch.full_like(own, lost)])
        self._labels_travelling = all_reduce(self._labels[1:], group=self._mesh.get_group(), async_op=True)

    def value(self) -> float:
        """Return the weight; exactly 1.0 if all ranks have equally many cells, or labels."""
        if self._labels_travelling is not None:
            by_labels = self._labels_weight()
            if by_labels is not None:
                if self._travelling is not None:
                    wait_in_all_reduce(self._travelling)
                self._travelling, self._by_labels, self._weight = None, True, by_labels
                return by_labels
            if self._lost:
                return self._samples_weight()
            if self._by_labels is None:
                self._by_labels = False
                self.otherwise()
            elif not self._warned:
                self._warned = True
                rank_zero_warn(OTHER_LOSS)
        return self._samples_weight()

    def _labels_weight(self) -> float | None:
        """Wait for the labels of this step; return the weight by them, None if a rank's loss is no mean over labels."""
        if self._labels_travelling is None:
            return None
        wait_in_all_reduce(self._labels_travelling)
        self._labels_travelling = None
        own, total, others, self._lost = self._labels.tolist()
        if others:
            return None
        self.no_labels = own == 0 and total > 0
        # without any label the mean is nan on every rank, as that of their union is
        return own * self._mesh.size() / total if total else 1.0

    def _samples_weight(self) -> float:
        """Wait for the samples of this step; return the weight by them."""
        if self._travelling is None:
            return self._weight
        wait_in_all_reduce(self._travelling)
        self._travelling = None
        total, unknown = self._counts.tolist()
        if unknown and not self._warned:
            self._warned = True
            rank_zero_warn(
                "The number of samples in the batch cannot be read from its tensors (none found, or their"
                " first axes differ), so gradients are averaged with every rank counted equally. This is"
                " exact only when all ranks have equally many samples in every step."
            )
        self._weight = 1.0 if unknown or not total else self._cells * self._mesh.size() / total
        return self._weight
