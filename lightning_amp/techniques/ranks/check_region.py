"""Check that a loss reads every parameter on the right side of the region that the model axis shares.

    outside    every rank computes the same                from whole parameters
    inside     every rank computes a part of the whole     from split ones: partial, or their own shards

A split parameter that the loss also reads outside (a penalty on weights, a table tied to another layer) would count
once per rank, or be read in part; a whole one that is read inside (a library size that is learned) would get a part of
its gradient. Both train wrongly without failing, so both are refused, before anything is added to a gradient.

The loss's graph is walked from the loss down. A node with the attribute `behind` (`ctx.behind` in the forward of an
autograd.Function) says on which side the computation lies that it got its inputs from. One with the attribute `home`
has the ids of parameters that it reads on the side where they belong: streamed strata are one node, a part of which
may be inside. No collectives, and no waiting
for the device; some 1.5 us per node, of which a small step has thousands.

Known limits: what a reentrant checkpoint hides is not seen, nor a gradient that the strategy does not take itself
(`loss.backward()`, `torch.autograd.grad`).
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_amp.errors import InstallError
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter


def check_region(
    loss: Tensor, module: nn.Module, *, partial: Sequence[nn.Parameter], sharded: Sequence[ShardedParameter]
) -> None:
    """Refuse a loss with a parameter on the wrong side; every rank of a model group finds the same.

    Args:
        loss: A scalar of a rank, before its backward.
        partial: Parameters of which every rank of the model axis computes a part of the gradient.
        sharded: Parameters of which every rank holds a shard.

    Raises:
        InstallError: A split parameter is read outside, a whole one inside, or one that a shard has replaced.
    """
    if not partial and not sharded:
        return
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
    """The tensors that get gradients, each with whether it is read inside."""
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
