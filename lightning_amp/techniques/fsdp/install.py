"""Install `fsdp`: shard a module's parameters by the rules of a plan."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.rule import Rule
from lightning_amp.techniques.fsdp.fully_sharded import FullySharded
from lightning_amp.techniques.fsdp.row import FullyShard


def split_parameters(
    model: nn.Module, rules: Sequence[Rule], mesh: DeviceMesh, *, groups_of: Callable[[int], DeviceMesh], fitting: bool
) -> FullySharded:
    """Shard a model's parameters over the ranks that average gradients, or within groups, as `Units` describe it.

    All rules must have the same spec, and all ranks must call `groups_of`. `fitting` changes nothing.

    Raises:
        InstallError: As `FullySharded`.
    """
    spec = rules[0].spec
    assert isinstance(spec, FullyShard), "rules of fsdp have this spec"
    n = spec.shard_ranks or mesh.size()
    groups = groups_of(n) if n < mesh.size() else None
    return FullySharded(model, [rule.fqn for rule in rules], mesh, groups=groups, offload=spec.offload)
