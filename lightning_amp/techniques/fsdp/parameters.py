"""Collect the parameters that `fully_shard` has sharded, and run the collectives of its units.

A unit has two collectives: an all-gather of parameters and a reduce-scatter of gradients. gloo has no reduce-scatter
(sharding/collectives.py has one).

Legend: R ranks, n elements of a rank's shard.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_amp.sharding.collectives import ALL_GATHER, REDUCE_SCATTER, start_adding_rows
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, is_split
from lightning_amp.techniques.ranks.collectives import Agreement
from lightning_amp.techniques.ranks.shards import Runs

Place = tuple[nn.Module, str, nn.Parameter]
"""Module, name in the module, and full parameter."""


def split_units(module: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh, *, offload: bool) -> None:
    """Shard the parameters of the units of a module with torch, the root's last; full ones stay where they were."""
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    undivided = {parameter for parameter in module.parameters() if not parameter.dim()}
    for unit in units:
        before = [(parameter, parameter.data) for parameter in unit.parameters() if not is_split(parameter)]
        fully_shard(unit, mesh=mesh, offload_policy=policy, ignored_params=undivided)
        # torch has moved full parameters to the device, which may not have room for those of all units
        for parameter, data in before:
            parameter.data = data


def shards_of(places: Iterable[Place], mesh: DeviceMesh) -> Iterator[ShardedParameter]:
    """Yield the sharded parameters, without duplicates; the full ones lose their values until `restore`."""
    seen: set[int] = set()
    for module, name, whole in places:
        if id(whole) in seen:
            continue
        seen.add(id(whole))
        shard = module._parameters[name]
        assert shard is not None, "fully_shard has split it"
        # attributes that configure_optimizers may read
        vars(shard).update({key: value for key, value in vars(whole).items() if key != "_fsdp_orig_uid"})
        parts = Runs(mesh=mesh, n=len(whole), dim=0)
        parameter = ShardedParameter(
            whole=whole, shard=shard, module=module, name=name, parts=parts, version=shard._version
        )
        parameter.drop()
        yield parameter


class ReachedParameters:
    """Track which of a unit's parameters a backward pass has reached on this rank, and writes into gathered ones.

    Args:
        unit: The module.
        taken: `id` of parameters of other units; those of this unit are added.
    """

    def __init__(self, unit: nn.Module, taken: set[int]) -> None:
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._watched: set[int] = set()
        self._reached: set[str] = set()
        self._written: dict[str, tuple[Tensor, int]] = {}
        for fqn, child in unit.named_modules():
            for name, parameter in child._parameters.items():
                if parameter is not None and parameter.dim() and id(parameter) not in taken:
                    taken.add(id(parameter))
                    self._places[f"{fqn}.{name}" if fqn else name] = child, name

    def gathered(self, *_: object) -> None:
        """Called after the unit has gathered its parameters, which are the same objects each time."""
        for label, (child, name) in self._places.items():
            parameter = child._parameters[name]
            if parameter is None:
                continue
            self._written[label] = parameter, parameter._version
            # a parameter that a callback unfreezes later gets its hook then, because torch keeps the object
            if not parameter.requires_grad or id(parameter) in self._watched:
                continue
            if torch.is_grad_enabled():
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(partial(self._mark, label))  # type: ignore[no-untyped-call]

    def written(self) -> list[str]:
        """Names of the gathered parameters that were changed in place since they were gathered."""
        return [label for label, (p, version) in self._written.items() if p._version != version]

    def has_gradients(self) -> bool:
        """Whether gathered parameters of the unit have gradients that are not reduced."""
        held = (child._parameters[name] for child, name in self._places.values())
        return any(p is not None and not is_split(p) and p.grad is not None and not is_split(p.grad) for p in held)

    def take(self) -> list[str]:
        """Return the names of reached parameters since the last call."""
        reached, self._reached = sorted(self._reached), set()
        return reached

    def _mark(self, label: str, _: Tensor) -> None:
        self._reached.add(label)


class _Comm:
    """Collective of one unit, `fqn`; torch asks it to allocate memory, and calls it."""

    def __init__(self, fqn: str, agreement: Agreement) -> None:
        self._fqn, self._agreement = fqn, agreement

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a send or receive buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Comm):
    """All-gather every rank's shard of the parameters [n] to the full ones [R n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the parameters; raises a ModelError if another rank gathers another unit."""
        self._agreement.on(f"gathers the parameters of {self._fqn!r}")
        work: dist.Work | None = ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class AddUp(_Comm):
    """Reduce-scatter gradients: sum or mean over the ranks of [R n], of which each rank gets its shard [n].

    Args:
        fqn, agreement: As above.
        reached: Returns the names of the parameters that the backward pass has reached since the last call.
    """

    def __init__(self, fqn: str, agreement: Agreement, reached: Callable[[], list[str]]) -> None:
        super().__init__(fqn, agreement)
        self._reached = reached

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce the gradients; raises a ModelError if another rank has gradients of other parameters."""
        # torch omits gradients that are None: ranks that have reached different parameters would send different sizes
        self._agreement.on(f"adds up the gradients of {self._reached()!r} in {self._fqn!r}")
        if dist.get_backend(group) != "gloo":
            work: dist.Work | None = REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            return work
        start_adding_rows(input_tensor.view(group.size(), -1), group, out=output_tensor)()
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
