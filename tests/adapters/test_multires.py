"""Claim: HiGLUE's decoder of several resolutions computes the same under every plan, with nothing edited.

Its own checkpointing and its subsets of anchors go on working; a copy that computes anything else is left alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from local_attention import LocalAttention
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.utils.checkpoint import checkpoint

from lightning_amp.adapters.adapt import adapt
from lightning_amp.adapters.forms.multires import MultiResDecoder
from lightning_amp.errors import AmpError, InstallError, ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.describe_decoder import with_unsupported
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.techniques.contract.protocol import find_decoders
from tests.adapters.foreign_cases import differences, possible, trained, values
from tests.adapters.higlue_shaped import GEGLU, ZeroInflated, randomise
from tests.each import FEW
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import make_plan, model_mesh


@dataclass(frozen=True, kw_only=True)
class Bands:
    """What differs between copies: strata and anchors of every resolution, and options.

    `complete` says whether every anchor has a feature in every stratum, and `drawn` how many anchors of a resolution a
    step is to take.
    """

    sizes: tuple[tuple[int, int], ...] = ((3, 17), (4, 29))
    complete: bool = True
    attention: bool = True
    activation: bool = True
    bias: bool = True
    head: bool = True
    binarize: bool = False
    checkpoint: bool = False
    drawn: int | None = None
    dim: int = 12
    window: int = 5
    experiments: int = 2

    def bands(self) -> list[Tensor]:
        """Columns [stratum, anchor] of every resolution."""
        found, end = [], 0
        for strata, anchors in self.sizes:
            whole = torch.ones(strata, anchors, dtype=torch.bool)
            if not self.complete:
                whole &= torch.arange(anchors) < anchors - torch.arange(strata)[:, None]
                whole[:, 4] = False
            band = torch.full(whole.shape, -1)
            band[whole] = torch.arange(end, end + int(whole.sum()))
            found.append(band)
            end += int(whole.sum())
        return found

    @property
    def n_features(self) -> int:
        return 1 + max(int(band.max()) for band in self.bands())

    @property
    def n_anchors(self) -> int:
        return sum(anchors for _, anchors in self.sizes)


class Decoder(nn.Module):
    def __init__(self, kind: Bands) -> None:
        super().__init__()
        self.kind, self.res_specs, offset = kind, [], 0
        for i, ((strata, anchors), band) in enumerate(zip(kind.sizes, kind.bands(), strict=True)):
            spec = SimpleNamespace(n_strata=strata, n_anchors=anchors, anchor_offset=offset)
            self.res_specs.append(spec)
            self.register_buffer(f"band_idx_{i}", band)
            offset += anchors
        self.use_attn, self.use_activation, self.binarize = kind.attention, kind.activation, kind.binarize
        self.anchor_subsample, self.checkpoint = kind.drawn, kind.checkpoint
        self.auto_checkpoint = [False for _ in kind.sizes]
        self.attn_windows = [kind.window for _ in kind.sizes] if kind.attention else []
        for name in ("scale_lin", "bias", "log_theta", "ber_logits" if kind.binarize else "zi_logits"):
            self.register_parameter(name, nn.Parameter(torch.zeros(kind.experiments, kind.n_features)))
        d = kind.dim

        def lists(make: Any) -> nn.ModuleList:
            return nn.ModuleList(nn.ModuleList(make(k) for k in range(1, n)) for n, _ in kind.sizes)

        self.key_convs_by_res = lists(lambda k: nn.Conv1d(d, d, 2, dilation=k, groups=d, bias=kind.bias))
        self.key_conv_activations_by_res = lists(lambda _: nn.LeakyReLU(0.2))
        if kind.attention:
            self.prenorm_layers_by_res = lists(lambda _: nn.LayerNorm(d))
            self.qk_layers_by_res = lists(lambda _: nn.Linear(d, d, bias=False))
            self.attn_layers_by_res = lists(
                lambda _: LocalAttention(dim=d, window_size=kind.window, autopad=True, shared_qk=True)
            )
            self.postnorm_layers_by_res = lists(lambda _: nn.LayerNorm(d))
            self.ff_layers_by_res = lists(lambda _: nn.Linear(d, 2 * d, bias=False))
            self.ff_activation = GEGLU()
        self.strata_weights_by_res = nn.ParameterList(torch.ones(n) for n, _ in kind.sizes)
        self.strata_weight_heads = nn.ModuleList(nn.Linear(d, n) for n, _ in kind.sizes) if kind.head else None

    def sample_feature_subset(self) -> Any:
        if not self.anchor_subsample:
            return None
        anchors, columns = [], []
        for i, spec in enumerate(self.res_specs):
            anchors.append(torch.randperm(spec.n_anchors)[: self.anchor_subsample].sort()[0])
            columns.append(self.get_buffer(f"band_idx_{i}")[:, anchors[-1]].flatten())
        cols = torch.cat(columns)
        return SimpleNamespace(anchors=anchors, cols=cols[cols >= 0])

    def key(self, i: int, k: int, v: Tensor) -> Tensor:
        if k == 0:
            return v
        lists: Any = self
        key = lists.key_convs_by_res[i][k - 1](F.pad(v, (0, 0, 0, k)).T).T
        if self.use_activation:
            key = lists.key_conv_activations_by_res[i][k - 1](key)
        if self.use_attn:
            p = lists.prenorm_layers_by_res[i][k - 1](key)
            qk = lists.qk_layers_by_res[i][k - 1](p)[None]
            key = key + lists.attn_layers_by_res[i][k - 1](qk, qk, p[None])[0]
            wide = lists.ff_layers_by_res[i][k - 1](lists.postnorm_layers_by_res[i][k - 1](key))
            key = key + self.ff_activation(wide)
        return key

    def shares(self, i: int, u: Tensor) -> Tensor:
        logits = self.strata_weights_by_res[i][None]
        return (logits if self.strata_weight_heads is None else logits + self.strata_weight_heads[i](u)).softmax(dim=1)

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Any, subset: Any = None) -> Any:  # noqa: E741
        l = u.new_ones(len(u), 1) if l is None else l  # noqa: E741
        l = l.expand(-1, len(self.res_specs))  # noqa: E741
        places, means = [], []
        for i, spec in enumerate(self.res_specs):
            own = v[spec.anchor_offset : spec.anchor_offset + spec.n_anchors]
            for k, row in enumerate(self.get_buffer(f"band_idx_{i}")):
                if self.checkpoint and self.training:
                    key = checkpoint(self.key, i, k, own, use_reentrant=False)
                else:
                    key = self.key(i, k, own)
                drawn = torch.arange(spec.n_anchors) if subset is None else subset.anchors[i]
                drawn = drawn[row[drawn] >= 0]
                at = row[drawn]
                logits = F.softplus(self.scale_lin[b][:, at]) * (u @ key[drawn].T) + self.bias[b][:, at]
                share = l[:, i : i + 1] * self.shares(i, u)[:, k : k + 1]
                means.append(logits if self.binarize else logits.softmax(dim=1) * share)
                places.append(at)
        mean, at = torch.cat(means, dim=1), torch.cat(places)
        if self.binarize:
            return Bernoulli(logits=mean)
        log_theta = self.log_theta[b][:, at]
        return ZeroInflated(self.zi_logits[b][:, at], log_theta.exp(), (mean + 1e-7).log() - log_theta)


class Several(Optimised, by=torch.optim.RMSprop, lr=2e-3):
    def __init__(self, kind: Bands, *, decoder: Any = Decoder) -> None:
        super().__init__()
        self.decoder = decoder(kind)
        self.encoder = nn.Linear(kind.n_features, kind.dim)
        self.anchors = nn.Parameter(torch.zeros(kind.n_anchors, kind.dim))
        self.double()
        randomise(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        u, x = self.encoder(batch["x"].log1p()), batch["x"]
        subset = self.decoder.sample_feature_subset()
        if subset is None:
            given = self.decoder(u, self.anchors, batch["b"], batch["l"])
        else:
            given, x = self.decoder(u, self.anchors, batch["b"], batch["l"], subset=subset), x[:, subset.cols]
        return -given.log_prob(x).mean()  # type: ignore[no-any-return]


def batches(kind: Bands, steps: int = 4, cells: int = 6) -> list[dict[str, Tensor]]:
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.poisson(torch.full((cells, kind.n_features), 0.7, dtype=torch.float64), generator=generator)
        x = (x > 0).double() if kind.binarize else x
        library = torch.stack([x[:, band[band >= 0]].sum(1) + 1 for band in kind.bands()], dim=1)
        found.append({"x": x, "b": torch.arange(cells) % kind.experiments, "l": library})
    return found


BASE = Bands()
KINDS = {
    "two resolutions": BASE,
    "one resolution": Bands(sizes=((4, 29),)),
    "three, one of them the anchors alone": Bands(sizes=((1, 11), (3, 17), (4, 29))),
    "features missing": replace(BASE, complete=False),
    "checkpointed": replace(BASE, checkpoint=True),
    "a subset of the anchors": replace(BASE, drawn=9),
    "a subset, features missing": replace(BASE, drawn=9, complete=False),
    "convolution": replace(BASE, attention=False),
    "plain convolution": replace(BASE, attention=False, activation=False, bias=False),
    "no head": replace(BASE, head=False, activation=False),
    "binary": replace(BASE, binarize=True),
    "one experiment": replace(BASE, experiments=1),
}
CORNERS = ("two resolutions", "a subset, features missing", "convolution")
ON_ONE = ("S1,stream", "S1,S4,fused,sparse,stream", "S1,S3,S4", "S1,fused,recompute")
ON_TWO = ("S1,strata", "S1,S2,S4,stream", "S1,S4,fused,sparse,stream,strata", "S1,recompute,strata")


def fit(kind: Bands, strategies: str | None, *, rank: int = 0, ranks: int = 1, decoder: Any = Decoder) -> Any:
    """What is trained after a fit; None is Lightning's own strategy for one device."""
    module = Several(kind, decoder=decoder)
    torch.manual_seed(0)
    # its own checkpointing runs outside of what Lightning's "64-true" does in a step
    return trained(module, batches(kind), strategies, rank=rank, ranks=ranks, precision="32-true")


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        name if name in CORNERS else pytest.param(name, marks=(pytest.mark.exhaustive, pytest.mark.release))
        for name in KINDS
    ],
)
def test_trains_the_same_under_every_plan(name: str) -> None:
    kind = KINDS[name]
    expected = fit(kind, None)
    assert differences(expected, values(Several(kind))) > 1e-2
    for strategies in ON_ONE:
        chosen = possible(strategies, attention=kind.attention, binarize=kind.binarize)
        assert differences(fit(kind, chosen), expected) <= 1e-9


def refusals(ranks: int) -> dict[str, str]:
    """What is said of what it cannot have, and of a subset where ranks have parts of all features."""
    kind, found = KINDS["a subset of the anchors"], {}
    for strategy in ("S5", "nodes", "S2"):
        module = Several(kind)
        adapt(module)
        try:
            install(module, make_plan([strategy], ranks), model_mesh(ranks))
            module.training_step(batches(kind, steps=1)[0], 0)
        except AmpError as error:
            found[strategy] = str(error)
    return found


def on_two_ranks(rank: int, ranks: int, few: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = {"refused": refusals(ranks)}
    names = ("two resolutions", "features missing", "convolution")
    for turn, name in enumerate(names):
        kind = KINDS[name]
        expected = fit(kind, None)
        for strategies in ON_TWO[turn :: len(names)] if few else ON_TWO:
            chosen = possible(strategies, attention=kind.attention, binarize=kind.binarize)
            found[name, chosen] = differences(fit(kind, chosen, rank=rank, ranks=ranks), expected)
    drawn = KINDS["a subset, features missing"]
    for strategies in ("S1,strata", "S1,stream,strata"):
        found["drawn", strategies] = differences(fit(drawn, strategies, rank=rank, ranks=ranks), fit(drawn, None))
    single = replace(KINDS["one resolution"], attention=False)
    found["S5", "S1,S5"] = differences(fit(single, "S1,S5", rank=rank, ranks=ranks), fit(single, None))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("few", FEW)
def test_trains_the_same_on_two_ranks(few: bool, tmp_path: Any) -> None:
    for found in run_ranks(on_two_ranks, 2, tmp_path, few, timeout=120):
        refused = found.pop("refused")
        assert "S5 cannot shard the channels of" in refused["S5"]
        assert "nodes does not support 'MultiResDecoder'" in refused["nodes"]
        assert "subset of its anchors, and S2 share its features or channels" in refused["S2"]
        assert "or set anchor_subsample=None" in refused["S2"]
        assert len(found) == (7 if few else 15)
        assert {key: far for key, far in found.items() if not far <= 1e-9} == {}


def test_is_detected_with_what_its_parts_can_have() -> None:
    module = Several(BASE)
    keys, state = list(module.state_dict()), torch.get_rng_state()
    found = adapt(module)
    assert torch.equal(torch.get_rng_state(), state), "no random number was used up"
    assert list(found.decoders) == ["decoder"]
    assert found.notes == [
        "'decoder' has 2 resolutions, and every stratum is predicted with the anchors of the largest"
    ]
    assert list(module.state_dict()) == keys
    ours = find_decoders(module)["decoder"]
    assert isinstance(ours, MultiResDecoder)
    shape = with_unsupported(module, describe(module, batch_size=6)).decoder
    assert shape is not None
    assert shape.unsupported == ("S5", "nodes")
    assert not shape.full
    kind = type(module.decoder).__name__
    assert shape.known_from == f"detected: {kind} computes what our decoder does with it"
    assert (shape.anchors, shape.window, shape.n_batches, len(shape.features)) == (29, 5, 2, 7)
    found.undo()
    assert "forward" not in vars(module.decoder)


@pytest.mark.long
def test_a_step_holds_little_of_what_the_own_forward_holds() -> None:
    kind = Bands(sizes=((8, 150), (8, 300)), dim=32, window=32, experiments=1)

    def peak(strategies: str) -> int:
        module, (batch,) = Several(kind), batches(kind, steps=1, cells=16)
        adapt(module)
        install(module, make_plan(strategies.split(","), 1)) if strategies else None
        if not strategies:
            vars(module.decoder).pop("forward")
        with LiveBytes() as live:
            module.training_step(batch, 0).backward()
        return live.peak

    assert peak("S4,fused,sparse,stream") <= peak("") / 5


def test_libraries_of_the_cells_of_every_resolution_or_none() -> None:
    module, (batch,) = Several(BASE), batches(BASE, steps=1)
    u = torch.randn(6, BASE.dim, dtype=torch.float64)
    allowed = [batch["l"], batch["l"][:, :1], None]
    eager = [module.decoder(u, module.anchors, batch["b"], given).log_prob(batch["x"]).sum() for given in allowed]
    adapt(module)
    for given, expected in zip(allowed, eager, strict=True):
        found = module.decoder(u, module.anchors, batch["b"], given).log_prob(batch["x"]).sum()
        assert (found - expected).abs() <= 1e-10 * expected.abs()
    with pytest.raises(AmpError, match=r"2 resolutions was called with l=\(6, 3\); allowed are None and"):
        module.decoder(u, module.anchors, batch["b"], torch.ones(6, 3).double())


def test_a_subset_that_is_none_is_refused() -> None:
    kind = KINDS["a subset of the anchors"]
    module, (batch,) = Several(kind), batches(kind, steps=1)
    adapt(module)
    subset = module.decoder.sample_feature_subset()
    subset.cols = subset.cols.flip(0)
    u = torch.randn(6, kind.dim, dtype=torch.float64)
    with pytest.raises(InstallError, match="which are not those of the anchors that it says to have drawn"):
        module.decoder(u, module.anchors, batch["b"], batch["l"], subset=subset)


class Padded(Decoder):
    """The last bucket is filled with the last row."""

    def key(self, i: int, k: int, v: Tensor) -> Tensor:
        missing = -len(v) % self.kind.window
        if not k or not missing:
            return super().key(i, k, v)
        return super().key(i, k, torch.cat([v, v[-1:].expand(missing, -1)]))[: len(v)]


class Other(Decoder):
    def __init__(self, kind: Bands) -> None:
        super().__init__(kind)
        for layers in self.attn_layers_by_res:
            layers[0].causal, layers[0].look_forward = True, 0  # type: ignore[index]


class FirstOnly(Decoder):
    """All resolutions are parts of the first one's library."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Any, subset: Any = None) -> Any:  # noqa: E741
        return super().forward(u, v, b, l[:, :1], subset)


class Leaving(Decoder):
    aux: Any = 0.0

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Any, subset: Any = None) -> Any:  # noqa: E741
        self.aux = v.square().mean()
        return super().forward(u, v, b, l, subset)


def at_the_first_batch(name: str, shows: Any) -> type[Decoder]:
    """Another u where `shows` says so of the decoder, u and the subset."""

    def forward(self: Any, u: Tensor, v: Tensor, b: Tensor, l: Any, subset: Any = None) -> Any:  # noqa: E741
        return Decoder.forward(self, u * 1.001 if shows(self, u, subset) else u, v, b, l, subset)

    return type(name, (Decoder,), {"forward": forward})


@pytest.mark.long
def test_what_only_a_real_batch_shows_is_refused_with_it() -> None:
    drawn, value = "a subset, features missing", "another log-probability in the strata"
    cells = at_the_first_batch("Cells", lambda self, u, subset: len(u) == 6)
    for kind, decoder, said in (
        ("two resolutions", cells, value),
        (drawn, cells, value),
        (drawn, at_the_first_batch("Drawing", lambda self, u, subset: subset is not None), value),
        (
            "one experiment",
            at_the_first_batch("Sized", lambda self, u, _: self.bias.shape[1] == self.kind.n_features),
            value,
        ),
    ):
        with pytest.raises(ModelError, match=f"(?s){said}.* on the first batch"):
            fit(KINDS[kind], "S1,stream", decoder=decoder)


DIFFERENT: dict[Callable[..., Any], str] = {
    Padded: "has another",
    Other: "its attention has causal=True where ours has False, look_forward=0 where ours has 1",
    FirstOnly: "has another log-probability",
    Leaving: "changes its attributes ['aux'] in forward",
    lambda d: setattr(d.attn_layers_by_res[0][1], "window_size", 7): "attention with windows of",
    lambda d: setattr(d, "band_idx_0", d.band_idx_0.flip(1)): "whose columns do not follow each other from 0 on",
    lambda d: d.attn_layers_by_res[1][1].register_forward_hook(lambda *_: None): "has hooks on modules of it",
}


@pytest.mark.long
def test_a_copy_that_differs_is_noted_and_left_alone() -> None:
    for change, said in DIFFERENT.items():
        module = Several(BASE, decoder=change if isinstance(change, type) else Decoder)
        if not isinstance(change, type):
            change(module.decoder)
        found = adapt(module)
        assert not found.decoders
        assert said in found.notes[0]
        assert "forward" not in vars(module.decoder)


def test_a_changed_resolution_is_refused_at_the_next_call() -> None:
    module, (batch,) = Several(BASE), batches(BASE, steps=1)
    adapt(module)
    module.decoder.res_specs = list(module.decoder.res_specs)
    with pytest.raises(InstallError, match="'res_specs' is another list than it was"):
        module.training_step(batch, 0)
