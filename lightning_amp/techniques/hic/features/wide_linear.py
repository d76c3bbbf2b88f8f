"""S2: a Linear that reads all features, with the rows of its weight that belong to the own features on every rank.

    y = sum over ranks r of x[:, F^(r)] W[:, F^(r)]^T + bias

Exact up to the order of the sum. The shard of the weight, its gradient and its optimiser state exist on the owner
only; the bias is whole and has equal gradients on all ranks. Features are sharded in runs of ceil(F / R).

    collectives      forward                 backward
    always           1 all-reduce [B, h]     none: y is replicated
    x needs one                              1 all-gather of its gradient [B, F]

Kept for the backward pass: the own columns of x, [B, F / R], or of sparse counts their entries.

Legend: cell (B), feature (F), hidden (h), R ranks.
Known limits: in bf16 the ranks' products are rounded before they are added. The update of an optimiser must be
elementwise, for it sees only the shard (lightning/checkpoints/shards.py).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import InstallError
from lightning_amp.techniques.contract.change import Change, hooks_of, hooks_within
from lightning_amp.techniques.contract.sharded_parameter import shard_parameter
from lightning_amp.techniques.hic.features.row import RowParallelLinear
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.even_runs import Runs, join_runs, own_run


def share_rows(linear: nn.Module, spec: RowParallelLinear, mesh: DeviceMesh) -> Change:
    """Shard the input features of a linear layer over the model axis.

    Raises:
        InstallError: Another kind of layer, or one with hooks or a computed weight.
    """
    problem = _problem(linear)
    if problem:
        raise InstallError(
            f"S2 does not support a layer that {problem}; only a plain nn.Linear can be split by its input"
            " features: take the layer's rule out of the plan, or leave S2 out"
        )
    assert isinstance(linear, nn.Linear), "checked above"
    shared = SharedLinear(linear, mesh["model"])
    parts = Runs(mesh=mesh["model"], n=linear.in_features, dim=1)
    weight = shard_parameter(shared, "weight", linear.get_parameter("weight"), parts=parts)
    return Change({"": shared}, sharded=[weight])


class SharedLinear(nn.Module):
    """A linear layer with this rank's columns of the weight; made by `share_rows`, which gives it the weight."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # in the order of nn.Linear: optimisers number parameters by it
        self.register_parameter("weight", None)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={self.mesh.size()}"

    def forward(self, x: Float[Tensor, "*cell feature"] | SparseCounts) -> Float[Tensor, "*cell hidden"]:
        """The layer's output for all features, equal on all ranks."""
        y = collectives.leave(self.mesh, F.linear(self._own(x), self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _own(self, x: Tensor | SparseCounts) -> Tensor:
        if isinstance(x, SparseCounts):
            # not a tensor, but what F.linear takes
            return cast(Tensor, x[..., own_run(x.shape[-1], self.mesh)])
        return cast(Tensor, _TakeColumns.apply(x, self.mesh))  # type: ignore[no-untyped-call]


class _TakeColumns(torch.autograd.Function):
    """The own columns of x as a copy: a view would keep all of x alive until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.n_features, ctx.behind = mesh, x.shape[-1], "outside"
        return x[..., own_run(x.shape[-1], mesh)].clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return join_runs(grad, ctx.n_features, ctx.mesh, dim=grad.dim() - 1), None


def _problem(linear: nn.Module) -> str:
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__!r}"
    if linear._parameters.get("weight") is None:
        return "computes its weight from other parameters"
    # on the parameter itself too, which is replaced by the shard
    found = [*hooks_within(linear), *hooks_of(linear.get_parameter("weight"), "weight")]
    return f"has {', '.join(found)}" if found else ""
