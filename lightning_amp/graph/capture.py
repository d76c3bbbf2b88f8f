"""Capture blocks of a module as operator graphs, once per class and signature.

A block is a child of a ModuleList or Sequential. It runs once on fake tensors, while every operator is recorded above
autograd, so the graph is differentiated like the block's own forward. Parameters and buffers are arguments of the
graph: one graph serves all blocks with the same class and signature, and updates the buffers of each.

A graph fixes the decisions of Python code. It is used only if everything is as in the capture: shapes, dtypes, other
arguments, training mode, gradient mode, autocast, and attributes of the block (guards.py); and only if the block's
Python calls the same functions of torch with the same arguments, whatever it reads (calls.py). Otherwise the block is
captured again. If a block cannot be captured, `Capture.reason` says why.

Known limits: not detected are global module hooks, a seed under `torch.random.fork_rng`, and whether an argument is of
a subclass of Tensor.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, Node

from lightning_amp._torch import (
    FakeTensor,
    PythonNode,
    SharedFakeMode,
    failures_unlogged,
    fake_tensors,
    is_compiled,
    make_fx,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_amp.footprint.bounded_step import why_values
from lightning_amp.footprint.copies.fake_copy import copy_of
from lightning_amp.footprint.copies.restore_state import forgetting, restoring_state
from lightning_amp.footprint.forward_overrides import hooked
from lightning_amp.footprint.run_again.own_checkpoints import CHECKPOINTS, watching_checkpoints
from lightning_amp.graph.calls import Calls, CannotFollow, FollowedTensor, Recorder, empty_for, follow
from lightning_amp.graph.guards import OPAQUE, PLAIN, described, first_change, settings_of, state_of
from lightning_amp.graph.out_of_place import without_writes
from lightning_amp.graph.rewrites import REWRITES
from lightning_amp.holding import replacing
from lightning_amp.random_streams import drawn_between, host_streams, set_host_streams

DRAWS = "its forward draws from Python's or NumPy's random numbers"
CHANGES_LIST = "its forward changes a list or a dictionary that it is called with"


class CannotCapture(Exception):
    """Reason why a block cannot be captured; never leaves this package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Result of capturing one class and signature.

    Attributes:
        kind: Class of the block.
        key: Everything that the graph depends on.
        names: Parameters and buffers, in the order of the graph's first arguments.
        reason: Why there is no graph; "" if there is one.
        graph: Operators; None if there is a reason.
        output: Tree structure of the block's result, for the graph's flat results.
        needs_grad: Whether each of the graph's arguments has a gradient.
        calls: Functions that the forward called, by which later calls are compared (graph/calls.py).
        remembers: Whether the forward keeps tensors outside of the block.
        changed: Parameters, buffers ("norm.running_mean") and inputs ("input 0") that the block changes in place.
    """

    kind: type[nn.Module]
    key: Any
    names: tuple[str, ...]
    reason: str = ""
    graph: GraphModule | None = None
    output: Any = None
    changed: tuple[str, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    calls: Calls = ()
    remembers: bool = False

    @property
    def nodes(self) -> list[Node]:
        """Rows of the table: all nodes of the graph except the output node."""
        assert self.graph is not None, f"the block was not captured: {self.reason}"
        return [node for node in self.graph.graph.nodes if node.op != "output"]

    def arguments(self) -> list[Tensor]:
        """Return new tensors like the graph's arguments, fake in a fake mode."""
        return [fresh(node.meta["val"]) for node in self.nodes if node.op == "placeholder"]


def capture(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, key: Any) -> Capture:
    """Record the operators of a call; if that is not possible, return the reason."""
    common = {"kind": type(block), "key": key, "names": tuple(state_of(block))}
    try:
        # things that a graph would omit, or that make a capture fail
        for name, child in block.named_modules():
            place = f"its submodule {name!r}" if name else "it"
            if is_compiled(child):
                raise CannotCapture(f"{place} is compiled")
            if "to" in vars(child) or "to" in child._modules or "to" in child._parameters:
                raise CannotCapture(f"{place} has an attribute 'to', which hides the method of that name")
            if hooks := hooked([child]):
                raise CannotCapture(f"{place} has hooks ({hooks[0]}), which are Python")
        # warnings of libraries are ignored, also where the user turns warnings into errors
        with failures_unlogged(), warnings.catch_warnings(action="ignore"):
            with restoring_state(block):
                found, again = _trace(block, args, kwargs)
            with forgetting(block) as outside:
                remembers = again()
            if outside.differs and not remembers:
                # its later captures would see, and make, one more change
                raise CannotCapture("its forward changes a variable of a file, a class, or what one of them holds")
            return Capture(**common, **found, remembers=remembers)
    except CannotCapture as reason:
        return Capture(**common, reason=str(reason))
    except Exception as error:
        return Capture(**common, reason=f"its forward cannot run on fake tensors: {why_values(error)}")


def _kind(value: object) -> str:
    """Return the name of a value's type, and what to do about a cache of keys and values."""
    return f"{type(value).__name__!r}{' (use_cache=False leaves it out)' * _is_cache(value)}"


def _is_cache(value: object) -> bool:
    return type(value).__name__.endswith("Cache")


def _trace(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[], bool]]:
    """Return values of a Capture, and the function that runs the forward a second time."""
    state = state_of(block)
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    at = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    found: dict[str, Any] = {}

    def call(*tensors: Tensor) -> list[Any]:
        # parameters and buffers come first; zip stops there, and the other tensors are those of the call
        own = dict(zip(state, tensors, strict=False))
        given = [objects.get(i, value) for i, value in enumerate(values)]
        for i, tensor in zip(at, tensors[len(own) :], strict=True):
            given[i] = tensor
        call_args, call_kwargs = tree_unflatten(given, spec)
        # a tensor and its views share one counter of writes
        versions = [tensor._version for tensor in tensors]
        with NoPython(tensors) as python, watched(python):
            results, found["output"] = tree_flatten(functional_call(twin, own, call_args, call_kwargs))
            if (cache := next(filter(_is_cache, results), None)) is not None:
                raise CannotCapture(f"its result holds an object of type {_kind(cache)}")
        if python.reason:
            raise CannotCapture(python.reason)
        found["calls"], found["unlike"] = python.ends(results), python.unlike
        # `self.mean = ...` replaces a buffer by a new tensor, and no operator of the graph would update the block
        replaced = [name for name, tensor in zip(own, tensors, strict=False) if own[name] is not tensor]
        if replaced := [*replaced, *(state.keys() ^ state_of(twin).keys())]:
            raise CannotCapture(f"its forward replaces its parameter or buffer {replaced[0]!r}; write to it in place")
        left, form = tree_flatten((call_args, call_kwargs))
        if form != spec or any(new is not old for new, old in zip(left, given, strict=True)):
            raise CannotCapture(CHANGES_LIST)
        names = [*own, *(f"input {k}" for k in range(len(at)))]
        found["changed"] = tuple(
            name for name, tensor, old in zip(names, tensors, versions, strict=True) if tensor._version != old
        )
        found["custom"] = _custom_functions(results)
        return results

    made: dict[int, Tensor] = {}
    with SharedFakeMode(allow_non_fake_inputs=True) as fake:
        # an object that is passed twice stays one tensor
        given_tensors = [*state.values(), *(values[i] for i in at)]
        if any(t.layout is not torch.strided for t in given_tensors):
            raise CannotCapture("it has, or is called with, a tensor that is not dense")
        own_ids = set(map(id, state.values()))
        for given in given_tensors:
            leaf = fresh(given).requires_grad_(given.requires_grad)
            # a block is called with results of other code, which it may write to, as it may not with leaves
            made.setdefault(id(given), alias(leaf) if leaf.requires_grad and id(given) not in own_ids else leaf)
        tensors = [made[id(t)] for t in given_tensors]
    # the forward runs with copies, so that other objects than tensors do not change
    twin, objects = copy_of(block, fake), copied_objects(values)
    held = {i: described(value, states=True) for i, value in objects.items()}
    before, drawn, seed = settings_of(twin), host_streams(), torch.get_rng_state()
    try:
        graph = make_fx(call, REWRITES, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*tensors)
        if before != (after := settings_of(twin)):
            raise CannotCapture(f"its forward changes the attribute {first_change(before, after)!r}")
        if drawn_between(drawn, host_streams()):
            raise CannotCapture(DRAWS)
        # operators on fake tensors draw nothing, so the state changes only by a seed, which is not an operator
        if not torch.equal(seed, torch.get_rng_state()):
            raise CannotCapture("its forward sets the seed of torch's random numbers")
        for i, value in objects.items():
            if described(value, states=True) != held[i]:
                raise CannotCapture(f"its forward changes what an argument of type {_kind(value)} holds")
        constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
        # `torch.tensor(...)` in a forward gives a new constant in every call, by an operator of this name
        if not all("lift_fresh" in str(user.target) for node in constants for user in node.users):
            raise CannotCapture("its forward uses a tensor that is neither an argument nor a parameter nor a buffer")
        if found["custom"]:
            raise CannotCapture(f"its forward has the autograd Function {found['custom']!r}, whose backward is its own")
        if found["unlike"]:
            raise CannotCapture(f"{found['unlike']}, by which no later call can be compared with this one")
    finally:
        set_host_streams(drawn)
        torch.set_rng_state(seed)
    for node in reversed(graph.graph.nodes):
        # unused result of a rewrite that was not applied
        if node.target in REWRITES and not node.users:
            graph.graph.erase_node(node)
    without_writes(graph.graph)
    graph.recompile()
    given = [objects.get(i, value) for i, value in enumerate(values)]
    return {
        "graph": graph,
        "output": found["output"],
        "changed": found["changed"],
        "needs_grad": tuple(tensor.requires_grad for tensor in tensors),
        "calls": found["calls"],
    }, partial(runs_again, twin, state, given, spec, found["calls"])


def runs_again(twin: nn.Module, state: Mapping[str, Tensor], values: Sequence[Any], spec: Any, calls: Calls) -> bool:
    """Raise CannotCapture if a second run calls other functions, such as by the clock; return whether it keeps tensors.

    Its tensors are not fake, so that a forward that does something else with fake ones is detected too, except by
    `isinstance(x, FakeTensor)` (calls.FollowedTensor).
    """
    empty = {id(tensor): empty_for(tensor) for tensor in (*state.values(), *values) if isinstance(tensor, Tensor)}
    own = {name: empty[id(tensor)] for name, tensor in state.items()}
    args, kwargs = tree_unflatten([empty.get(id(value), value) for value in values], spec)
    given = [*own.values(), *(empty[id(value)] for value in values if isinstance(value, Tensor))]
    drawn = host_streams()
    try:
        kept = follow(lambda: functional_call(twin, own, args, kwargs), given, [calls], real=False)[1]
        if drawn_between(drawn, host_streams()):
            raise CannotCapture(DRAWS)
        if [id(t) for t in own.values()] != [id(empty[id(t)]) for t in state.values()] or [*state_of(twin)] != [*state]:
            raise CannotCapture("its forward replaces a parameter or buffer; write to it in place")
        left, form = tree_flatten((args, kwargs))
        if form != spec or any(new is not empty.get(id(old), old) for new, old in zip(left, values, strict=True)):
            raise CannotCapture(CHANGES_LIST)
        return kept
    except CannotCapture:
        raise
    except CannotFollow as error:
        raise CannotCapture(f"its forward {error}: it reads a value that changes from call to call") from None
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise CannotCapture(f"its forward cannot run without computing: {type(error).__name__}: {first}") from error
    finally:
        set_host_streams(drawn)


@contextmanager
def watched(python: "NoPython") -> Iterator[None]:
    """Refuse what belongs to each step: the number of the step or epoch, and logging; record reads of devices."""
    thread = get_ident()

    def refuse(why: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:  # such as one that watches for faults
                return own(*args, **kwargs)
            python.reason = f"its forward {why}"
            raise CannotCapture(python.reason)

        return refusing

    def counters(of: Any) -> dict[str, property]:
        why = "reads {!r} of the Trainer, which changes from step to step".format
        return {k: property(refuse(why(k), getattr(of, k).fget)) for k in ("global_step", "current_epoch")}

    of_fake: Any = vars(FakeTensor)["device"]
    logs = {k: refuse(f"calls {k!r} of a LightningModule", vars(LightningModule)[k]) for k in ("log", "log_dict")}

    def device(tensor: FakeTensor) -> torch.device:
        found: torch.device = of_fake.fget(tensor)
        python.notes_device(tensor, found)
        return found

    with (
        replacing(LightningModule, **counters(LightningModule), **logs),
        replacing(Trainer, **counters(Trainer)),
        replacing(FakeTensor, device=property(device, of_fake.fset)),
        replacing(fake_tensors, FakeTensor=FollowedTensor),
        # a graph has no checkpoint, so in chunks the block would keep what it does not keep by itself
        watching_checkpoints(refuse(CHECKPOINTS, watched)),
    ):
        yield


REQUIRES: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
PYTHON = {
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    Tensor.retain_grad: "retain_grad",
    Tensor.requires_grad_: "requires_grad_",
    REQUIRES: "requires_grad",
    Tensor.backward: "backward",
}
NUMBERS = (
    *(Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__),
    *(Tensor.is_nonzero, Tensor.equal, torch.equal, torch.is_nonzero),
)


class NoPython(Recorder):
    """Record functions; refuse tensor hooks, changes of requires_grad, and numbers read from tensors with values."""

    reason = ""
    """Kept, because the forward may catch the exception raised here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # allowed if requires_grad does not change
        wants = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        unchanged = func in (Tensor.requires_grad_, REQUIRES) and bool(wants) == bool(args[0].requires_grad)
        if func in PYTHON and not unchanged:
            self.reason = f"its forward calls {PYTHON[func]!r} of a tensor, which is Python"
        # arguments, parameters and buffers are fake. A number of another tensor would become a constant of the graph,
        # which does not follow later writes to that tensor
        if _as_number(args, kwargs) if func not in NUMBERS else not any(isinstance(arg, FakeTensor) for arg in args):
            self.reason = "its forward reads a number of a tensor that is no argument, parameter or buffer"
        if self.reason:
            raise CannotCapture(self.reason)
        return super().__torch_function__(func, types, args, kwargs)


def _as_number(args: Any, kwargs: Any) -> bool:
    """Return whether a tensor with values is used as a number, as in an index or a shape; the first argument is not."""
    leaves = [
        part
        for leaf in tree_leaves((args[1:], kwargs))
        for part in ((leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,))
    ]
    return any(isinstance(t, Tensor) and t.dim() == 0 and not isinstance(t, FakeTensor) for t in leaves)


def copied_objects(values: Sequence[Any]) -> dict[int, Any]:
    """Return copies of arguments that are objects, by position: writes must not reach the originals."""
    found, memo = dict[int, Any](), dict[int, Any]()
    for i, value in enumerate(values):
        if not isinstance(value, (*PLAIN, *OPAQUE)):
            try:
                found[i] = copy.deepcopy(value, memo)
            except Exception as error:
                kind = type(value).__name__
                raise CannotCapture(f"it is called with a {kind!r}, which cannot be copied") from error
    return found


def _custom_functions(results: Sequence[Any]) -> str:
    """Return the name of a Python autograd Function behind the results; "" if there is none."""
    waiting = [r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, PythonNode) and not isinstance(node, Alias._backward_cls):
            return node.name().removesuffix("Backward")
        # searched in autograd's graph: in the list of operators, only the operators that a Function runs appear
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        waiting += new
    return ""


def alias(leaf: Tensor) -> Tensor:
    """Return an alias of a leaf that may be changed in place."""
    found: Tensor = Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return found


class Alias(torch.autograd.Function):
    """Alias of a leaf that may be changed in place, which autograd allows for neither a leaf nor its views."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return an alias."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient."""
        return grad


def fresh(tensor: Tensor) -> Tensor:
    """Return new memory with a tensor's strides, fake in a fake mode: fake tensors of another mode cannot be copied."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
