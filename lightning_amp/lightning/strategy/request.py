"""Define and check the options of the strategy, before any process is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from lightning_amp.costs.ordered_runs import speeds_of_ranks
from lightning_amp.costs.rule import Spec
from lightning_amp.errors import PlanError
from lightning_amp.footprint.find_blocks import check_entries
from lightning_amp.lightning._compat import rank_zero_deprecation
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import is_number, memory_of_ranks
from lightning_amp.techniques.host_memory.limit import host_memory_of
from lightning_amp.techniques.option_checks import one_of
from lightning_amp.techniques.table import STRATEGIES, options_of_techniques, parse_strategies, requested_specs
from lightning_amp.techniques.tensor3d.row import OVERLAP

OF_POLICY = ("host_memory",)
"""Options of techniques that bound what policy "auto" may choose, too."""
NEW_NAMES = {"refuse": "refuse", "train": "warn"}
"""Values of the deprecated option `unfit`, and those of `on_predicted_oom` that replace them."""
CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "policy": ("auto", "paper"),
    "on_predicted_oom": (None, "refuse", "warn"),
    "unfit": (None, *NEW_NAMES),
    "balance_cells": (True, False, "auto"),
    "share_batch_statistics": (True, False),
    "save_distributed_checkpoint": (True, False),
    "check_finite": (True, False),
    "rescue": (True, False),
    "compile": ("auto", True, False),
    "verbose": (True, False),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of AMPStrategy, which documents them.

    Raises:
        PlanError: A value is not allowed, or options contradict each other.
    """

    policy: Literal["auto", "paper"] = "auto"
    plan: str | Path | Plan | None = None
    strategies: list[str] | str | None = None
    blocks: Sequence[type | str] | None = None
    device_memory: str | int | Sequence[str | int] | None = None
    on_predicted_oom: Literal["refuse", "warn"] | None = None
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
    chunk_queries: int | None = None
    chunk_policy: Literal["auto", "paper"] = "auto"
    host_memory: str | int | None = None
    device_speeds: Literal["measure"] | Sequence[float] | None = None
    sequence_dim: Mapping[str, int | Sequence[int]] | str = "auto"
    sequence_sizes: str | Sequence[int] = "even"
    sequence_grid: str = ""
    tensor_grid: tuple[int, int, int] | None = None
    tensor_overlap: Sequence[str] = tuple(OVERLAP.split(","))
    tensor_cache: str | int = "0B"
    compile: Literal["auto"] | bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        if self.unfit is not None:
            self._rename_unfit(self.unfit)
        self._check_numbers()
        self._check_plan()
        self._check_options()
        if self.blocks is not None:
            check_entries(self.blocks)
        for name, what in (
            ("rates", "of a file that `lightning-amp calibrate` wrote"),
            ("data_dir", "of a data directory"),
        ):
            path = getattr(self, name)
            if path is not None and (not isinstance(path, str | Path) or not str(path)):
                raise PlanError(f"{name}={path!r} is not supported; allowed is the path {what}, or None")
        if self.device_speeds not in (None, "measure"):
            speeds_of_ranks(self.device_speeds)
        if self.device_memory is not None:
            # as text, which requires a unit: a user who writes 8 does not mean 8 bytes
            sizes = self.device_memory
            memory_of_ranks([str(n) for n in sizes] if isinstance(sizes, list | tuple) else str(sizes))

    @property
    def refuses(self) -> bool:
        """Whether a plan that is predicted to run out of memory is refused; else it trains with a warning."""
        return self.on_predicted_oom == "refuse" or (self.on_predicted_oom is None and self.device_memory is not None)

    @property
    def chooses(self) -> bool:
        """Whether policy "auto" chooses the plan."""
        return self.policy == "auto" and self.plan is None and self.strategies is None

    @property
    def given_plan(self) -> Plan | None:
        """The requested plan, which is read if it is a file; None makes a plan."""
        return self.plan if self.plan is None or isinstance(self.plan, Plan) else Plan.read(self.plan)

    @property
    def may_change_decoders(self) -> bool:
        """Whether the plan may contain a technique of decoders; False if only other techniques are requested."""
        return self.strategies is None or any(STRATEGIES[name].choice for name in parse_strategies(self.strategies))

    @property
    def specs(self) -> dict[str, Spec]:
        """Specs of the requested strategies that have options, by strategy."""
        return requested_specs(() if self.strategies is None else parse_strategies(self.strategies), self)

    def data_dir_or(self, data: object) -> str | Path | None:
        """Return the requested data directory, else that of the data module; None without either."""
        found: str | Path | None = getattr(data, "data_dir", None)
        return found if self.data_dir is None else self.data_dir

    def _rename_unfit(self, unfit: str) -> None:
        """Take the deprecated option as `on_predicted_oom`."""
        new = NEW_NAMES[unfit]
        if self.on_predicted_oom not in (None, new):
            raise PlanError(
                f"unfit={unfit!r} and on_predicted_oom={self.on_predicted_oom!r} cannot be used together; leave unfit"
                " out, which is the old name"
            )
        # shown at the line that calls AMPStrategy
        rank_zero_deprecation(f"unfit={unfit!r} is deprecated: use on_predicted_oom={new!r}", stacklevel=9)
        object.__setattr__(self, "on_predicted_oom", new)
        # a copy of the request does not warn again
        object.__setattr__(self, "unfit", None)

    def _check_numbers(self) -> None:
        size = self.model_parallel_size
        if size != "auto" and not (type(size) is int and size >= 1):
            raise PlanError(
                f"model_parallel_size={size!r} is not supported; allowed are 'auto' and a whole number of ranks, 1"
                " or more"
            )
        if not (is_number(self.bucket_mb) and 0 < self.bucket_mb < inf):
            raise PlanError(f"bucket_mb={self.bucket_mb!r} is not supported; allowed is a number of MiB above 0")
        for name in ("lost_after", "stuck_after"):
            value = getattr(self, name)
            if not (is_number(value) and value > 0):
                raise PlanError(
                    f"{name}={value!r} is not supported; allowed is a number of seconds above 0, .inf for never"
                )

    def _check_options(self) -> None:
        """Check that options belong to a requested technique and have allowed values."""
        chosen = () if self.strategies is None else parse_strategies(self.strategies)
        for name, owners in options_of_techniques().items():
            value = getattr(self, name)
            # options from the command line are lists
            given = (tuple(value) if isinstance(value, list) else value) != getattr(Request, name)
            if given and not {*owners} & {*chosen} and not (name in OF_POLICY and self.chooses):
                raise PlanError(
                    f"{name}={value!r} is an option of {' and '.join(owners)}; add strategies={owners[0]!r}, or leave"
                    " it out"
                )
        host_memory_of(self)
        for spec in self.specs.values():
            # a given grid decides the size of the model axis
            if getattr(spec, "grid", "") and (ranks := getattr(spec, "model_ranks", None)):
                object.__setattr__(self, "model_parallel_size", ranks)

    def _check_plan(self) -> None:
        if self.plan is None:
            return
        decided = {"policy": self.policy, "model_parallel_size": str(self.model_parallel_size)}
        others = {name: value for name, value in decided.items() if value != "auto"}
        if others:
            raise PlanError(
                f"plan={self.plan!r} cannot be used with {others!r}, which a plan decides; leave one of the two out"
            )
        if self.compile is not False:
            raise PlanError(
                f"plan={self.plan!r} and compile={self.compile!r} cannot be used together; a plan names the blocks that"
                " it compiles. Leave one of the two out"
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
