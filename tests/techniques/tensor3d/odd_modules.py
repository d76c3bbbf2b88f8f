"""Small modules with unusual code, which say nothing of ranks: one of every kind that tensor3d has to notice.

Operators on split features, one by one, are those of tests/sharding.

A row of a table has parts, which become attributes, and a function of the module and the batch. Commit 89df923b has
279 of them in benchmarks/tensor3d.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS = 4
"""Rows of a batch, over all ranks."""


class Small(pl.LightningModule):
    """Trained by SGD, which shows a gradient of the wrong size where Adam would not; `losses` has those of all steps.

    Args:
        parts: What attributes are made by, in this order: modules, parameters, buffers, anything.
        call: The module and the batch -> the loss, or an output that is trained towards 1.
    """

    def __init__(self, parts: Mapping[str, Callable[[], Any]], call: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, make in parts.items():
            setattr(self, name, make())
        self.call, self.losses = call, list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.call(self, batch)
        loss = (found - 1).square().mean() if found.dim() else found
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        # decay shows a gradient of zeros in the place of none
        return torch.optim.SGD(self.parameters(), 0.05, 0.9, weight_decay=0.01)


class Odd(NamedTuple):
    """A module.

    Attributes:
        by_rows: Whether data ranks differ from one process by nature, as in a loss over pairs of rows.
        drawn: Whether random numbers of split features are others than those of whole ones.
    """

    make: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    by_rows: bool
    drawn: bool


def features(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(ROWS, *shape).double()


def words(*shape: int, most: int = 9) -> Callable[[], Tensor]:
    return lambda: torch.randint(most, (ROWS, *shape))


def both(*makers: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(make() for make in makers)


def par(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) * 0.5)


def buf(*shape: int) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.randn(shape))


def lin(inner: int, out: int, **given: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inner, out, **given)


def conv(*args: int, **given: Any) -> Callable[[], nn.Conv2d]:
    return lambda: nn.Conv2d(*args, **given)


def two(inner: int = 6, middle: int = 8, out: int = 3) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Linear(inner, middle), nn.ReLU(), nn.Linear(middle, out))


def odd(
    batch: Callable[[], Any],
    call: Callable[[Any, Any], Tensor],
    by_rows: bool = False,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
    drawn: bool = False,
    **parts: Callable[[], Any],
) -> Odd:
    """By parts and a function; `hooks` are methods of the LightningModule."""
    kind = type("Small", (Small,), dict(hooks or {}))
    return Odd(lambda: kind(parts, call), batch, by_rows or drawn, drawn)


def around(hooks: Mapping[str, Callable[..., Any]], call: Any = lambda m, x: m.net(x), **parts: Any) -> Odd:
    """Two layers, with methods around their step."""
    return odd(X, call, hooks=hooks, net=two(), **parts)


def of_features(call: Callable[[Tensor], Tensor], left: int = 8, by_rows: bool = False) -> Odd:
    """An operator on features that a layer has split, which leaves so many."""
    return odd(X, lambda m, x: m.b(call(m.a(x))), by_rows, a=lin(6, 8), b=lin(left, 3))


X, SEQ, IMAGE, TOKENS = features(6), features(5, 8), features(4, 8, 6), words(5)


def _tied(first: nn.Module, second: nn.Module) -> nn.ModuleList:
    second.weight = first.weight
    return nn.ModuleList([first, second])


def _experts(m: Any, x: Tensor) -> Tensor:
    best, which = m.router(x).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, slot = (which == e).nonzero(as_tuple=True)
        out = out.index_add(0, rows, best[rows, slot, None] * expert(x[rows]))
    return out


WEIGHTS = {
    "two layers": odd(X, lambda m, x: m.net(x), net=two()),
    "tied table": odd(TOKENS, lambda m, x: F.cross_entropy(m.pair[1](m.pair[0](x[:, :-1])).mT, x[:, 1:]),
        pair=lambda: _tied(nn.Embedding(9, 6), lin(6, 9, bias=False)())),
    "slices of a weight": odd(X, lambda m, x: F.linear(F.linear(x, m.w[:4, :6]), m.w[4:, :4]), w=par(9, 6)),
    "weight norm": odd(X, lambda m, x: m.net(x), net=lambda: parametrizations.weight_norm(lin(6, 8)())),
    "spectral norm": odd(X, lambda m, x: m.net(x), net=lambda: parametrizations.spectral_norm(lin(6, 8)())),
    "merged LoRA": odd(X, lambda m, x: F.linear(x, m.base.weight + m.b @ m.a),
        base=lambda: lin(6, 8)().requires_grad_(False), a=par(2, 6), b=par(8, 2)),
    "weights made by a net": odd(X, lambda m, x: F.linear(x, m.maker(x.mean(0)).view(8, 6), m.bias), True,
        maker=lin(6, 48), bias=par(8)),
    "a sparse mixture of experts": odd(X, _experts, router=lin(6, 3),
        experts=lambda: nn.ModuleList([two(6, 8, 6)() for _ in range(3)])),
    "a scripted layer": odd(X, lambda m, x: m.b(m.a(x)), a=lambda: torch.jit.script(lin(6, 8)()), b=lin(8, 3)),
    "a lazy layer": odd(X, lambda m, x: m.b(m.a(x)), a=lambda: nn.LazyLinear(8), b=lin(8, 3)),
}  # fmt: skip


def _teacher(m: Any, x: Tensor) -> Tensor:
    hidden = m.before(x) if hasattr(m, "before") else x
    with torch.no_grad():
        target = m.teacher(hidden)
    return (m.net(x) - target - 1).square().mean()


def _follow(m: Any, *_: Any) -> None:
    with torch.no_grad():
        for a, b in zip(m.teacher.parameters(), m.net.parameters(), strict=True):
            a.mul_(0.5).add_(b, alpha=0.5)


def _unit(m: Any, *_: Any) -> None:
    with torch.no_grad():
        m.net[0].weight.div_(m.net[0].weight.norm())


def queue(m: Any, x: Tensor) -> Tensor:
    h = m.net(x)
    found = h @ m.queue.clone().T
    m.queue[: len(h)] = h.detach()
    return found


def _running(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.b(h - m.mean)


KEPT = {
    "a teacher that follows": around({"on_train_batch_end": _follow}, _teacher,
        teacher=lambda: two()().requires_grad_(False)),
    "a teacher that sees other features": around({"on_train_batch_end": _follow}, _teacher,
        teacher=lambda: two()().requires_grad_(False), before=lin(6, 6)),
    "a weight of norm 1 after a step": around({"on_train_batch_end": _unit}),
    "gradients clipped by hand": around({"configure_gradient_clipping": lambda m,
        *_, **__: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) and None}),
    "gradients clipped by Lightning": around({"configure_gradient_clipping": lambda m, opt,
        *_, **__: m.clip_gradients(opt, 0.01, "norm")}),
    "a layer thawed after a step": around({"on_train_batch_start": lambda m,
        *_: m.net[0].requires_grad_(m.global_step > 0) and None}),
    "a queue of features": odd(X, queue, True, net=two(), queue=buf(5, 3)),
    "a running mean, assigned": odd(X, _running, True, a=lin(6, 8), b=lin(8, 3), mean=buf(8)),
    "an empty and an unused parameter": around({}, lambda m, x: torch.cat([m.net(x), x @ m.none], 1), none=par(6, 0),
        idle=lin(7, 5)),
}  # fmt: skip


def _attends(drawn: bool = False, given: Mapping[str, Any] | None = None, **of: Any) -> Odd:
    """Attention of two heads; `given` is made of the batch."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.mix(x, x, x, **{name: make(x) for name, make in (given or {}).items()})[0]

    return odd(SEQ, call, drawn=drawn, mix=lambda: nn.MultiheadAttention(8, 2, batch_first=True, **of))


LAYERS = {
    "LSTM": odd(SEQ, lambda m, x: m.net(x)[0], net=lambda: nn.LSTM(8, 6, batch_first=True)),
    "attention with a mask": _attends(given={"attn_mask": lambda x: torch.ones(5, 5, dtype=torch.bool).triu(1)}),
    "embedding of bounded norm": odd(TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.Embedding(9, 6, max_norm=1.0),
        out=lin(6, 3)),
    "bag of embeddings": odd(TOKENS, lambda m, x: m.out(m.net(x)), net=lambda: nn.EmbeddingBag(9, 6, padding_idx=0),
        out=lin(6, 3)),
    "circular and transposed convolutions": odd(IMAGE, lambda m, x: m.b(m.a(x)),
        a=conv(4, 6, 3, dilation=2, padding=2, padding_mode="circular"),
        b=lambda: nn.ConvTranspose2d(6, 4, 2, groups=2)),
}  # fmt: skip


def _hooked(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    x.register_hook(lambda g: g / (g.norm() + 1))
    return m.c(m.b(x.tanh()).tanh() + x)


def _vq(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    q = m.book(torch.cdist(z, m.book.weight).argmin(-1))
    loss = (q - z.detach()).square().mean() + 0.25 * (q.detach() - z).square().mean()
    return (m.b(z + (q - z).detach()) - x).square().mean() + loss


def _info_nce(m: Any, x: Tensor) -> Tensor:
    """A loss over pairs of rows."""
    return F.cross_entropy(F.normalize(m.net(x)) @ F.normalize(m.net(-x)).T / 0.1, torch.arange(len(x)))


def penalty(m: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)
    return (grad.norm(dim=-1) - 1).square().mean()


def _clamped_backward() -> nn.Module:
    net = two()()
    net[2].register_full_backward_pre_hook(lambda module, outer: (outer[0].clamp(-0.01, 0.01),))
    return net


def _measured(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.accuracy(logits, y)
    m.log("accuracy", m.accuracy, on_step=False, on_epoch=True)
    m.log_dict({"confidence": logits.softmax(-1).amax(-1).mean(), "weight": m.net[0].weight.norm()})
    return F.cross_entropy(logits, y)


def _adversary(m: Any, x: Tensor) -> Tensor:
    """The discriminator's weights are held fixed by functional_call."""
    fixed = {name: value.detach() for name, value in m.judge.named_parameters()}
    fooled = torch.func.functional_call(m.judge, fixed, m.net(x)).mean()
    return fooled + m.judge(m.net(x).detach()).square().mean()


def dictionary(m: Any, batch: Any, batch_idx: int) -> Any:
    found = m.net(batch)
    loss = (found - 1).square().mean()
    m.losses.append(loss.detach().clone())
    return {"loss": loss, "hidden": found, "weight": m.net[0].weight.detach().clone()}


def look(m: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    m.log("hidden", outputs["hidden"].square().sum(), sync_dist=True, reduce_fx="mean")
    m.log("seen", outputs["weight"].square().sum())


def _groups(m: Any) -> Any:
    head, rest = m.net[2].parameters(), m.net[0].parameters()
    opt = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": rest}], 0.05, 0.9, nesterov=True)
    return [opt], [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)]


AROUND = {
    "a gradient penalty": odd(X, penalty, a=lin(6, 8), b=lin(8, 3)),
    "a hook that normalises a gradient": odd(X, _hooked, True, a=lin(6, 8), b=lin(8, 8), c=lin(8, 3)),
    "a branch on values": odd(X, lambda m, x: m.b(m.a(x)) if m.a(x).mean() > 0 else m.b(-m.a(x)), True, a=lin(6, 8),
        b=lin(8, 3)),
    "pairs of rows": odd(X, _info_nce, True, net=two(6, 8, 5)),
    "vector quantisation": odd(X, _vq, a=lin(6, 4), b=lin(4, 6), book=lambda: nn.Embedding(7, 4)),
    "a backward hook that clamps": odd(X, lambda m, x: m.net(x), True, net=_clamped_backward),
    "metrics and logs": odd(both(X, words(most=3)), _measured, True, net=two(),
        accuracy=lambda: torchmetrics.Accuracy("multiclass", num_classes=3)),
    "a checkpointed block": around({}, lambda m, x: m.last(checkpoint(m.net, x, use_reentrant=False)), last=lin(3, 2)),
    "a reentrant checkpoint": around({}, lambda m, x: m.last(checkpoint(m.net, x.requires_grad_(), use_reentrant=True)),
        last=lin(3, 2)),
    "an adversary held fixed": around({}, _adversary, judge=lin(3, 1)),
    "a step that returns a dictionary": odd(X, lambda m, x: x, True,
        hooks={"training_step": dictionary, "on_train_batch_end": look}, net=two()),
    "groups of an optimiser and a schedule": around({"configure_optimizers": _groups}),
    "a layer made in configure_model": around({"configure_model": lambda m: setattr(m, "extra",
        nn.Linear(3, 3).double())}, lambda m, x: m.extra(m.net(x))),
}  # fmt: skip
