"""Build a Table from a captured graph: run every operator separately on fake tensors and measure its memory.

Equal operators with equal arguments, such as in a loop over time, are measured once; the others only run.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

import lightning_amp.graph.flow_rules  # noqa: F401  (it registers rules)
from lightning_amp._torch import tree_leaves, tree_map
from lightning_amp.footprint.chain.block_call import autocast_again, autocast_now
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes, named_arguments
from lightning_amp.graph.capture import Capture, alias, fresh
from lightning_amp.graph.flow import OperatorCall, Ref, dims_of, sums_of
from lightning_amp.graph.flow import register_flow as register_flow  # public: the built-in rules are registered here
from lightning_amp.graph.table import INPUT, OPERATOR, PARAMETER, OperatorRow, Table


def build_table(capture: Capture) -> Table:
    """Return the table of a captured block; call it with the gradient mode and autocast of the capture."""
    assert capture.graph is not None, f"the block was not captured: {capture.reason}"
    builder = _Builder(capture)
    # operators are measured one by one: each casts for itself
    with QuickFakes(), autocast_again(autocast_now(), cache_enabled=False):
        for node in capture.graph.graph.nodes:
            builder.add(node)
    return builder.table()


class _Builder:
    """Collects rows, with a fake tensor for the result of each."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._rows: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._of_node: dict[Node, int] = {}
        self._of_storage: dict[int, int] = {}
        self._known: dict[Any, dict[str, Any]] = {}
        """Measured values of an operator by `_key`; rows are given as indices of its inputs."""
        self._outputs: tuple[int, ...] = ()

    def add(self, node: Node) -> None:
        """Add the next node of the graph."""
        if node.op == "placeholder":
            kind = PARAMETER if len(self._rows) < len(self._capture.names) else INPUT
            needs_grad = self._capture.needs_grad[len(self._rows)]
            self._put(node, fresh(node.meta["val"]).requires_grad_(needs_grad), kind=kind)
        elif node.op == "get_attr":
            self._put(node, fresh(getattr(self._capture.graph, str(node.target))), kind=PARAMETER)
        elif node.op == "output":
            self._outputs = tuple(self._of_node[n] for n in tree_leaves(node.args) if isinstance(n, Node))
        else:
            self._run(node)

    def table(self) -> Table:
        """Return the table, with the last use of each row."""
        last = [0] * len(self._rows)
        for i, row in enumerate(self._rows):
            last[i] = max(last[i], i)
            for k in row["inputs"]:
                last[k] = max(last[k], i)
        for k in self._outputs:
            # results of the block are read by the caller, after all rows
            last[k] = len(self._rows)
        rows = tuple(OperatorRow(last_use=last[i], **row) for i, row in enumerate(self._rows))
        return Table(block=self._capture.kind.__name__, rows=rows, outputs=self._outputs)

    def _put(self, node: Node, value: Any, **row: Any) -> None:
        i = len(self._rows)
        self._of_node[node] = i
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        new = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
        # memory of an earlier row belongs to that row: this row is a view of it
        new = {key: s for key, s in new.items() if key not in self._of_storage}
        for key in new:
            self._of_storage[key] = i
        first = tensors[0] if tensors else None
        self._values.append(value)
        self._rows.append(
            {
                "name": node.name,
                "inputs": (),
                "shape": () if first is None else tuple(first.shape),
                "dtype": "" if first is None else str(first.dtype).removeprefix("torch."),
                "n_bytes": sum(s.nbytes() for s in new.values()),
                "storage": i if first is None else self._of_storage[id(first.untyped_storage())],
                "needs_grad": any(t.requires_grad for t in tensors),
                **row,
            }
        )

    def _run(self, node: Node) -> None:
        """Run an operator on leaves that share the memory of the rows it reads."""
        inputs, leaves = [], list[Tensor]()

        def leaf(given: Node) -> Any:
            value = self._values[self._of_node[given]]
            inputs.append(self._of_node[given])
            if not isinstance(value, Tensor):
                return value
            # a leaf, for the backward pass of this operator alone, in the same memory, so that views are detected
            # every argument gets a separate leaf, so that gradients of two arguments are separate
            leaves.append(value.detach().requires_grad_(value.requires_grad))
            return leaves[-1]

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), leaf)
        key = _key(node, leaves)
        op = "getitem" if node.target is getitem else str(node.target)
        if key in self._known:
            self._put(node, _called(node, args, kwargs), kind=OPERATOR, op=op)
            found = self._known[key]
        else:
            result, kept, found = _looked_at(node, args, kwargs, leaves)
            self._put(node, result, kind=OPERATOR, op=op)
            # memory of a row is counted by that row; only the rest is hidden: a mask, a copy with other strides,
            # statistics
            hidden = [tensor for memory, tensor in kept.items() if memory not in self._of_storage]
            own = len(self._rows) - 1
            places = {self._of_storage[memory] for memory in kept if memory in self._of_storage}
            # local names would keep their tensors alive during the backward pass below
            kept.clear()
            call = _call(node, args, kwargs, leaves, self._rows[-1]["shape"])
            found |= {
                "writes": (*found["writes"], *_updated(call)),
                "random": _draws(node, call),
                # by the index of the first input in that memory; -1 for its own
                "saved": tuple(
                    -1 if home == own else next(n for n, k in enumerate(inputs) if self._rows[k]["storage"] == home)
                    for home in places
                ),
                "hidden_bytes": sum(tensor.untyped_storage().nbytes() for tensor in hidden),
                "dims": dims_of(call),
                "sums": sums_of(call),
            }
            found |= _backward(result, [self._values[k] for k in inputs], leaves, hidden)
            if key is not None:
                self._known[key] = found
        homes = [self._rows[k]["storage"] for k in inputs]
        tensors = [k for k in inputs if isinstance(self._values[k], Tensor)]
        self._rows[-1] |= found | {
            "inputs": tuple(inputs),
            "writes": tuple(tensors[n] for n in found["writes"]),
            "saved": tuple(sorted(len(self._rows) - 1 if n < 0 else homes[n] for n in found["saved"])),
        }
        # results become arguments of the next operators, detached from their autograd graph
        self._values[-1] = tree_map(
            lambda v: v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v, self._values[-1]
        )


def _key(node: Node, leaves: list[Tensor]) -> Any:
    """Return a key of all that an operator's measurement depends on; None if an argument is a list of tensors."""
    if len(leaves) < len(node.all_input_nodes):
        # a list of tensors is not a leaf, so its shapes and dtypes are not in the key
        return None
    # strides and offsets matter: a kernel copies tensors with unsuitable strides
    memory: dict[int, int] = {}
    tensors = tuple(
        (
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.requires_grad,
            memory.setdefault(id(t.untyped_storage()), len(memory)),
            t.untyped_storage().nbytes(),
        )
        for t in leaves
    )
    others = torch.fx.map_arg((node.args, node.kwargs), lambda _: "a tensor")
    return node.target, torch.is_grad_enabled(), autocast_now(), tensors, repr(others)


def _called(node: Node, args: Any, kwargs: Any) -> Any:
    """Return the operator's result; in-place operators with gradients run on aliases."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable and torch.is_grad_enabled():
        args, kwargs = tree_map(lambda v: alias(v) if isinstance(v, Tensor) and v.requires_grad else v, (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _looked_at(
    node: Node, args: Any, kwargs: Any, leaves: list[Tensor]
) -> tuple[Any, dict[int, Tensor], dict[str, Any]]:
    """Run an operator; return its result, the tensors it saves, and part of its row (`writes` index leaves)."""
    live, kept = LiveBytes(), dict[int, Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        # the alias keeps the storage alive, so that its id is not reused
        kept[id(tensor.untyped_storage())] = alias = tensor.detach()
        return alias

    versions = [leaf._version for leaf in leaves]
    with FlopCounterMode(display=False) as flops, live, saved_tensors_hooks(keep, lambda t: t):
        result = _called(node, args, kwargs)
    changed = zip(leaves, versions, strict=True)
    found = {
        "writes": tuple(n for n, (leaf, old) in enumerate(changed) if leaf._version != old),
        "flops": int(flops.get_total_flops()),
        "forward_bytes": live.peak - live.current,
    }
    return result, kept, found


def _backward(result: Any, values: list[Any], leaves: list[Tensor], hidden: list[Tensor]) -> dict[str, Any]:
    """Measure the operator's own backward pass, which frees the kept tensors in `hidden` as it proceeds."""
    results = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None]
    wanted = [t for t in leaves if t.requires_grad]
    if not results or not wanted:
        return {"grad_bytes": (0,) * len(values)}
    # incoming gradients are allocated before, and are counted by other rows
    seeds = [torch.empty_like(t) for t in results]
    live = LiveBytes()
    live.watch(hidden)
    held = live.current
    hidden.clear()
    with live:
        grads = torch.autograd.grad(results, wanted, seeds, allow_unused=True)
    # a gradient that shares memory with an incoming one, as for a view or a sum, takes no memory
    given = {id(seed.untyped_storage()) for seed in seeds}
    by_leaf = {id(t): g for t, g in zip(wanted, grads, strict=True)}
    tensors = iter(leaves)
    sizes = []
    for value in values:
        grad = by_leaf.get(id(next(tensors))) if isinstance(value, Tensor) else None
        new = grad is not None and id(grad.untyped_storage()) not in given
        sizes.append(grad.untyped_storage().nbytes() if grad is not None and new else 0)
    return {"grad_bytes": tuple(sizes), "backward_bytes": live.peak - held - sum(sizes)}


def _updated(call: OperatorCall) -> tuple[int, ...]:
    """Return the arguments that are running statistics updated by a call; fake tensors keep their version."""
    if not (call.arguments.get("training") or call.arguments.get("use_input_stats")):
        return ()
    places = (call.ref("running_mean"), call.ref("running_var"))
    return tuple(k for k in places if k is not None)


def _draws(node: Node, call: OperatorCall) -> bool:
    """Return whether a call draws random numbers: its operator can, and no argument disables it."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not tagged and "dropout_p" not in call.arguments:
        return False
    rate = call.arguments.get("dropout_p", call.arguments.get("p", 1.0))
    return bool(rate != 0 and call.arguments.get("train", True))


def _call(node: Node, args: Any, kwargs: Any, leaves: list[Tensor], result: tuple[int, ...]) -> OperatorCall:
    """Return the call in the form that flow rules take."""
    places = {id(leaf): Ref(k) for k, leaf in enumerate(leaves)}
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return places[id(value)]
        return [plain(part) for part in value] if isinstance(value, list | tuple) else value

    if node.target is getitem:
        return OperatorCall(op="getitem", shapes=(result,), result=result)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return OperatorCall(op=str(node.target), shapes=shapes, result=result)
    arguments = {key: plain(value) for key, value in named_arguments(node.target, args, kwargs).items()}
    space, _, name = schema.name.partition("::")
    return OperatorCall(op=name if space == "aten" else schema.name, shapes=shapes, result=result, arguments=arguments)
