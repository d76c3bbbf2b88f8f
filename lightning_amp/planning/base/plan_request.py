"""Define what a plan is asked for, checked and with the diagnosis of the data, before a step is counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.model_shape import LARGEST, ModelShape
from lightning_amp.diagnosis import Diagnosis, diagnose
from lightning_amp.errors import PlanError
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.table import parse_strategies

POLICIES = ("auto", "paper")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Inputs of a plan that needs no count of a step, as in `plan_request`.

    Attributes:
        budget: Bytes of the smallest device; None if they are not known.
        rates: Rates of one device, with the links between nodes.
        node_devices: Devices of a node; None if all are on one, also if the node is not full.
        strategies: Ids of the requested strategies; None leaves them to the policy.
    """

    diagnosis: Diagnosis
    shape: ModelShape
    devices: int
    budget: int | None
    rates: Rates
    model_parallel_size: int | str
    node_devices: int | None
    policy: str = "auto"
    strategies: tuple[str, ...] | None = None

    @property
    def chosen_by(self) -> str:
        """Who chooses the strategies: "auto", "paper", or "strategies" for the user."""
        return self.policy if self.strategies is None else "strategies"


def plan_request(
    profile: Profile,
    shape: ModelShape,
    *,
    devices: int = 1,
    device_memory: str | int | Sequence[str | int] | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = None,
    model_parallel_size: int | str = "auto",
    rates: Rates = CPU_CORE,
    node_devices: int | None = None,
) -> PlanRequest:
    """Check a request, and diagnose the data.

    Args:
        profile: The data.
        shape: The model, with the cells of a rank.
        devices: Number of ranks on all nodes together.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB"; None means unknown. From a
            list with one entry per device, the minimum is used.
        policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping.
        strategies: Strategies to use instead of the policy's choice; they are checked and predicted as well.
        model_parallel_size: Ranks of the model axis, or "auto".
        rates: Rates of one device, to predict times.
        node_devices: Devices of one node; the model axis stays inside a node unless `model_parallel_size` is larger.
            None means that all devices are on one node.

    Raises:
        PlanError: An argument is not allowed.
    """
    check_request(
        devices=devices,
        device_memory=device_memory,
        policy=policy,
        strategies=strategies,
        batch_size=shape.batch_size,
        model_parallel_size=model_parallel_size,
    )
    return PlanRequest(
        diagnosis=diagnose(profile),
        shape=shape,
        devices=devices,
        budget=None if device_memory is None else min(memory_of_ranks(device_memory, devices)),
        rates=rates.on_nodes_of(node_devices),
        model_parallel_size=model_parallel_size,
        # a node that is not full counts as a single node
        node_devices=None if node_devices is None or node_devices >= devices else node_devices,
        policy=policy,
        strategies=None if strategies is None else parse_strategies(strategies),
    )


def check_request(
    *,
    devices: int,
    device_memory: str | int | Sequence[str | int] | None,
    policy: str,
    strategies: str | list[str] | tuple[str, ...] | None,
    batch_size: int,
    model_parallel_size: int | str,
) -> None:
    """Raise an error for arguments of `plan_request` that are invalid for any data, before data are read.

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
