"""Define the structure that techniques require of modules and of a training step; no base class is needed.

A module written elsewhere keeps its parameters, names and children where a decoder replaces it: its `forward`, set on
the instance, is a `StandIn`. Techniques change the decoder behind it: below the module's name, rules meet the decoder's
children (`decoders.hic.strata.3.key.attention`) and not the module's own.

Legend: cell, anchor (N), dim (D), row (anchors of a run of buckets), feature (F_k of one stratum),
own_feature and own_vertex (those that a rank holds).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.shapes import FeatureAnchor, OwnCounts, PerAnchor


class StandIn:
    """A forward that runs a decoder in place of a module's own; subclasses are called as the module is.

    Not a module, so that setting it registers nothing. A copy of the module has a copy of it.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder


def in_place_of(module: nn.Module) -> nn.Module:
    """The decoder that stands in for a module, or the module itself."""
    forward = vars(module).get("forward")
    return forward.decoder if isinstance(forward, StandIn) else module


def part(module: nn.Module, fqn: str) -> nn.Module:
    """The module of a name, through what stands in for modules on the way, and for the last one."""
    for name in fqn.split(".") if fqn else ():
        # at every step: a decoder that stands in may hold another that is stood in for
        module = in_place_of(module).get_submodule(name)
    return in_place_of(module)


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, with those of a decoder that stands in for a module in place of the module's own."""
    hidden: list[str] = []
    for fqn, child in module.named_modules():
        if any(fqn.startswith(f"{outer}." if outer else "") for outer in hidden):
            continue
        decoder = in_place_of(child)
        if decoder is child:
            yield fqn, child
        else:
            # its own children are not run any more: names below it mean the children of the decoder
            hidden.append(fqn)
            yield from decoder.named_modules(prefix=fqn)


class DecomposedDecoder(Protocol):
    """A decoder whose loss is a sum over strata, each a function of the anchors and the cells.

    `strata[k](v, u, ...)` returns the negative log-likelihood summed over cells and features, and v for the
    next stratum. A stratum that reads a run of columns of a parameter may say so by `runs`, the parameter's name to a
    slice; it then finds the parameter, or just these columns, under the name.

    Test for it with `is_decomposed`: from Python 3.12 on `isinstance` does not see the children of a module.
    """

    strata: nn.ModuleList
    chained: bool
    n_anchors: int
    dim: int


@runtime_checkable
class BucketedAttention(Protocol):
    """Attention between neighbouring buckets of anchors, bucket by bucket."""

    def n_buckets(self, n: int) -> int:
        """Buckets that n anchors fill."""

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> tuple[Tensor, ...]:
        """What `attend` reads, made once for all buckets."""

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Rows of the buckets [first, last)."""


Messages = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Makes source, target and coefficient of all edges of a graph."""


FEATURE_METHODS = ("own", "scores", "log_softmax", "whole")
"""Methods of a stratum's child `features`: which features the device holds; the reference is models' AllFeatures."""

VERTEX_METHODS = ("propagate", "add_messages", "blocks", "noise", "mean", "rows")
"""Methods of a graph encoder's child `vertices`: which vertices the device holds; the reference is AllVertices."""


def has_methods(module: object, names: Iterable[str]) -> bool:
    """Whether a module has all methods of some names."""
    return isinstance(module, nn.Module) and all(callable(getattr(module, name, None)) for name in names)


class VertexEncoder(Protocol):
    """An encoder of a graph's vertices, whose children `loc` and `std` work row by row.

    `rows` has a child for every modality that takes v to what the modality's decoder gets: the rows of its vertices,
    which are its buffer `ids` and, in the host's memory, its attribute `on_host`. `ends` are source and target of the
    edges in both directions, in the host's memory too; `messages` has them on the device, with coefficients.
    Test for it with `is_vertex_encoder`.
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
        """The same for the channels i and i + D/2 of the given i, in this order.

        Args:
            pairs: The i, a run in [0, D/2).
            total: Sums a tensor over all ranks' channels, forward and backward; every call is a collective.
        """


@runtime_checkable
class ScattersFeatures(Protocol):
    """A decode that can hand each feature's score, summed over the ranks, to only the feature's owner."""

    def scatter(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
        run: int,
    ) -> OwnCounts:
        """Columns [rank * run, (rank + 1) * run) of (u key^T)[:, feature_anchor], as far as there are any."""


ATTENTION_KEY = ("prenorm", "qk", "value", "attention", "postnorm", "ff")
"""Children of an attention key. It computes with them, and with functions that do not mix channels (for nodes:
anchors), which is probed (checks/key.py),

    p = prenorm(v),  q = qk(p),  val = value(p),  attention(q, q, p or val),  ff(postnorm(...))

where ff gives 2 D channels that are cut in two halves of D, which meet channel by channel (GEGLU)."""

CONVOLUTION_KEY = ("pairs", "activation")
"""Children of a convolution key: a depthwise convolution over the anchors and a function of single numbers; the same is
probed."""


def is_decomposed(module: object) -> TypeGuard[DecomposedDecoder]:
    """Whether a module is a decomposed decoder."""
    has_all = all(hasattr(module, name) for name in ("chained", "n_anchors", "dim"))
    return has_all and isinstance(getattr(module, "strata", None), nn.ModuleList)


def is_vertex_encoder(module: object) -> TypeGuard[VertexEncoder]:
    """Whether a module encodes the vertices of a graph, with the leaves that can be sharded to ranks."""
    has_all = all(hasattr(module, name) for name in ("n_vertices", "ends", "messages", "loc", "std"))
    return (
        has_all
        and isinstance(getattr(module, "embedding", None), nn.Parameter)
        and has_methods(getattr(module, "vertices", None), VERTEX_METHODS)
        and isinstance(getattr(module, "rows", None), nn.ModuleDict)
    )


def find_decoders(module: nn.Module) -> dict[str, DecomposedDecoder]:
    """The decomposed decoders in a module by name; what lies inside a decoder is not looked at."""
    found: dict[str, DecomposedDecoder] = {}
    for fqn, child in named_parts(module):
        inside = any(not outer or fqn.startswith(f"{outer}.") for outer in found)
        if not inside and is_decomposed(child):
            found[fqn] = child
    return found


INSIDE = "it is of the decoder"
"""Why a block that lies in a decoder, or holds it, stays as it is: decoders have techniques of their own."""
T = TypeVar("T")


class StratumInputs(NamedTuple, Generic[T]):
    """Tensors that strata read, may have a gradient and are no parameters; or the gradient of each."""

    u: T
    v: T
    log_weights: T
    library: T


class LoopTechnique(nn.Module):
    """A technique in the place of a strata loop; its `forward` takes `latents` (u, v, log_weights) as the loop does.

    Args:
        inner: The loop that was there before.
    """

    is_technique = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class StepToPlan(Protocol):
    """A training step that is run on fake tensors, as often as techniques need it.

    Attributes:
        module: Whose step it is.
        shared_statistics: Whether ranks exchange the statistics of batches.
        no_stages: Why the blocks of the module cannot be stages of a pipeline; "" where they can.
    """

    module: LightningModule
    shared_statistics: bool
    no_stages: str

    def step(self, rows: int | None = None) -> CountedStep:
        """The step as it is, for a batch of so many rows, None for the batch of the run; counted once for each."""

    def step_with(self, rules: Sequence[Rule], rows: int | None = None) -> CountedStep:
        """The step with rules installed, which are undone.

        Raises:
            AmpError: A technique refuses the module, or the step fails with it.
        """

    def run_with(self, rules: Sequence[Rule], count: Callable[..., T]) -> T:
        """What `count(module, batch, batch_size=, around=)` returns while rules are installed; raises as above."""

    def operator_rates(self) -> Any:
        """Rates that the times of operators follow from."""


class Units:
    """Parameters of which every rank has a part: what a training step, checkpoints and optimisers ask of them.

    Attributes:
        groups: With the axes "replicate" and "shard", where groups of ranks have the same parts; else None.
        offload: Whether this rank's parts lie in the host's memory.
        deferred: Whether the module came without values, so that no rank is to have all of them.
    """

    groups: DeviceMesh | None = None
    offload: bool = False
    deferred: bool = False

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Around the backward pass of a loss, after which gradients are averaged; a collective."""
        raise NotImplementedError

    def optimizers_made(self, optimizers: Iterable[Optimizer]) -> None:
        """The optimisers of the fit exist now."""

    def before_update(self) -> None:
        """An optimiser is about to change the parts."""

    def after_update(self) -> None:
        """An optimiser has changed the parts."""

    def on_rows(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method while the module has this rank's parts as parameters."""
        return method(*args, **kwargs)

    def undo(self) -> None:
        """Give the module back as it was."""


def normalises_by_batch(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm that trains, or has no running statistics and is the same in both modes."""
    return isinstance(layer, AnyBatchNorm) and (
        layer.training or (layer.running_mean is None and layer.running_var is None)
    )
