"""Capture what a module computes after its last block like a block: the head of a language model, with its loss.

    forward(tokens, labels):  embedding -> block 1 -> ... -> block n -> norm -> head -> loss
                                                             |-------- AfterBlocks ---------|

`AfterBlocks` takes the module's arguments and the result of the last block. It runs the module's own forward, in which
the last block returns this result, and earlier blocks return placeholders. A module whose result depends on earlier
blocks in another way than through the last block cannot be captured. Operators before the last block are removed from
the graph.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from lightning_amp._torch import FakeTensor, OpOverload, own_class, tree_leaves, tree_map, unseen
from lightning_amp.footprint.chain.block_call import Like
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.footprint.forward_overrides import overrides_of, set_overrides
from lightning_amp.graph.calls import FOLLOWING


class AfterBlocks(nn.Module):
    """The module's forward pass, starting from the result of its last block.

    It has the parameters and buffers that the module has outside of its blocks; they are shared, not copied.

    Args:
        owner: The module; it does not change.
        before: For every block call except the last, in order: its name, and its result with a `Like` in place of each
            tensor.
    """

    def __init__(self, owner: nn.Module, before: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        blocks = find_blocks(owner)
        self.owner = _without(owner, {id(block) for block in blocks.values()}, {})
        self._before = tuple(before)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return the module's result for its arguments and the result of its last block."""
        blocks, stand_in = find_blocks(self.owner), _known_results(self._before, result)
        for fqn, block in blocks.items():
            block.forward = partial(stand_in, fqn)
        try:
            return self.owner(*args, **kwargs)
        finally:
            for block in blocks.values():
                del block.forward


def _known_results(before: Sequence[tuple[str, Any]], result: Any) -> Callable[..., Any]:
    """Return the function that replaces all blocks in one forward pass."""
    calls, leaves = iter((*before, None)), [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    fake = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    # code before the last block runs a second time: the random state is reset afterwards, as if it drew nothing
    cuda = {leaf.device for leaf in leaves if leaf.is_cuda}
    drawn = [] if fake or FOLLOWING.get() else [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]

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
        if fake is None and not FOLLOWING.get():
            # its values are not used, or the capture would have failed; its shape must suit a call with fewer positions
            given = [leaf.detach() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            return tree_map(lambda leaf: given[0] if isinstance(leaf, Like) and given else leaf, like)
        with unseen(), fake or nullcontext():
            # made without recording, so that a result computed from it counts as a constant, which a capture refuses
            return tree_map(lambda leaf: leaf.make() if isinstance(leaf, Like) else leaf, like)

    return stand_in


def _without(module: nn.Module, blocks: set[int], known: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of the module that shares its parameters and settings, with blocks that have only settings.

    Hooks of the module itself run around its forward and are omitted. Hooks of submodules outside of blocks stay, and
    prevent a capture.
    """
    if id(module) in known:
        return known[id(module)]
    # not `copy.copy`: the state that fully_shard adds belongs to the original module only
    kind, left_out = own_class(module)
    inside, first = id(module) in blocks, not known
    found = known[id(module)] = object.__new__(kind)
    empty = ("_parameters", "_buffers", "_modules") if inside else ()
    for name, value in vars(module).items():
        if name in left_out or (name == "forward" and (inside or first)):
            continue
        # a block only returns a stored result, so it needs no parameters and no hooks
        bare = name in empty or ("_hooks" in name and (inside or first))
        vars(found)[name] = type(value)() if bare else value
    if "forward" in vars(found) and (overrides := overrides_of(module)):
        set_overrides(found, overrides)
    if not inside and any(id(child) in blocks for child in module.modules()):
        children = module._modules.items()
        found._modules = {name: child and _without(child, blocks, known) for name, child in children}
    return found


def leave_out_before(graph: Graph, results: int) -> str:
    """Remove operators before the last block from the graph of an `AfterBlocks`; return why not, or "" if removed.

    `results` is the number of tensors in the last block's result, which are the last arguments of the graph.
    """
    nodes = list(graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    at = {node: k for k, node in enumerate(nodes)}
    # operators before the first reader of the last block's result were computed before the blocks; the module's own
    # arguments come first among the placeholders
    reads = [at[user] for node in given[len(given) - results :] for user in node.users]
    first = min(reads, default=len(nodes))
    before = [node for node in nodes[:first] if node.op == "call_function"]
    needed, waiting = set[Node](), nodes[first:]
    while waiting:
        new = [node for node in waiting.pop().all_input_nodes if node not in needed]
        needed.update(new)
        waiting += new
    kept = [node for node in before if node in needed]
    # operators that change a tensor, or that are not tensor operators
    touched = [n for n in before if not isinstance(n.target, OpOverload) or n.target._schema.is_mutable]
    drawn = [node for node in kept if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    # kept operators run a second time: they must not draw random numbers, nor read a tensor that was changed since
    if kept and (touched or drawn):
        return f"what it computes after its blocks needs what {(drawn or touched)[0].target} did before them"
    for node in reversed(before):
        if node not in needed:
            graph.erase_node(node)
    return ""
