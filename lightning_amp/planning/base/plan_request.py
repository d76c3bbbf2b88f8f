"""Define the request of a plan, the same for a fit, a plan without a run and closed forms, and check it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import LARGEST, ModelShape
from lightning_amp.costs.rule import Spec
from lightning_amp.diagnosis import Diagnosis, diagnose
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.table import parse_strategies

POLICIES = ("auto", "paper")


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What decides how a step is profiled.

    Attributes:
        requested: Requested specs, by technique.
        host_memory: Most bytes of host memory that the policy may take on a rank; None means any.
        host_room: Bytes of host memory that are free for a rank of a fit; None outside a fit.
        shared_statistics: Whether ranks share batch statistics.
    """

    requested: Mapping[str, Spec] = field(default_factory=dict)
    host_memory: int | None = None
    host_room: int | None = None
    shared_statistics: bool = False


NOTHING_REQUESTED = StepRequest()


@dataclass(frozen=True, kw_only=True)
class PlanRequest(StepRequest):
    """Everything that decides the plan of a step.

    Attributes:
        data: Profile of the data.
        shape: Structure and sizes of the module, with the batch length.
        rates: Rates of one device, and its links.
        devices: Ranks on all nodes together.
        node_devices: Ranks of one node, inside which the model axis stays unless `model_parallel_size` is larger; None
            means that all are on one.
        memory: Bytes of tensors on each device, one number if all have the same; empty if they are not known.
        memory_named: Whether the user set them; if not, requested techniques are applied as much as possible.
        policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping.
        strategies: Ids of the requested techniques; None leaves them to the policy.
        model_parallel_size: Ranks of the model axis, those of a requested grid; or "auto".
        micro_batches: Number of micro-batches of a pipeline; None leaves it open.
        speeds: Speeds of the ranks relative to the fastest; empty if they are equal.
        steps: Requested technique that replaces the module's steps, as `DrySteps`.
        compile: Whether blocks are compiled; "auto" if it pays within `steps_of_run`.
        steps_of_run: Training steps of the run, at most.
        notes: What the predictions leave out.
        check: Gets the plan of a decoder before its step is counted, and may raise; None accepts any.

    Raises:
        PlanError: An argument is not allowed.
    """

    data: Profile
    shape: ModelShape
    rates: Rates
    devices: int = 1
    node_devices: int | None = None
    memory: tuple[int, ...] = ()
    memory_named: bool = True
    policy: str = "auto"
    strategies: Sequence[str] | None = None
    model_parallel_size: int | str = "auto"
    micro_batches: int | None = None
    speeds: tuple[float, ...] = ()
    steps: Any = None
    compile: Literal["auto"] | bool = False
    steps_of_run: float = inf
    notes: tuple[str, ...] = ()
    check: Callable[[Plan], None] | None = None

    def __post_init__(self) -> None:
        batch_size, size = self.shape.batch_size, self.model_parallel_size
        check_request(devices=self.devices, policy=self.policy, batch_size=batch_size, model_parallel_size=size)

    @cached_property
    def budget(self) -> int | None:
        """Bytes of the smallest device; None if they are not known."""
        return min(self.memory, default=None)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Diagnosis of the data."""
        return diagnose(self.data)

    @property
    def node(self) -> int | None:
        """Ranks of one node if there are several nodes; a node that is not full counts as a single node."""
        return None if self.node_devices is None or self.node_devices >= self.devices else self.node_devices

    def less(self, n_bytes: int) -> "PlanRequest":
        """Return the request with so many bytes of tensors less on each device."""
        return replace(self, memory=tuple(max(1, n - n_bytes) for n in self.memory)) if n_bytes else self

    def split(self, name: str, steps: Any) -> "PlanRequest":
        """Return the request of a technique alone that replaces the module's steps by these."""
        return replace(self, strategies=("S1", name), model_parallel_size=steps.ranks, steps=steps)

    @property
    def chosen_by(self) -> str:
        """Who chooses the strategies: "auto", "paper", or "strategies" for the user."""
        return self.policy if self.strategies is None else "strategies"


def compile_option(option: Literal["auto"] | bool | None, *, chooses: bool) -> Literal["auto"] | bool:
    """Return the option `compile` of a request: "auto" compiles only where policy "auto" `chooses` all techniques."""
    return option or False if option != "auto" or chooses else False


def check_request(
    *,
    devices: int,
    policy: str,
    batch_size: int,
    model_parallel_size: int | str,
    device_memory: str | int | Sequence[str | int] | None = None,
    strategies: str | list[str] | tuple[str, ...] | None = None,
) -> None:
    """Raise an error for arguments that are invalid for any data, before data are read.

    Raises:
        PlanError: An argument is not allowed.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy={policy!r} is not supported; allowed are {', '.join(map(repr, POLICIES))}")
    for name, value in (("devices", devices), ("batch_size", batch_size)):
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise PlanError(f"{name}={value!r} is not supported; allowed is a whole number from 1 to {LARGEST:,}")
    if device_memory is not None:
        memory_of_ranks(device_memory)
    if strategies is not None:
        parse_strategies(strategies)
    if model_parallel_size != "auto" and (type(model_parallel_size) is not int or model_parallel_size < 1):
        raise PlanError(
            f'model_parallel_size={model_parallel_size!r} is not supported; allowed are "auto" or a whole number of 1'
            " or more that divides the devices"
        )
