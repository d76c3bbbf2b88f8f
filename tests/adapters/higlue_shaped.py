"""A decoder of HiGLUE's shape as a user might have written it, and a LightningModule around it that knows no strategy.

Written from the equations and the names of the parts; attention is the `local-attention` package's.
`Copy` says in what one copy differs from another.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from local_attention import LocalAttention
from torch import Tensor, nn
from torch.distributions import Bernoulli, NegativeBinomial


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What differs between copies of the decoder.

    `least` is added to the means, and `least_zero` to the probability of a zero; v has `more_rows` than anchors.
    """

    attention: bool = True
    chained: bool = False
    projected: bool = False
    residual: bool = True
    postnorm: bool = True
    activation: bool = True
    centred: bool = False
    bias: bool = True
    head: bool = True
    weights: bool = True
    binarize: bool = False
    least: float = 1e-7
    least_zero: float = 1e-7
    anchors_first: bool = True
    dim: int = 12
    anchors: int = 23
    more_rows: int = 0
    strata: int = 4
    window: int = 5
    experiments: int = 2

    def nodes(self) -> list[list[int]]:
        """Anchors of every stratum; one is left out, so that they are no run."""
        every = [list(range(self.anchors - k)) for k in range(self.strata)]
        return [rows[:3] + rows[4:] for rows in every]


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)


class ZeroInflated(NegativeBinomial):
    """Zeros are more likely by a mass that is added to the density; a small number keeps logarithms finite."""

    least = 1e-7

    def __init__(self, zi_logits: Tensor, total_count: Tensor, logits: Tensor) -> None:
        super().__init__(total_count, logits=logits)
        self.zi_logits = zi_logits

    def log_prob(self, value: Tensor) -> Tensor:
        density = super().log_prob(value)
        at_zero = (density.exp() + self.zi_logits.exp() + self.least).log()
        return torch.where(value == 0, at_zero, density) - F.softplus(self.zi_logits)


class Exact(ZeroInflated):
    least = 0.0


class Decoder(nn.Module):
    def __init__(self, copy: Copy) -> None:
        super().__init__()
        lists = copy.nodes()
        ends = torch.tensor([0, *map(len, lists)]).cumsum(0).tolist()
        columns = [list(range(a, b)) for a, b in pairwise(ends)]
        self.feature_masks, self.strata_masks = (lists, columns) if copy.anchors_first else (columns, lists)
        self.copy = copy
        self.use_attn, self.use_activation = copy.attention, copy.activation
        self.shifted_additive, self.binarize = copy.bias, copy.binarize
        tables = ("scale_lin", "bias", "log_theta", "ber_logits" if copy.binarize else "zi_logits")
        for name in tables:
            self.register_parameter(name, nn.Parameter(torch.zeros(copy.experiments, ends[-1])))
        d = copy.dim
        further = range(1, copy.strata)
        self.prenorm_layers = nn.ModuleList(nn.LayerNorm(d) for _ in further)
        self.postnorm_layers = nn.ModuleList(nn.LayerNorm(d) for _ in further)
        self.key_layers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in further)
        self.value_layers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in further)
        self.ff_layers = nn.ModuleList(nn.Linear(d, 2 * d, bias=False) for _ in further)
        self.ff_activations = nn.ModuleList(GEGLU() for _ in further)
        self.attn_layers = nn.ModuleList(
            LocalAttention(dim=d, window_size=copy.window, autopad=True, shared_qk=True) for _ in further
        )
        padding: Any = "same" if copy.centred else 0
        self.key_convs = nn.ModuleList(
            nn.Conv1d(d, d, 2, dilation=k, padding=padding, groups=d, bias=copy.bias) for k in further
        )
        self.key_conv_activations = nn.ModuleList(nn.LeakyReLU(0.2) for _ in further)
        if copy.weights:
            self.strata_weights = nn.Parameter(torch.ones(copy.strata))
        if copy.head:
            self.strata_weight_head = nn.Linear(d, copy.strata)

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        anchors, columns = (
            (self.feature_masks, self.strata_masks)
            if self.copy.anchors_first
            else (self.strata_masks, self.feature_masks)
        )
        scale, bias, weights = F.softplus(self.scale_lin[b]), self.bias[b], self.shares(u)
        parts = []
        for k, (nodes, own) in enumerate(zip(anchors, columns, strict=True)):
            key, v = self.key(k, v)
            logits = scale[:, own] * (u @ key.T)[:, nodes] + bias[:, own]
            parts.append(logits if self.binarize else logits.softmax(dim=1) * l * weights[:, k : k + 1])
        mean = torch.cat(parts, dim=1)
        if self.binarize:
            return Bernoulli(logits=mean)
        kind = ZeroInflated if self.copy.least_zero else Exact
        log_theta = self.log_theta[b]
        logits = (mean + self.copy.least).log() - log_theta
        return kind(self.zi_logits[b], log_theta.exp(), logits)

    def shares(self, u: Tensor) -> Tensor:
        if not self.copy.weights:
            return u.new_ones(1, self.copy.strata)
        logits = self.strata_weights[None]
        return (logits + self.strata_weight_head(u) if self.copy.head else logits).softmax(dim=1)

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        """Key of a stratum, and v for the next one."""
        if k == 0:
            return v, v
        i = k - 1
        if not self.use_attn:
            padded = v if self.copy.centred else F.pad(v, (0, 0, 0, k))
            key = self.key_convs[i](padded.T).T
            return (self.key_conv_activations[i](key) if self.use_activation else key), v
        normed = self.prenorm_layers[i](v)
        qk, value = self.key_layers[i](normed), self.value_layers[i](normed)
        seen = value if self.copy.projected else normed
        key = value + self.attn_layers[i](qk[None], qk[None], seen[None])[0]
        wide = self.ff_layers[i](self.postnorm_layers[i](key) if self.copy.postnorm else key)
        gated = self.ff_activations[i](wide)
        return (key + gated if self.copy.residual else gated), (value if self.copy.chained else v)


class Foreign(LightningModule):
    """Two optimisers, a critic of u and everything else, as adversarial alignment has them."""

    def __init__(self, copy: Copy) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.decoder = Decoder(copy)
        self.encoder = nn.Linear(self.decoder.scale_lin.shape[1], copy.dim)
        self.anchors = nn.Parameter(torch.zeros(copy.anchors + copy.more_rows, copy.dim))
        self.critic = nn.Linear(copy.dim, 1)
        self.losses: list[float] = []
        self.double()
        randomise(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        critic, rest = self.optimizers()
        u = self.encoder(batch["x"].log1p())
        critic.zero_grad()
        self.manual_backward((self.critic(u.detach()) - 1).square().mean())
        critic.step()
        rest.zero_grad()
        given = self.decoder(u, self.anchors, batch["b"], batch["l"])
        loss = -given.log_prob(batch["x"]).mean() - 0.02 * (self.critic(u) - 1).square().mean()
        self.manual_backward(loss)
        rest.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        mine = set(self.critic.parameters())
        rest = [p for p in self.parameters() if p not in mine]
        return [torch.optim.RMSprop(ps, lr=2e-3) for ps in (list(mine), rest)]


def randomise(module: nn.Module, seed: int = 0) -> None:
    """No parameter at a value where a mistake would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(0.3 * noise + (1.0 if "norm_layers" in name and name.endswith("weight") else 0.0))


def cells(copy: Copy, n: int = 6, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n_features = sum(map(len, copy.nodes()))
    x = torch.poisson(torch.full((n, n_features), 0.7, dtype=torch.float64), generator=generator)
    if copy.binarize:
        x = (x > 0).double()
    return {"x": x, "b": torch.arange(n) % copy.experiments, "l": x.sum(1, keepdim=True) + 1}
