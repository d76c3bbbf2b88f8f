"""A decoder of several resolutions of HiGLUE's shape, as a user might have written it, and a module around it.

Written from the equations and the names of the parts; attention is the `local-attention` package's.
`Bands` says in what one copy differs from another.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from local_attention import LocalAttention
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.utils.checkpoint import checkpoint

from tests.adapters.higlue_shaped import GEGLU, ZeroInflated, randomise


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


class Several(LightningModule):
    """An encoder, the decoder, and nothing else."""

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

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=2e-3)


def batches(kind: Bands, steps: int = 4, cells: int = 6) -> list[dict[str, Tensor]]:
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.poisson(torch.full((cells, kind.n_features), 0.7, dtype=torch.float64), generator=generator)
        x = (x > 0).double() if kind.binarize else x
        library = torch.stack([x[:, band[band >= 0]].sum(1) + 1 for band in kind.bands()], dim=1)
        found.append({"x": x, "b": torch.arange(cells) % kind.experiments, "l": library})
    return found
