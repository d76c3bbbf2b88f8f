"""Install `fsdp`: shard a module's parameters by the rules of a plan."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.fsdp.fully_sharded import FullySharded
from lightning_amp.techniques.fsdp.row import FullyShard
from lightning_amp.techniques.host_memory.limit import free_bytes


def split_parameters(
    model: nn.Module, rules: Sequence[Rule], mesh: DeviceMesh, *, groups_of: Callable[[int], DeviceMesh], fitting: bool
) -> FullySharded:
    """Shard a model's parameters over the ranks that average gradients, or within groups, as `Units` describe it.

    All rules must have the same spec, and all ranks must call `groups_of`. `fitting` changes nothing.

    Raises:
        InstallError: As `FullySharded`; or the rows are to lie in host memory, and too little is free.
    """
    spec = rules[0].spec
    assert isinstance(spec, FullyShard), "rules of fsdp have this spec"
    # rows take the place of the parameters, which are on the host until they are split
    whole = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == "cpu")
    limit = free_bytes() + whole if spec.host_memory is None else spec.host_memory
    if spec.offload and spec.host_bytes > limit:
        raise InstallError(
            f"fsdp with fsdp_offload=True takes {format_bytes(spec.host_bytes)} of host memory on this rank, and may"
            f" have {format_bytes(limit)}; free memory of the host, or set host_memory= to plan within it"
        )
    n = spec.shard_ranks or mesh.size()
    groups = groups_of(n) if n < mesh.size() else None
    return FullySharded(model, [rule.fqn for rule in rules], mesh, groups=groups, offload=spec.offload)
