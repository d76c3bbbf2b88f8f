"""Define S1, data parallelism: its row in the table of techniques and the specs of its rules."""

from dataclasses import dataclass

from lightning_amp.techniques.technique import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel:
    """S1: every rank of the data axis trains on its share of the cells; gradients are averaged by cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBatchStatistics:
    """Batch normalisation over the cells of all ranks of the data axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceCells:
    """Every rank gets the same number of cells and nearly the same number of contacts in a step."""


ROW = Technique(
    title="data parallel",
    shrinks="cells per rank",
    beside_compiled=True,
    specs=(DataParallel, ShareBatchStatistics, BalanceCells),
    works_in_any_steps=True,
)
