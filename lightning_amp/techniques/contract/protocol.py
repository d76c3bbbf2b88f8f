"""Define the interface (protocols) that techniques require of modules and of a training step.

Modules need not inherit from these classes. If a decoder replaces a user's module, the module keeps its parameters,
names and children, and its `forward` is set on the instance to a `StandIn`. Techniques change the decoder behind it:
names in rules below the module's name mean children of the decoder (`decoders.hic.strata.3.key.attention`) only.

Legend: cell, anchor (N), dim (D), row (anchors of a run of buckets), feature (F_k of one stratum),
own_feature and own_vertex (features and vertices that a rank holds).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.shapes import FeatureAnchor, OwnCounts, PerAnchor
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter


class StandIn:
    """A `forward` that runs a decoder in place of the module's forward; subclasses are called like the module.

    It is not a module, so that setting it registers no child. A copy of the module has a copy of it.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder


def in_place_of(module: nn.Module) -> nn.Module:
    """Return the decoder that replaces a module's forward, or the module itself."""
    forward = vars(module).get("forward")
    return forward.decoder if isinstance(forward, StandIn) else module


def part(module: nn.Module, fqn: str) -> nn.Module:
    """Return the submodule of a name, or its decoder; names are resolved through decoders that replace modules."""
    for name in fqn.split(".") if fqn else ():
        # resolved at every level: a decoder may contain a module that another decoder replaces
        module = in_place_of(module).get_submodule(name)
    return in_place_of(module)


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by name; below a module that a decoder replaces, the modules of the decoder."""
    hidden: list[str] = []
    for fqn, child in module.named_modules():
        if any(fqn.startswith(f"{outer}." if outer else "") for outer in hidden):
            continue
        decoder = in_place_of(child)
        if decoder is child:
            yield fqn, child
        else:
            # the module's own children do not run any more: names below it mean the children of the decoder
            hidden.append(fqn)
            yield from decoder.named_modules(prefix=fqn)


class DecomposedDecoder(Protocol):
    """A decoder whose loss is a sum over strata, each a function of the anchors and the cells.

    `strata[k](v, u, ...)` returns the negative log-likelihood, summed over cells and features, and v for the next
    stratum. A stratum that reads only a run of columns of a parameter may declare that in `runs`, a dict from the
    parameter's name to a slice; the parameter of that name may then hold just these columns.

    Check with `is_decomposed`: from Python 3.12 on `isinstance` does not detect the children of a module.
    """

    strata: nn.ModuleList
    chained: bool
    n_anchors: int
    dim: int


@runtime_checkable
class BucketedAttention(Protocol):
    """Attention between neighbouring buckets of anchors, bucket by bucket."""

    def n_buckets(self, n: int) -> int:
        """Number of buckets for n anchors."""

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> tuple[Tensor, ...]:
        """Compute the tensors that `attend` reads, once for all buckets."""

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Compute the rows of the buckets [first, last)."""


Messages = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Computes source, target and coefficient of all edges of a graph."""


FEATURE_METHODS = ("own", "scores", "log_softmax", "whole")
"""Methods of a stratum's child `features`, which determines the device's features; see AllFeatures of models."""

VERTEX_METHODS = ("propagate", "add_messages", "blocks", "noise", "mean", "rows")
"""Methods of a graph encoder's child `vertices`, which determines the device's vertices; see AllVertices."""


def has_methods(module: object, names: Iterable[str]) -> bool:
    """Whether an object is a module with all these methods."""
    return isinstance(module, nn.Module) and all(callable(getattr(module, name, None)) for name in names)


class VertexEncoder(Protocol):
    """An encoder of a graph's vertices, whose children `loc` and `std` work row by row.

    `rows` has a child for every modality that maps v to the input of the modality's decoder: the rows of the modality's
    vertices, given by the child's buffer `ids` and, in host memory, by its attribute `on_host`. `ends` are source and
    target of the edges in both directions, also in host memory; `messages` returns them on the device, with
    coefficients. Check with `is_vertex_encoder`.
    """

    n_vertices: int
    ends: tuple[Tensor, Tensor]
    messages: Messages
    embedding: nn.Parameter
    loc: nn.Module
    std: nn.Module
    vertices: Any
    rows: nn.ModuleDict


@runtime_checkable
class ShardableAttention(BucketedAttention, Protocol):
    """Bucketed attention that can also be computed for some of the channels."""

    def shard(self, pairs: slice, total: Callable[[Tensor], Tensor]) -> nn.Module:
        """Return the same attention for the channels i and i + D/2 of the given i, in this order.

        Args:
            pairs: The i, a run in [0, D/2).
            total: Sums a tensor over the channels of all ranks, forward and backward; every call is a collective.
        """


@runtime_checkable
class ScattersFeatures(Protocol):
    """A decode that can return each feature's score, summed over the ranks, only to the rank that owns the feature."""

    def scatter(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
        run: int,
    ) -> OwnCounts:
        """Return the existing columns of [rank * run, (rank + 1) * run) of (u key^T)[:, feature_anchor]."""


ATTENTION_KEY = ("prenorm", "qk", "value", "attention", "postnorm", "ff")
"""Children of an attention key. It computes with these and with functions that do not mix channels (under "nodes":
anchors), which checks/key.py tests with probe inputs:

    p = prenorm(v),  q = qk(p),  val = value(p),  attention(q, q, p or val),  ff(postnorm(...))

where ff returns 2 D channels, split in two halves of D that are combined channel by channel (GEGLU)."""

CONVOLUTION_KEY = ("pairs", "activation")
"""Children of a convolution key: a depthwise convolution over anchors, and an elementwise function; tested likewise."""


def is_decomposed(module: object) -> TypeGuard[DecomposedDecoder]:
    """Whether a module is a decomposed decoder."""
    has_all = all(hasattr(module, name) for name in ("chained", "n_anchors", "dim"))
    return has_all and isinstance(getattr(module, "strata", None), nn.ModuleList)


def is_vertex_encoder(module: object) -> TypeGuard[VertexEncoder]:
    """Whether a module encodes the vertices of a graph, with the children that allow sharding over ranks."""
    has_all = all(hasattr(module, name) for name in ("n_vertices", "ends", "messages", "loc", "std"))
    return (
        has_all
        and isinstance(getattr(module, "embedding", None), nn.Parameter)
        and has_methods(getattr(module, "vertices", None), VERTEX_METHODS)
        and isinstance(getattr(module, "rows", None), nn.ModuleDict)
    )


def find_decoders(module: nn.Module) -> dict[str, DecomposedDecoder]:
    """Return the decomposed decoders in a module by name, without decoders inside decoders."""
    found: dict[str, DecomposedDecoder] = {}
    for fqn, child in named_parts(module):
        inside = any(not outer or fqn.startswith(f"{outer}.") for outer in found)
        if not inside and is_decomposed(child):
            found[fqn] = child
    return found


INSIDE = "it is of the decoder"
"""Reason why a block inside a decoder, or one that contains it, is skipped: decoders have separate techniques."""
T = TypeVar("T")


class StratumInputs(NamedTuple, Generic[T]):
    """Tensors that strata read that may have a gradient and are not parameters; or the gradient of each."""

    u: T
    v: T
    log_weights: T
    library: T


class LoopTechnique(nn.Module):
    """A technique that replaces a loop over strata; `forward` takes `latents` (u, v, log_weights) as the loop does.

    Args:
        inner: The loop that it replaces.
    """

    is_technique = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class StepToPlan(Protocol):
    """A training step that techniques can run on fake tensors, any number of times.

    Attributes:
        module: The module of the step.
        shared_statistics: Whether ranks exchange batch statistics.
        no_stages: Why the blocks of the module cannot be pipeline stages; "" if they can.
        requested: Specs that the user has requested, by technique.
    """

    module: LightningModule
    requested: Mapping[str, Spec]
    shared_statistics: bool
    no_stages: str

    @property
    def launches(self) -> bool:
        """Whether the device is a GPU, with memory of its own."""

    def step(self, rows: int | None = None) -> CountedStep:
        """Count the unchanged step for a batch of so many rows (None: the run's batch); cached for each number."""

    def run_with(self, rules: Sequence[Rule], count: Callable[..., T]) -> T:
        """Return `count(module, batch, batch_size=, around=)`, run with rules installed, and undo the rules.

        Raises:
            AmpError: A technique does not support the module, or the step fails with it.
        """

    def count(self, rules: Sequence[Rule]) -> ModuleProfile:
        """Profile the step with rules installed, and undo them; cached by rules. Raises as `run_with`."""

    def operator_rates(self) -> Any:
        """Rates from which the times of operators are computed."""


class Units:
    """Interface of sharded parameters that training steps, checkpoints and optimisers use.

    Attributes:
        sharded: The sharded parameters.
        groups: Mesh with the axes "replicate" and "shard" if groups of ranks have the same shards; else None.
        offload: Whether this rank's shards lie in host memory.
        deferred: Whether the module came without values, so that no rank may ever hold all of them.
    """

    sharded: tuple[ShardedParameter, ...] = ()
    groups: DeviceMesh | None = None
    offload: bool = False
    deferred: bool = False

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Context manager for the backward pass of a loss; gradients are averaged at its end, which is a collective."""
        raise NotImplementedError

    def optimizers_made(self, optimizers: Iterable[Optimizer]) -> None:
        """Called when the optimisers of the fit exist."""

    def before_update(self) -> None:
        """Called before an optimiser changes the shards."""

    def after_update(self) -> None:
        """Called after an optimiser has changed the shards."""

    def on_rows(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method while the module has this rank's shards as parameters."""
        return method(*args, **kwargs)

    def undo(self) -> None:
        """Restore the module."""


def normalises_by_batch(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm that uses batch statistics: in training mode, or without running statistics."""
    return isinstance(layer, AnyBatchNorm) and (
        layer.training or (layer.running_mean is None and layer.running_var is None)
    )
