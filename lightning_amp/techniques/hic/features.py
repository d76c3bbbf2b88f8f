"""Shard features: a rank decodes its own features, and has their weights of a layer that reads all features (S2).

    logit_k[:, own] -> log_softmax over all F_k -> log p(x[:, own]) -> sum over own features -> sum over ranks

    log_softmax(x)_f = x_f - log sum over ranks s of exp(L_s)       L_s = logsumexp of rank s's own x, -inf without any
    backward         g_f - softmax(x)_f * (sum over ranks of sum over own f of g_f)
    layer            y = sum over ranks r of x[:, F^(r)] W[:, F^(r)]^T + bias

Exact up to the order of sums. Features are sharded in runs of ceil(F_k / R); a rank without features still takes part
in the collectives.

    collectives of a step             forward                       backward
    every stratum (not binarized)     1 all-gather [B]              1 all-reduce [B]
    every stratum, with S5            1 reduce-scatter [B, F_k]     1 all-gather [B, F_k]       replace those of S5
    complete decoder                  1 all-reduce of the loss      1 all-reduce (ranks/sharded_region.py)
    the layer                         1 all-reduce [B, h]           1 all-gather [B, F], if x has a gradient

Reduced to 1 / R: scores, logits and likelihood, [B, F_k]; the layer's weight, gradient, optimiser state, and the
columns of x that it keeps. Tables stay replicated; their gradients are zero outside the own columns.

Legend: cell (B), anchor (N), dim (D), stratum_feature (F_k), own_feature (those of this rank), hidden (h), R ranks.
Known limits: second derivatives raise an error; without S5 every rank computes every key; in bf16 the ranks' products
are rounded before they are summed; the optimiser's update must be elementwise, because it gets only the shard.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.derivatives import first_only
from lightning_amp.errors import InstallError
from lightning_amp.shapes import FeatureAnchor, OwnCounts, PerAnchor, PerCell
from lightning_amp.techniques.checks.same_function import mismatch
from lightning_amp.techniques.contract.change import Change, hooks_of, hooks_within
from lightning_amp.techniques.contract.protocol import FEATURE_METHODS, DecomposedDecoder, ScattersFeatures, has_methods
from lightning_amp.techniques.contract.sharded_parameter import shard_parameter
from lightning_amp.techniques.hic.attention.sizes import type_of_sums
from lightning_amp.techniques.hic.rows import FeatureParallel, RowParallelLinear
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.sharded_region import SharedRegion, share_region
from lightning_amp.techniques.ranks.shards import Runs, own_run, run_length


def share_features(decoder: DecomposedDecoder, spec: FeatureParallel, mesh: DeviceMesh) -> Change:
    """Shard the features of a decoder's strata over the model axis."""
    for k, stratum in enumerate(decoder.strata):
        problem = features_problem(stratum)
        if problem:
            raise InstallError(
                f"S2 does not support {type(decoder).__name__!r}, whose stratum {k!r} {problem}; S2 replaces"
                " a child `features` without state that hands all features on (own, scores, log_softmax,"
                " whole): move the rest to the stratum, or leave S2 out"
            )
    axis = mesh["model"]
    swaps: dict[str, nn.Module] = {"region": share_region(decoder, SharedRegion(axis, ("S2",), summed=True))}
    for k, stratum in enumerate(decoder.strata):
        swaps[f"strata.{k}.features"] = ShardedFeatures(stratum.get_buffer("feature_anchor"), axis)
    return Change(swaps, partial=list(decoder.strata.parameters()))


class ShardedFeatures(nn.Module):
    """Features of a stratum that this rank has; made by `share_features`."""

    feature_anchor: Tensor
    columns: Tensor | None
    places: Tensor | None

    def __init__(self, feature_anchor: FeatureAnchor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.n_features = mesh, len(feature_anchor)
        length = run_length(self.n_features, mesh)
        self.sizes = [max(0, min(length, self.n_features - r * length)) for r in range(mesh.size())]
        self.run: slice | None = own_run(self.n_features, mesh)
        # nodes/decoder.py sets these for features that are not a run, or in another order than the ranks'
        self.columns = self.places = None
        # always the same tensor: S4 reads the values of a new tensor, which waits for the device
        self.register_buffer("feature_anchor", self.own(feature_anchor).clone(), persistent=False)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{len(self.feature_anchor)} of {self.n_features} features, ranks={self.mesh.size()}"

    def own(self, values: Shaped[Tensor, "*row stratum_feature"]) -> Shaped[Tensor, "*row own_feature"]:
        """Return the columns of the own features; a view if they are a run."""
        assert values.shape[-1] == self.n_features, "columns of all features of the stratum"
        return values[..., self.run if self.columns is None else self.columns]

    def scores(self, decode: nn.Module, u: PerCell, key: PerAnchor, feature_anchor: FeatureAnchor) -> OwnCounts:
        """Return decoded scores of the own features; partial scores of all features are reduce-scattered."""
        if isinstance(decode, ScattersFeatures):
            return decode.scatter(u, key, feature_anchor, run_length(self.n_features, self.mesh))
        scores: Tensor = decode(u, key, self.feature_anchor)
        return scores

    def log_softmax(self, logits: OwnCounts) -> OwnCounts:
        """Return the log-softmax over all features of the stratum, for the own ones."""
        return log_softmax(logits, self.mesh)

    def whole(self, values: OwnCounts) -> Float[Tensor, "cell stratum_feature"]:
        """Gather all columns; the backward pass returns the gradients of the own ones."""

        def join(own: Tensor) -> Tensor:
            block = collectives.all_gather(self.mesh, F.pad(own, (0, max(self.sizes) - own.shape[1])))
            whole = torch.cat([part[:, :size] for part, size in zip(block, self.sizes, strict=True)], dim=1)
            return whole if self.places is None else whole[:, self.places]

        # no sum: every rank computes the loss of all columns, so that each has the full gradient
        return collectives.linear(join, self.own, values, behind="inside")


def features_problem(stratum: nn.Module) -> str:
    """Return why a stratum's features cannot be sharded, as the text after its name; "" if they can."""
    features = getattr(stratum, "features", None)
    if isinstance(features, ShardedFeatures):
        return "has its features shared already"
    if not has_methods(features, FEATURE_METHODS):
        return f"has features={features!r}"
    if "feature_anchor" not in dict(stratum.named_buffers(recurse=False)):
        return "has no buffer `feature_anchor`"
    values = torch.arange(6.0).view(2, 3)
    with torch.no_grad():
        expected = {
            "own": values,
            "scores": values[:, [2, 0, 1]],
            "log_softmax": values.log_softmax(1),
            "whole": values,
        }
        problem = mismatch(features, expected, _run, rtol=1e-6)
    return f"has a leaf `features` that {problem}" if problem else ""


def _run(features: Any) -> dict[str, Tensor]:
    """Return what a leaf computes for 2 cells and 3 features."""
    values, key = torch.arange(6.0).view(2, 3), torch.eye(3)
    return {
        "own": features.own(values),
        "scores": features.scores(
            lambda u, key, feature_anchor: (u @ key.T)[:, feature_anchor], values, key, torch.tensor([2, 0, 1])
        ),
        "log_softmax": features.log_softmax(values),
        "whole": features.whole(values),
    }


def log_softmax(logits: OwnCounts, mesh: DeviceMesh) -> OwnCounts:
    """Return the log-softmax over all ranks' features, for the own ones; every rank must call it."""
    return cast(Tensor, _LogSoftmax.apply(logits, mesh))  # type: ignore[no-untyped-call]


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, mesh: DeviceMesh) -> Tensor:
        own = logits.to(type_of_sums(logits.dtype)).logsumexp(dim=1)
        # one number per cell and rank; minus infinity, from a rank without columns, adds nothing
        normaliser = collectives.all_gather(mesh, own).logsumexp(dim=0)
        result = (logits - normaliser[:, None]).to(logits.dtype)
        ctx.mesh = mesh
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @first_only("a softmax over features of several ranks; leave 'S2' out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        # the softmax is exp(result), so only the result is saved. A rank without columns adds zeros, because the others
        # wait for it. grad has the own columns; the normaliser depends on the columns of all ranks, so their sum is
        # needed
        total = collectives.all_reduce(ctx.mesh, grad.sum(dim=1, dtype=type_of_sums(grad.dtype)))
        return (grad - result.exp() * total[:, None]).to(grad.dtype), None


def share_rows(linear: nn.Module, spec: RowParallelLinear, mesh: DeviceMesh) -> Change:
    """Shard the input features of a linear layer over the model axis."""
    problem = _linear_problem(linear)
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
    """Linear layer with this rank's columns of the weight; `share_rows` makes it and sets the weight."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # in the order of nn.Linear, because optimisers number parameters by it
        self.register_parameter("weight", None)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={self.mesh.size()}"

    def forward(self, x: Float[Tensor, "*cell feature"] | SparseCounts) -> Float[Tensor, "*cell hidden"]:
        """Return the layer's output for all features, replicated."""
        if isinstance(x, SparseCounts):
            # SparseCounts is no tensor, but F.linear supports it
            own = cast(Tensor, x[..., own_run(x.shape[-1], self.mesh)])
        else:
            runs = Runs(mesh=self.mesh, n=x.shape[-1], dim=x.dim() - 1)
            # a copy, because a view would keep all of x alive until the backward pass

            def take(x: Tensor) -> Tensor:
                return runs.own(x).clone(memory_format=torch.contiguous_format)

            own = collectives.linear(take, runs.join, x, behind="outside")
        y = collectives.leave(self.mesh, F.linear(own, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _linear_problem(linear: nn.Module) -> str:
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__!r}"
    if linear._parameters.get("weight") is None:
        return "computes its weight from other parameters"
    # also hooks on the parameter, which is replaced by the shard
    found = [*hooks_within(linear), *hooks_of(linear.get_parameter("weight"), "weight")]
    return f"has {', '.join(found)}" if found else ""
