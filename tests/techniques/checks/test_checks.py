"""Claim: the checks of decoders' parts take rounding for rounding, say what attention reaches, and refuse keys that mix
channels or rows, by hooks or by their own forward; trying leaves a key as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_amp.errors import InstallError
from lightning_amp.installing.describe_decoder import _needed
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.models.decoders.stratum_keys import AttentionKey, FullAttention, LocalAttention
from lightning_amp.techniques.checks.key import full_problem, reach_of
from lightning_amp.techniques.checks.same_function import close, difference, largest
from lightning_amp.techniques.hic.attention.install import FusedLocalAttention, chunk_attention
from lightning_amp.techniques.hic.hidden import share_hidden
from lightning_amp.techniques.hic.nodes.decoder import share_anchors
from lightning_amp.techniques.hic.rows import DomainParallel, HiddenParallel
from tests.techniques.sharded_cases import Case, Model, make_plan, model_mesh

ONE = torch.tensor([1.0, 100.0], dtype=torch.float64)
NAN, INF = torch.tensor([torch.nan, 1.0]), torch.tensor([torch.inf, 1.0])


def test_what_is_the_same_and_what_is_not() -> None:
    same: list[tuple[Tensor, Tensor]] = [
        (ONE * (1 + 1e-10), ONE),
        (ONE + 5e-8, ONE),  # as a share of the largest number
        (INF, INF),
        (torch.tensor([True]), torch.tensor([True])),
        (torch.ones(0), torch.ones(0)),
    ]
    other = [
        (ONE + 5e-7, ONE),
        (ONE.float(), ONE),
        (ONE[:, None], ONE),
        (NAN, NAN),
        (NAN, torch.ones(2)),
        (torch.ones(2), NAN),
        (torch.ones(2), INF),
        (-INF, INF),
        (INF, torch.ones(2)),
        (torch.tensor([1]), torch.tensor([2])),
    ]
    assert all(close(found, right, rtol=1e-9) for found, right in same)
    assert not any(close(found, right, rtol=1e-9) for found, right in other)
    assert close(NAN, NAN, rtol=1e-9, equal_nan=True)
    assert not close(NAN, INF, rtol=1e-9, equal_nan=True)
    assert not close(ONE + 5e-8, ONE, rtol=1e-9, scale=1.0)


class Attention(nn.Module):
    """Full attention; to q as a constant if it is detached."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        q = q.detach() if self.detached else q
        return (q @ k.T / q.shape[1] ** 0.5).softmax(-1) @ values


def test_gradients_are_compared_too() -> None:
    assert not full_problem(Attention(detached=False))
    assert "gradient of q" in full_problem(Attention(detached=True))


def test_the_difference_is_named() -> None:
    for found, right, said in (
        ({"y": ONE + 1}, {"y": ONE}, "y tensor"),
        ({"y": torch.ones(20)}, {"y": torch.zeros(20)}, "y that differs by up to 1.0e+00, where the largest"),
        ({"y": torch.ones(20) > 0}, {"y": torch.ones(20) < 0}, "y that differs by up to 1.0e+00"),
        ({"y": ONE[:1]}, {"y": ONE}, "y of the shape (1,) and torch.float64 and not of the shape (2,)"),
        ({"y": None}, {"y": ONE}, "y None and not of the shape"),
        ({"y": ONE}, {"y": None}, "and torch.float64 and not None"),
        ({"y": 1.0}, {"y": 2.0}, "y 1.0 and not 2.0"),
    ):
        assert said in difference(found, right, rtol=1e-9)
    assert difference({"a": None, "b": 1, "y": ONE}, {"y": ONE, "a": None, "b": 1}) == ""
    assert largest(torch.tensor([True])) == largest(torch.tensor([-1.0, torch.inf])) == 1


class Undeclared(nn.Module):
    """Full attention written elsewhere."""

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, values)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, values, is_causal=True)


def test_reach_of_attention() -> None:
    for attention, full, known_from in (
        (LocalAttention(4, 3), False, "declared by LocalAttention"),
        (FullAttention(), True, "declared by FullAttention"),
        (chunk_attention(LocalAttention(4, 3), buckets=1), False, "declared by LocalAttention"),
        (FusedLocalAttention(4, 3), False, "detected: FusedLocalAttention has buckets of anchors"),
        (Undeclared(), True, "detected: Undeclared computes softmax(q k^T D^-0.5) values on an example"),
        (Causal(), False, "taken as local: Causal declares no `reach`, has no buckets and is no full attention"),
    ):
        assert reach_of(attention) == (full, known_from)


def test_the_shape_of_a_decoder_says_it() -> None:
    model = Model(Case(key="full_attention"))
    shape = describe(model, batch_size=4).decoder
    assert shape is not None
    assert (shape.attention, shape.full, shape.window) == (True, True, 1)
    assert shape.known_from == "declared by FullAttention"
    # one key that is local needs the techniques of local attention
    model.decoder.strata[1].key.attention = LocalAttention(12, 5)  # type: ignore[union-attr]
    mixed = describe(model, batch_size=4).decoder
    assert mixed is not None
    assert (mixed.full, mixed.known_from) == (False, "declared by LocalAttention")


Keys = tuple[Tensor, Tensor]
CASE = Case(dim=8)


@pytest.fixture
def mesh() -> DeviceMesh:
    """Two ranks whose collectives do nothing, in this process alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return model_mesh(2)


def altered(name: str, change: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
    """A key class whose key is another function of it and of v."""

    def forward(self: Any, v: Tensor) -> Keys:
        key, val = AttentionKey.forward(self, v)
        return change(self, v, key), val

    return type(name, (AttentionKey,), {"forward": forward})


Normalised = altered("Normalised", lambda m, v, key: key / key.norm(dim=1, keepdim=True))
Dropped = altered("Dropped", lambda m, v, key: F.dropout(key, 0.5, m.training))
ReadsWeight = altered("ReadsWeight", lambda m, v, key: key + v @ m.value.weight.T)
RowMean = altered("RowMean", lambda m, v, key: key - key.mean(0))
# right for the last rows
Shifted = altered("Shifted", lambda m, v, key: key + F.pad(v, (0, 0, 0, 1))[1:])


class OtherSpine(AttentionKey):
    def spine(self, v: Tensor) -> Tensor:
        return super().spine(v).softmax(1)


def refuse(kind: type[nn.Module], message: str, share: Callable[[nn.Module], object]) -> None:
    """A key of that kind is refused, and stays what it was."""
    decoder = Model(CASE).decoder.eval()
    key = decoder.get_submodule("strata.2.key")
    # not made by its constructor, which a technique does not see either
    key.__class__ = kind
    modules, state = dict(decoder.named_modules()), vars(key).copy()
    with pytest.raises(InstallError, match=f"'strata.2.key'.* '{kind.__name__}' {message}; allowed is a key without"):
        share(decoder)
    assert dict(decoder.named_modules()) == modules
    assert vars(key) == state


OF_CHANNELS = "and has a 'forward' that returns other values for some of the channels than for all of them"


@pytest.mark.parametrize(("kind", "message"), [
    (Normalised, OF_CHANNELS),
    (OtherSpine, OF_CHANNELS.replace("forward", "spine")),
    (Dropped, OF_CHANNELS),
    (ReadsWeight, "and has a 'forward' that fails on an example, with stand-ins for its children, .*"),
])  # fmt: skip
def test_s5_refuses_keys_that_mix_channels(kind: type[nn.Module], message: str, mesh: DeviceMesh) -> None:
    refuse(kind, message, lambda decoder: share_hidden(decoder, HiddenParallel(), mesh))


@pytest.mark.parametrize("kind", [RowMean, Shifted])
def test_nodes_refuses_keys_that_mix_rows(kind: type[nn.Module], mesh: DeviceMesh) -> None:
    message = "that has a 'forward' that returns other values for some of the anchors than for all of them"
    refuse(kind, message, lambda decoder: share_anchors(decoder, DomainParallel(), mesh))


@pytest.mark.parametrize(("strategy", "kinds"), [("S5", [RowMean, Shifted]), ("nodes", [Normalised])])
def test_each_takes_what_the_other_refuses(strategy: str, kinds: list[type[nn.Module]], mesh: DeviceMesh) -> None:
    for kind in kinds:
        model = Model(CASE)
        model.decoder.get_submodule("strata.1.key").__class__ = kind
        install(model, make_plan((strategy,), 2), mesh)


@pytest.mark.parametrize(("kind", "refused"), [(AttentionKey, ""), (Normalised, "S5"), (RowMean, "nodes")])
def test_the_policy_knows_what_would_be_refused(kind: type[nn.Module], refused: str) -> None:
    decoder = Model(CASE).decoder
    decoder.get_submodule("strata.1.key").__class__ = kind
    needed = _needed(decoder)
    assert [strategy for strategy in ("S5", "nodes") if not needed[strategy]] == ([refused] if refused else [])


def test_hooks_are_refused(mesh: DeviceMesh) -> None:
    for strategy, name, message in (
        ("S5", "key", r"has \['forward_hooks'\], which would see a part of its values"),
        ("nodes", "key", r"has \['forward_hooks'\], which would see a part of its values"),
        ("nodes", "key.ff", "and without hooks"),
    ):
        model = Model(CASE)
        model.decoder.get_submodule(f"strata.1.{name}").register_forward_hook(lambda *_: None)
        with pytest.raises(InstallError, match=f"(?s){strategy} .*{message}"):
            install(model, make_plan((strategy,), 2), mesh)
