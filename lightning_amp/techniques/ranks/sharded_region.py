"""Define the region of a decoder that is sharded over ranks, and check that a loss reads parameters on the right side.

What enters and leaves the region under S2, S5, strata and nodes:

    S5         u and v are restricted to the rank's channels; backward, one all-gather of their gradients
    S2         the loss of the rank's features is summed over the ranks (one all-reduce, forward)
    S2 only    gradients of u, v and log_weights are summed over the ranks (one all-reduce, backward)
    S2 and S5  gradients of log_weights are summed (one all-reduce, backward). Those of u and v are complete already,
               because the scores are scattered to the features' owners forward and gathered backward
    strata     as S2 only, for the rank's strata
    nodes      v is restricted to the rank's rows, losses are summed as under S2; backward, one all-gather of the
               gradients of these rows, and of the partial gradients of u and log_weights
    nodes, with    v has only the rank's rows already (nodes/graph_encoder.py), which enter unchanged; gradients of u
    vertices       and log_weights are summed (one all-reduce, backward)

Everything outside then has equal gradients on all ranks of the model axis, and needs no sum over it. Parameters inside
are replicated, and each rank computes a partial gradient: these need one sum (`Change.partial`).

`check_region` checks that a loss reads every parameter on the right side.

    outside    every rank computes the same                     from replicated parameters
    inside     every rank computes its part of the result       from partial or sharded parameters

If the loss also reads a partial or sharded parameter outside (a penalty on weights, a table tied to another layer), it
would count once per rank, or only a shard would be read. If it reads a replicated parameter inside (a learned library
size), its gradient would be partial. Both would train wrongly, so both raise an error before gradients are changed.

The autograd graph is walked from the loss to the leaves. A node with the attribute `behind` (`ctx.behind` in the
forward of an autograd.Function) declares on which side its inputs were computed. The attribute `home` has the ids of
parameters that a node reads on their right side: streamed strata are one node, part of which may be inside. The walk
needs no collective and no device synchronization; it takes some 1.5 us per node, and a small step has thousands.

Known limits: parameters behind a reentrant checkpoint are not detected, and neither are gradients that the strategy
does not compute (`loss.backward()`, `torch.autograd.grad`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import LogWeights, PerCell, Scalar
from lightning_amp.techniques.checks.same_function import mismatch
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.shards import AnchorShards, Channels, take_anchors, take_channels


class SharedRegion(nn.Module):
    """Entry and exit of the region that is sharded over the ranks of a mesh axis.

    Args:
        channels: Channel sets of S5, None without it.
        summed: Whether each rank computes a part of the loss: of features under S2, of strata under strata.
        anchors: The ranks' anchors under nodes, None without it.
        given: Whether v already has only the rank's rows.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        strategies: tuple[str, ...],
        *,
        channels: Channels | None = None,
        summed: bool = False,
        anchors: AnchorShards | None = None,
        given: bool = False,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.strategies = strategies
        self.channels = channels
        self.summed = summed
        self.anchors = anchors
        self.given = given

    def extra_repr(self) -> str:
        """Description in `print(module)`."""
        anchors = "" if self.anchors is None else f", anchors={self.anchors.sizes}"
        return f"{', '.join(self.strategies)}, ranks={self.mesh.size()}{anchors}"

    def enter(
        self, u: PerCell, v: Float[Tensor, "given_anchor dim"], log_weights: LogWeights
    ) -> tuple[Float[Tensor, "cell own_dim"], Float[Tensor, "own_anchor own_dim"], LogWeights]:
        """Return what the strata read on this rank; raises an InstallError if v has other rows than the rank's."""
        if self.given:
            assert self.anchors is not None, "own rows are those of nodes"
            if len(v) != len(self.anchors.own):
                raise InstallError(
                    f"the decoder got {len(v)!r} rows of v, and this rank has {len(self.anchors.own)!r} of "
                    f"{self.anchors.bounds[-1]!r} anchors; take the rows from the graph encoder's `rows`, "
                    "or give nodes a rule with DomainParallel(vertices=False)"
                )
            u, log_weights = collectives.enter(self.mesh, u, log_weights)
            return u, v, log_weights
        if self.anchors is not None:
            return take_anchors(self.anchors, u, v, log_weights)
        if self.channels is None:
            entered = collectives.enter(self.mesh, u, v, log_weights) if self.summed else (u, v, log_weights)
            return entered[0], entered[1], entered[2]
        u, v = take_channels(self.channels, u, v)
        if self.summed:
            (log_weights,) = collectives.enter(self.mesh, log_weights)
        return u, v, log_weights

    def n_rows(self, n_anchors: int) -> int:
        """Number of rows of v that the decoder receives."""
        return len(self.anchors.own) if self.anchors is not None and self.given else n_anchors

    def leave(self, total: Scalar) -> Scalar:
        """Return the negative log-likelihood over all ranks."""
        return collectives.leave(self.mesh, total) if self.summed else total


def share_region(decoder: object, new: SharedRegion) -> SharedRegion:
    """Return the region with one more technique; S2 and S5 can be combined in any order, strata and nodes with none.

    Args:
        decoder: Has the current region as a child.
        new: Region of the new technique alone.

    Raises:
        InstallError: Another technique has sharded the decoder, or the region is missing, has state, or does something
            that would be lost.
    """
    region, (strategy,) = getattr(decoder, "region", None), new.strategies
    if isinstance(region, SharedRegion):
        strategies = (*region.strategies, strategy)
        if not {"S2", "S5"}.issuperset(strategies):
            raise InstallError(
                f"{strategy} does not support a decoder that {', '.join(region.strategies)} has split"
                " already; two splits add up to another loss: only S2 and S5 can be together, leave one out"
            )
        # S2 and S5 in either order: each adds what the other does not have
        channels, summed = new.channels or region.channels, new.summed or region.summed
        return SharedRegion(new.mesh, strategies, channels=channels, summed=summed)
    problem = mismatch(region, {"its arguments unchanged:": True}, _pass)
    if problem:
        raise InstallError(
            f"{strategy} does not support a decoder whose child `region` {problem}; only a region without"
            " state whose enter(u, v, log_weights) and leave(total) return what they were given can be"
            f" replaced: move the rest to the decoder, or leave {strategy} out"
        )
    return new


def _pass(region: Any) -> dict[str, bool]:
    """Check whether a region returns its arguments unchanged."""
    given, total = (torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 5)), torch.ones(())
    # by identity: even a region that copies does something that the replacement would not
    entered = all(a is b for a, b in zip(region.enter(*given), given, strict=True))
    return {"its arguments unchanged:": entered and region.leave(total) is total}


def check_region(
    loss: Tensor, module: nn.Module, *, partial: Sequence[nn.Parameter], sharded: Sequence[ShardedParameter]
) -> None:
    """Raise an InstallError if a loss reads a parameter on the wrong side; all ranks of a model group raise the same.

    Args:
        loss: Scalar loss of a rank, before its backward.
        partial: Parameters of which every rank of the model axis computes a partial gradient.
        sharded: Parameters of which every rank holds a shard.
    """
    if not partial and not sharded:
        return
    # by identity, because parameters compare by value
    split = {id(p) for p in (*partial, *(parameter.shard for parameter in sharded))}
    replaced = {id(parameter.whole): parameter for parameter in sharded}
    for leaf, inside in leaves_of(loss):
        if id(leaf) in replaced:
            raise _refusal(
                f"{replaced[id(leaf)].name!r} of a layer that S2 or nodes has replaced",
                "still reads, and which is not trained",
                "reach the layer through its parent module, not through a reference of your own",
            )
        if id(leaf) in split and not inside:
            raise _refusal(
                _name(leaf, module),
                "reads outside of the decoder or layer that is split over the model axis, where every rank would count"
                " it once more, or read its own shard for the whole",
                "for a penalty use the optimizer's weight_decay, for another use a separate parameter",
            )
        if inside and id(leaf) not in split:
            raise _refusal(
                _name(leaf, module),
                "reads inside of the decoder that is split over the model axis, where its gradient would be a part",
                "hand it in as u or v, or detach what is computed from it, such as a library size",
            )


def leaves_of(loss: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that get gradients, each with whether it is read inside."""
    # a node that is reached on both sides is visited once for each
    seen: set[tuple[Node, bool]] = set()
    found: list[tuple[Node | None, bool]] = [(loss.grad_fn, False)]
    while found:
        node, inside = found.pop()
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf, inside
        side = getattr(node, "behind", None)
        inside = inside if side is None else side == "inside"
        home = getattr(node, "home", ())
        found += [
            (before, inside) for before, _ in node.next_functions if id(getattr(before, "variable", None)) not in home
        ]


def _name(leaf: Tensor, module: nn.Module) -> str:
    names = [name for name, parameter in module.named_parameters() if parameter is leaf]
    return repr(names[0]) if names else f"a tensor of shape {tuple(leaf.shape)!r}"


def _refusal(what: str, found: str, advice: str) -> InstallError:
    return InstallError(
        f"the loss cannot be trained: it has {what}, which it {found}; {advice}, or leave out "
        "what splits it (S2, S5, strata, nodes)"
    )
