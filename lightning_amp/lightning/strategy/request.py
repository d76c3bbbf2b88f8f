"""Define and check the options of the strategy, before any process is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from lightning_amp.errors import PlanError
from lightning_amp.footprint.find_blocks import check_entries
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import is_number, memory_of_ranks
from lightning_amp.techniques.fsdp.spec import FullyShard
from lightning_amp.techniques.pipeline.schedule.schedules import SCHEDULES
from lightning_amp.techniques.table import STRATEGIES, parse_strategies
from lightning_amp.techniques.tensor3d.row import OVERLAP, cache_bytes

CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "policy": ("auto", "paper"),
    "unfit": (None, "refuse", "train"),
    "balance_cells": (True, False, "auto"),
    "share_batch_statistics": (True, False),
    "save_distributed_checkpoint": (True, False),
    "check_finite": (True, False),
    "schedule": (None, *SCHEDULES),
    "rescue": (True, False),
    "fsdp_offload": (True, False),
    "device_speeds": (None, "measure"),
    "verbose": (True, False),
}

OPTIONS_OF = {
    "micro_batches": "pipeline",
    "schedule": "pipeline",
    "fsdp_ranks": "fsdp",
    "fsdp_offload": "fsdp",
    "sequence_dim": "sequence",
    "sequence_sizes": "sequence",
    "sequence_grid": "sequence",
    "tensor_grid": "tensor3d",
    "tensor_overlap": "tensor3d",
    "tensor_cache": "tensor3d",
}
"""Options that say how one strategy is done, which has to be named."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of AMPStrategy, where they are described.

    Raises:
        PlanError: A value outside what is allowed, or options that contradict each other.
    """

    policy: Literal["auto", "paper"] = "auto"
    plan: str | Path | Plan | None = None
    strategies: list[str] | str | None = None
    blocks: Sequence[type | str] | None = None
    device_memory: str | int | Sequence[str | int] | None = None
    unfit: Literal["refuse", "train"] | None = None
    rates: str | Path | None = None
    rescue: bool = False
    model_parallel_size: int | Literal["auto"] = "auto"
    data_dir: str | Path | None = None
    balance_cells: bool | Literal["auto"] = "auto"
    share_batch_statistics: bool = True
    save_distributed_checkpoint: bool = False
    bucket_mb: float = 25.0
    check_finite: bool = False
    lost_after: float = 60.0
    stuck_after: float = 1800.0
    micro_batches: int | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    fsdp_ranks: int | None = None
    fsdp_offload: bool = False
    device_speeds: Literal["measure"] | None = None
    sequence_dim: Mapping[str, int | Sequence[int]] | str = "auto"
    sequence_sizes: str | Sequence[int] = "even"
    sequence_grid: str = ""
    tensor_grid: tuple[int, int, int] | None = None
    tensor_overlap: Sequence[str] = tuple(OVERLAP.split(","))
    tensor_cache: str | int = "0B"
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        self._check_numbers()
        self._check_overlap()
        self._check_plan()
        self._check_grid()
        if self.blocks is not None:
            check_entries(self.blocks)
        for name, what in (
            ("rates", "of a file that `lightning-amp calibrate` wrote"),
            ("data_dir", "of a data directory"),
        ):
            path = getattr(self, name)
            if path is not None and (not isinstance(path, str | Path) or not str(path)):
                raise PlanError(f"{name}={path!r} is not supported; allowed is the path {what}, or None")
        if self.device_memory is not None:
            # as text, for a person who writes 8 means no bytes
            sizes = self.device_memory
            memory_of_ranks([str(n) for n in sizes] if isinstance(sizes, list | tuple) else str(sizes))

    @property
    def if_unfit(self) -> str:
        """What becomes of a plan that is predicted not to fit: "refuse" or "train"."""
        return self.unfit or ("train" if self.device_memory is None else "refuse")

    @property
    def chooses(self) -> bool:
        """Whether policy "auto" is to choose a plan."""
        return self.policy == "auto" and self.plan is None and self.strategies is None

    @property
    def may_change_decoders(self) -> bool:
        """Whether a technique of decoders may be in the plan: not where others alone are named."""
        return self.strategies is None or any(
            STRATEGIES[name].choice for name in parse_strategies(self.strategies)
        )

    @property
    def sharding(self) -> FullyShard | None:
        """How fsdp is to split where it was requested; None leaves it to the policy."""
        if self.strategies is None or "fsdp" not in parse_strategies(self.strategies):
            return None
        return FullyShard(shard_ranks=self.fsdp_ranks, offload=self.fsdp_offload)

    def data_dir_or(self, data: object) -> str | Path | None:
        """The data directory that was requested, else the data module's; None without either."""
        found: str | Path | None = getattr(data, "data_dir", None)
        return found if self.data_dir is None else self.data_dir

    def _check_numbers(self) -> None:
        size = self.model_parallel_size
        if size != "auto" and not (type(size) is int and size >= 1):
            raise PlanError(
                f"model_parallel_size={size!r} is not supported; allowed are 'auto' and a whole number of ranks, 1"
                " or more"
            )
        for name, least in (("micro_batches", 1), ("fsdp_ranks", 2)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value >= least):
                raise PlanError(
                    f"{name}={value!r} is not supported; allowed is a whole number, {least} or more, or None"
                )
        if not (is_number(self.bucket_mb) and 0 < self.bucket_mb < inf):
            raise PlanError(
                f"bucket_mb={self.bucket_mb!r} is not supported; allowed is a number of MiB above 0"
            )
        for name in ("lost_after", "stuck_after"):
            value = getattr(self, name)
            if not (is_number(value) and value > 0):
                raise PlanError(
                    f"{name}={value!r} is not supported; allowed is a number of seconds above 0, .inf for never"
                )

    def _check_grid(self) -> None:
        """Two axes of a grid are the model axis."""
        grid = self.tensor_grid
        if grid is None:
            return
        if not (
            isinstance(grid, tuple | list) and len(grid) == 3 and all(type(n) is int and n > 0 for n in grid)
        ):
            raise PlanError(
                f"tensor_grid={grid!r} was given; allowed are three whole numbers of ranks, as (2, 1, 2)"
            )
        # a sample that z splits is one of all ranks of the grid
        ranks = grid[0] * grid[1] * (1 if self.sequence_dim == "auto" else grid[2])
        if self.model_parallel_size not in ("auto", ranks):
            raise PlanError(
                f"model_parallel_size={self.model_parallel_size!r} was given with tensor_grid={tuple(grid)!r}, of which"
                f" it is {ranks}; leave model_parallel_size out"
            )
        object.__setattr__(self, "model_parallel_size", ranks)

    def _check_overlap(self) -> None:
        names, allowed = self.tensor_overlap, OVERLAP.split(",")
        if not isinstance(names, tuple | list) or any(name not in allowed for name in names):
            raise PlanError(
                f"tensor_overlap={names!r} was given; allowed are none or some of {', '.join(map(repr, allowed))}, as"
                " a tuple"
            )
        # a command line has lists
        object.__setattr__(self, "tensor_overlap", tuple(names))
        cache_bytes(self.tensor_cache)

    def _check_plan(self) -> None:
        chosen = () if self.strategies is None else parse_strategies(self.strategies)
        for name, of in OPTIONS_OF.items():
            others = ("tensor3d",) if name == "sequence_dim" else ()
            if getattr(self, name) != getattr(Request, name) and not {of, *others} & {*chosen}:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} is an option of {of}; add strategies={of!r}, or leave"
                    " it out"
                )
        if self.plan is None:
            return
        decided = {"policy": self.policy, "model_parallel_size": str(self.model_parallel_size)}
        beside = {name: value for name, value in decided.items() if value != "auto"}
        if beside:
            raise PlanError(
                f"plan={self.plan!r} cannot be used with {beside!r}, which a plan decides; leave one of the"
                " two out"
            )
        if not isinstance(self.plan, str | Path | Plan):
            raise PlanError(
                f"plan={self.plan!r} is not supported; allowed are a Plan and the path of one written as JSON"
            )
        if self.strategies is not None:
            raise PlanError(
                f"plan={self.plan!r} and strategies={self.strategies!r} cannot be used together; a plan"
                " names its strategies. Give one of the two"
            )


def one_of(name: str, value: object, allowed: tuple[str | bool | None, ...]) -> None:
    """Refuse any other value with a PlanError; 1 and 0 do not pass for True and False."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise PlanError(f"{name}={value!r} is not supported; allowed are {', '.join(map(repr, allowed))}")
