"""Weight a rank's mean loss in proportion to its cells, so that unequal ranks stay exact.

w_r = n_r R / sum n,        (1 / R) sum_r w_r L_r = mean loss over the union of the ranks' batches
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import Work, all_reduce
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.batch import parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.techniques.ranks.collectives import wait_in_all_reduce


def count_cells(batch: object) -> int | None:
    """Cells in a batch.

    The first axis of every tensor is the cell, as Lightning has it for logging; scalars, and anything but
    tensors, sparse counts, mappings, lists, tuples and dataclasses, are passed over. In a batch {modality: mapping} the
    modalities' counts are the answer when they agree, else their sum.

    Returns:
        None where no tensor is found, or tensors disagree on their first axis.
    """
    if isinstance(batch, Mapping) and batch and all(isinstance(part, Mapping) for part in batch.values()):
        counts = [_one_size(part) for part in batch.values()]
        known = [n for n in counts if n is not None]
        if len(known) < len(counts):
            return None
        return known[0] if len(set(known)) == 1 else sum(known)
    return _one_size(batch)


def _one_size(batch: object) -> int | None:
    sizes = _sizes(batch)
    return sizes.pop() if len(sizes) == 1 else None


def _sizes(batch: object) -> set[int]:
    # not its shape: nested tensors have none
    tensors = {part.size(0) for part in parts_in(batch) if isinstance(part, Tensor) and part.dim()}
    return tensors | {len(part) for part in parts_in(batch) if isinstance(part, SparseCounts)}


class CellWeight:
    """The weight of this rank's loss in the current training step, agreed on during the step's forward."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Weigh over the ranks of `mesh`, the data axis; a mesh can be deep-copied, a process group cannot."""
        self._mesh = mesh
        self._device = device
        self._cells: int | None = None
        self._counts = torch.empty(0)
        self._travelling: Work | None = None
        self._weight = 1.0
        self._warned = False

    def start(self, batch: object) -> None:
        """A new training step begins: a collective, which is not waited for before the weight is requested."""
        if self._mesh.size() > 1:
            # a step without a backward pass, such as one that returns None, has not asked
            self.value()
            n = self._cells = count_cells(batch)
            self._counts = torch.tensor([n or 0, n is None], dtype=torch.int64, device=self._device)
            self._travelling = all_reduce(self._counts, group=self._mesh.get_group(), async_op=True)

    def value(self) -> float:
        """The weight. Exactly 1.0 where ranks hold equally many."""
        if self._travelling is not None:
            wait_in_all_reduce(self._travelling)
            self._travelling, self._weight = None, self._of(self._cells)
        return self._weight

    def _of(self, n: int | None) -> float:
        total, unknown = self._counts.tolist()
        if unknown and not self._warned:
            self._warned = True
            rank_zero_warn(
                "The number of samples in the batch cannot be read from its tensors (none found, or their"
                " first axes differ), so gradients are averaged with every rank counted equally. This is"
                " exact only when all ranks have equally many samples in every step."
            )
        if unknown or n is None or not total:
            return 1.0
        return n * self._mesh.size() / int(total)
