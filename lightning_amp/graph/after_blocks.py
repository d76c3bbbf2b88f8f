"""Treat what a module computes after its last block as a block: the head of a language model, with its loss.

    forward(tokens, labels):  embedding -> block 1 -> ... -> block n -> norm -> head -> loss
                                                             |-------- AfterBlocks ---------|

Its arguments are those of the module and what the last block returns. Its forward is the module's own, in which the
last block returns that, and the blocks before it nothing that can be read: a module whose result depends on them by
another way than through the last block cannot be captured. What comes before the last block is left out of its graph.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from lightning_amp._torch import FakeTensor, OpOverload, own_class, tree_leaves, tree_map, unseen
from lightning_amp.footprint.chain.block_call import Like
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.footprint.forward_overrides import overrides_of, set_overrides


class AfterBlocks(nn.Module):
    """The module's forward pass from its last block's result on.

    Its own parameters and buffers are those that the module has outside of its blocks, themselves.

    Args:
        owner: The module; it stays as it is.
        before: Of every call of a block but the last one, in order, its name and its result with a `Like` in the place
            of every tensor.
    """

    def __init__(self, owner: nn.Module, before: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        blocks = find_blocks(owner)
        self.owner = _without(owner, {id(block) for block in blocks.values()}, {})
        self._before = tuple(before)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """What the module returns for its arguments and the result of its last block."""
        blocks, stand_in = find_blocks(self.owner), _known_results(self._before, result)
        for fqn, block in blocks.items():
            block.forward = partial(stand_in, fqn)
        try:
            return self.owner(*args, **kwargs)
        finally:
            for block in blocks.values():
                del block.forward


def _known_results(before: Sequence[tuple[str, Any]], result: Any) -> Callable[..., Any]:
    """What is called in the place of all blocks in one forward pass."""
    calls, leaves = iter((*before, None)), [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    fake = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    # what is drawn before the last block is not drawn where the rest is computed
    cuda = {leaf.device for leaf in leaves if leaf.is_cuda}
    drawn = [] if fake else [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]

    def stand_in(fqn: str, *args: Any, **kwargs: Any) -> Any:
        known = next(calls, ("", None))
        if known is None:
            if drawn:
                torch.set_rng_state(drawn[0])
            for device, state in zip(cuda, drawn[1:], strict=False):
                torch.cuda.set_rng_state(state, device)
            return result
        name, like = known
        if name != fqn:
            raise RuntimeError(f"block {fqn!r} is called where {name or 'no other one'!r} was called before")
        if fake is None:
            # nothing depends on it, or there would be no graph; of fewer positions it has to fit
            given = [leaf.detach() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            return tree_map(lambda leaf: given[0] if isinstance(leaf, Like) and given else leaf, like)
        with unseen(), fake:
            # not made where operators are written down, so that what is computed of it is seen to be of a constant
            return tree_map(lambda leaf: leaf.make() if isinstance(leaf, Like) else leaf, like)

    return stand_in


def _without(module: nn.Module, blocks: set[int], known: dict[int, nn.Module]) -> nn.Module:
    """The module with its own parameters and settings, and with blocks that have nothing but settings.

    Hooks of the module itself run around whatever its forward is; those of what it has outside blocks stay, and are in
    the way of a capture.
    """
    if id(module) in known:
        return known[id(module)]
    # no `copy.copy`: what fully_shard has put on a module belongs to that module alone
    kind, left_out = own_class(module)
    inside, first = id(module) in blocks, not known
    found = known[id(module)] = object.__new__(kind)
    empty = ("_parameters", "_buffers", "_modules") if inside else ()
    for name, value in vars(module).items():
        if name in left_out or (name == "forward" and (inside or first)):
            continue
        # a block stands for what it has returned: it is not run, so it needs no parameters and no hooks
        bare = name in empty or ("_hooks" in name and (inside or first))
        vars(found)[name] = type(value)() if bare else value
    if "forward" in vars(found) and (overrides := overrides_of(module)):
        set_overrides(found, overrides)
    if not inside and any(id(child) in blocks for child in module.modules()):
        children = module._modules.items()
        found._modules = {name: child and _without(child, blocks, known) for name, child in children}
    return found


def leave_out_before(graph: Graph, results: int) -> str:
    """Take out of the graph of an `AfterBlocks` what is not needed after the last block; why not, "" where it was.

    So many of its last arguments are the tensors of the last block's result.
    """
    nodes = list(graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    at = {node: k for k, node in enumerate(nodes)}
    # operators before the first one that reads the last block's result were computed on the way to the blocks
    # the arguments of the module are placeholders too: only the last ones are what the last block has returned
    reads = [at[user] for node in given[len(given) - results :] for user in node.users]
    first = min(reads, default=len(nodes))
    before = [node for node in nodes[:first] if node.op == "call_function"]
    needed, waiting = set[Node](), nodes[first:]
    while waiting:
        new = [node for node in waiting.pop().all_input_nodes if node not in needed]
        needed.update(new)
        waiting += new
    kept = [node for node in before if node in needed]
    # what changes a tensor, or is no operator on tensors
    touched = [n for n in before if not isinstance(n.target, OpOverload) or n.target._schema.is_mutable]
    drawn = [node for node in kept if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    # what is kept runs a second time: it may not draw anew, nor read what another has changed meanwhile
    if kept and (touched or drawn):
        return f"what it computes after its blocks needs what {(drawn or touched)[0].target} did before them"
    for node in reversed(before):
        if node not in needed:
            graph.erase_node(node)
    return ""
