"""Split the parameters of a module over the data axis, as the rules of a plan say."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.rule import Rule
from lightning_amp.techniques.fsdp.fully_sharded import FullySharded
from lightning_amp.techniques.fsdp.row import FullyShard


def split_parameters(
    model: nn.Module, rules: Sequence[Rule], mesh: DeviceMesh, groups_of: Callable[[int], DeviceMesh]
) -> FullySharded:
    """Split parameters over the ranks that average gradients, or within groups of them; `undo` makes them whole.

    Args:
        model: Whole, equal on all ranks.
        rules: Of fsdp, all with the same spec.
        mesh: The ranks that average gradients.
        groups_of: That mesh with groups of so many ranks; all ranks call it.

    Raises:
        InstallError: Something in the model cannot be split.
    """
    spec = rules[0].spec
    assert isinstance(spec, FullyShard), "rules of fsdp have this spec"
    n = spec.shard_ranks or mesh.size()
    groups = groups_of(n) if n < mesh.size() else None
    return FullySharded(model, [rule.fqn for rule in rules], mesh, groups=groups, offload=spec.offload)
