"""Sample the cells of each rank and step; define the loader, which can resume mid-epoch.

Training repeats the shorter modalities, so that every global batch is full and equal on all ranks. The global
batch of a step is a function of (seed, epoch, step) and its size only: 2 ranks of 8 cells see the 16 cells
that 1 rank of 16 sees. Evaluation takes every cell once, in file order.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from lightning_amp.data.batch import Batch, hash_integers, hash_text
from lightning_amp.data.loading.dataset import MultiModalDataset, StepIndices
from lightning_amp.errors import DataError

CellRowsOf = Mapping[str, NDArray[np.int64]]
PAIRS = "pairs"
"""Name of the order of paired cells, which is the same in all modalities."""


# Lightning does not replace a DistributedSampler, nor, with `overfit_batches`, a SequentialSampler: StepSampler is
# both.
class StepSampler(DistributedSampler[StepIndices], SequentialSampler):
    """Yields the steps of one rank in one epoch.

    With `cycle` (training), the largest modality sets the length of an epoch. Every modality is repeated until
    all steps are full, and permuted again for each pass. Without `cycle` (evaluation), every cell comes once, in
    the order of `cells`; each global batch is split as evenly as possible; a modality without cells left is missing
    from the step; random draws depend on the cell only. All ranks have the same number of steps, and the same
    modalities in each step: a rank that would get no cell gets the last cell of the batch again, listed in `repeated`.
    """

    def __init__(
        self,
        contacts: Mapping[str, NDArray[np.float64]],  # modality -> contacts of every cell of its file, [cell]
        batch_size: int,  # cells per modality, rank and step
        *,
        num_replicas: int = 1,  # ranks that share a global batch
        rank: int = 0,
        seed: int = 0,  # of the permutations; must be the same on every rank
        shuffle: bool = True,  # permute (with `cycle` only)
        balance: bool = False,  # give the ranks equal contacts, not only equally many cells (with `cycle` only)
        cycle: bool = True,
        cells: CellRowsOf | None = None,  # modality -> rows to take, by default all
        paired: bool = False,  # the rows at one place of `cells` are one cell, and stay together (with `cycle` only)
    ) -> None:
        self.contacts = dict(contacts)
        self.cells = dict(cells) if cells is not None else {m: np.arange(len(c)) for m, c in contacts.items()}
        empty = [modality for modality, rows in self.cells.items() if len(rows) == 0]
        if empty or not self.cells:
            raise DataError(
                f"modalities without cells: {empty!r} of {list(self.cells)!r}; drop them with modalities=..."
            )
        if paired and len(set(map(len, self.cells.values()))) > 1:
            numbers = {modality: len(rows) for modality, rows in self.cells.items()}
            raise DataError(f"paired cells: the modalities have {numbers!r} cells; give the same cells of each")
        self.batch_size, self.balance, self.cycle, self.paired = batch_size, balance, cycle, paired
        self.global_batch = batch_size * num_replicas
        n_steps = -(-max(map(len, self.cells.values())) // self.global_batch)
        super().__init__(
            # a DistributedSampler has as many items as its data set, divided by the ranks: here these are steps
            range(n_steps * num_replicas),  # type: ignore[arg-type]
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
        )
        self._resume = (0, 0)

    def resume(self, *, epoch: int, step: int) -> None:
        """Start the next iteration at `step`, if it is an iteration of `epoch`."""
        self.epoch, self._resume = epoch, (epoch, step)

    def first_step(self) -> int:
        """Return the first step of an iteration that starts now."""
        epoch, step = self._resume
        return step if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[StepIndices]:  # type: ignore[override]
        first, self._resume = self.first_step(), (0, 0)
        # `_resume` has been reset: another iteration of the same epoch starts at step 0
        order = self._order() if self.cycle else self.cells
        for step in range(first, len(self)):
            batch = slice(step * self.global_batch, (step + 1) * self.global_batch)
            rows = self._shares({modality: cells[batch] for modality, cells in order.items()})
            # with fewer cells than ranks the first ranks have one each
            few = [name for name, cells in order.items() if len(cells[batch]) <= self.rank and not self.cycle]
            yield StepIndices(
                rows={modality: mine for modality, mine in rows.items() if len(mine)},
                draw_key=hash_integers(self.seed, self.epoch, step) if self.cycle else hash_integers(self.seed),
                repeated=few,
            )

    def _order(self) -> CellRowsOf:
        """Return the cells of this epoch for each modality, repeated to fill all global batches."""
        total = len(self) * self.global_batch
        order = {}
        for modality, cells in self.cells.items():
            passes = range(-(-total // len(cells)))
            # the number of ranks is not in the key: any number of them sees the same global batches
            name = PAIRS if self.paired else modality
            keys = [hash_integers(self.seed, self.epoch, hash_text(name), i) for i in passes]
            parts = [np.random.default_rng(key).permutation(cells) if self.shuffle else cells for key in keys]
            order[modality] = np.concatenate(parts)[:total]
        return order

    def _shares(self, batch: CellRowsOf) -> CellRowsOf:
        """Return this rank's cells of a global batch."""
        if self.paired and self.cycle and self.balance:
            # by the modality of the most contacts, on which memory depends
            by = max(batch, key=lambda modality: float(self.contacts[modality].sum()))
            mine = balance(self.contacts[by][batch[by]], self.num_replicas)[self.rank]
            return {modality: rows[mine] for modality, rows in batch.items()}
        return {modality: self._share(modality, rows) for modality, rows in batch.items()}

    def _share(self, modality: str, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(batch) == 0:
            return batch
        if not self.cycle:
            mine = np.array_split(batch, self.num_replicas)[self.rank]
            # a rank without cells would skip the step, and the others would wait for it
            return mine if len(mine) else batch[-1:]
        if self.balance:
            return batch[balance(self.contacts[modality][batch], self.num_replicas)[self.rank]]
        return batch[self.rank :: self.num_replicas]


class StepLoader(DataLoader[Batch]):
    """A training loader that Lightning saves and restores in mid-epoch.

    It counts the batches returned, not those that workers have prepared. Iteration starts with the first
    `next`: Lightning makes the iterator before it sets the sampler's epoch.
    """

    def __init__(self, dataset: MultiModalDataset, sampler: StepSampler, **options: Any) -> None:
        """Load the sampler's steps; options are torch's, such as num_workers."""
        super().__init__(dataset, batch_size=None, sampler=sampler, **options)
        self.steps = sampler
        self._position = (0, 0)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # both are read at the first `next`, before the sampler's iterator resets `_resume`
        epoch, step = self.steps.epoch, self.steps.first_step()
        self._position = (epoch, step)
        for batch in super().__iter__():
            # counted before `yield`: a checkpoint that is written during the step has the batch as seen
            step += 1
            self._position = (epoch, step)
            yield batch

    def amp_example_batch(self) -> Batch:
        """Return the batch of the first step; the position does not change."""
        first: Batch = self.dataset[next(iter(copy(self.steps)))]
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out; an epoch's end is the start of the next."""
        epoch, step = self._position
        # Lightning stores the epoch that it resumes with. If `limit_train_batches` has ended an epoch early, the
        # position is one in the old epoch, and `first_step` ignores it because the sampler's epoch has changed
        if step == len(self.steps):
            epoch, step = epoch + 1, 0
        return {"epoch": epoch, "step": step, "global_batch": self.steps.global_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, on any number of ranks with the same global batch."""
        epoch, step, saved = state_dict["epoch"], state_dict["step"], state_dict["global_batch"]
        if step and saved != self.steps.global_batch:
            raise DataError(
                f"the checkpoint was written in mid-epoch (epoch {epoch!r}, step {step!r}) with {saved!r} cells in"
                f" a global batch; this run has {self.steps.global_batch!r} ({self.steps.num_replicas!r} ranks x"
                f" {self.steps.batch_size!r} cells), so its steps differ; choose batch_size so that the"
                f" product is {saved!r}, or resume from a checkpoint at the end of an epoch"
            )
        self.steps.resume(epoch=epoch, step=step)
        self._position = (epoch, step)


def balance(contacts: NDArray[np.float64], n_ranks: int) -> list[NDArray[np.int64]]:
    """Divide cells among ranks: equally many cells on each and, greedily, equal sums of contacts.

    Cells are assigned by descending contacts, each to the rank with the fewest contacts that still has room. Then cells
    are swapped between the ranks with the most and the fewest contacts while that reduces the difference. The result is
    deterministic; ties go to the lower rank. Returns the positions of each rank's cells, ascending.
    """
    room = len(contacts) // n_ranks
    assert room * n_ranks == len(contacts), f"{len(contacts)} cells do not divide among {n_ranks} ranks"
    members: list[list[int]] = [[] for _ in range(n_ranks)]
    sums = np.zeros(n_ranks)
    # cells with many contacts first: those with few contacts even out the sums
    for cell in np.argsort(-contacts, kind="stable"):
        rank = int(np.argmin([s if len(m) < room else np.inf for s, m in zip(sums, members, strict=True)]))
        members[rank].append(int(cell))
        sums[rank] += contacts[cell]
    parts = np.array(members, dtype=np.int64)
    # Each swap, of the pair of cells that best evens out the richest and the poorest rank, shrinks their spread; a few
    # per rank take nearly all there is to gain.
    for _ in range(4 * n_ranks):
        sums = contacts[parts].sum(axis=1)
        rich, poor = int(sums.argmax()), int(sums.argmin())
        # to swap two cells whose contacts differ by d changes the gap by 2 d: one rank has d less, the other d more
        gap = sums[rich] - sums[poor]
        moved = contacts[parts[rich]][:, None] - contacts[parts[poor]][None, :]
        i, j = np.unravel_index(np.abs(gap - 2 * moved).argmin(), moved.shape)
        if abs(gap - 2 * moved[i, j]) >= gap:
            break
        parts[rich, i], parts[poor, j] = parts[poor, j], parts[rich, i]
    return [np.sort(part) for part in parts]
