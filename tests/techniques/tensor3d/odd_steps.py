"""Small modules with unusual steps: operators on split features, losses, and what is done around a step."""

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.techniques.tensor3d.odd_modules import SEQ, X, around, both, features, lin, odd, of_features, par, two, words


def _hooked(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    x.register_hook(lambda g: g / (g.norm() + 1))
    return m.c(m.b(x.tanh()).tanh() + x)


def _fixed_point(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(50):
        new = torch.tanh(m.a(z) * 0.1 + x)
        if (new - z).norm() < 1e-3:
            break
        z = new
    return m.b(z)


def _vae(m: Any, x: Tensor) -> Tensor:
    mean, log = m.encoder(x).chunk(2, -1)
    drawn = mean + torch.randn_like(mean) * (log / 2).exp()
    kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1)
    return (F.mse_loss(m.decoder(drawn), x, reduction="none").sum(-1) + kl).mean()


def _vq(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    q = m.book(torch.cdist(z, m.book.weight).argmin(-1))
    loss = (q - z.detach()).square().mean() + 0.25 * (q.detach() - z).square().mean()
    return (m.b(z + (q - z).detach()) - x).square().mean() + loss


def _penalty(m: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)
    return (grad.norm(dim=-1) - 1).square().mean()


def _written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).clone()
    h[:, 2] = 0
    h[:, 3:5] *= 2
    h[h > 1] = 0.5
    return m.b(h)


VALUES = {
    "sorted features": of_features(lambda h: h.sort(-1).values),
    "standardised features": of_features(lambda h: (h - h.mean(-1, keepdim=True)) / (h.std(-1) + 1)[:, None]),
    "greatest features": of_features(lambda h: h.topk(3, -1).values, 3),
    "a number of the host": of_features(lambda h: h * float(h.detach().mean()), by_rows=True),
    "written features": odd(X, _written, a=lin(6, 8), b=lin(8, 3)),
    "a fixed point": odd(X, _fixed_point, True, a=lin(6, 6), b=lin(6, 3)),
    "a variational autoencoder": odd(X, _vae, drawn=True, encoder=lin(6, 10), decoder=lin(5, 6)),
    "vector quantisation": odd(X, _vq, a=lin(6, 4), b=lin(4, 6), book=lambda: nn.Embedding(7, 4)),
    "a gradient penalty": odd(X, _penalty, a=lin(6, 8), b=lin(8, 3)),
    "a hook that normalises a gradient": odd(X, _hooked, True, a=lin(6, 8), b=lin(8, 8), c=lin(8, 3)),
}


def _crf(m: Any, x: Tensor) -> Tensor:
    emit = m.a(x)
    alpha = emit[:, 0]
    for t in range(1, x.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + m.move, 1) + emit[:, t]
    return (torch.logsumexp(alpha, -1) - emit[..., 0].sum(1) - 4 * m.move[0, 0]).mean()


def _info_nce(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(a) @ F.normalize(b).T / 0.1, torch.arange(len(a)))


def _loss(call: Any, target: Any = None, by_rows: bool = False) -> Any:
    """A loss of features that a layer has split; of the batch's second tensor."""
    batch = both(X, target or features(5))
    return odd(batch, lambda m, xy: call(m.net(xy[0]), xy[1]), by_rows, net=two(6, 8, 5))


LOSSES = {
    "a conditional random field": odd(SEQ, _crf, a=lin(8, 5), move=par(5, 5)),
    "a branch on values": odd(X, lambda m, x: m.b(m.a(x)) if m.a(x).mean() > 0 else m.b(-m.a(x)), True, a=lin(6, 8),
        b=lin(8, 3)),
    "cross-entropy with rows left out": _loss(lambda h, y: F.cross_entropy(h, y, ignore_index=2), words(most=5), True),
    "pairs of rows": _loss(_info_nce, by_rows=True),
    "accuracy in the weight of the loss": _loss(lambda h,
        y: F.cross_entropy(h, y) * (1 + (h.argmax(-1) == y).double().mean()), words(most=5), True),
}  # fmt: skip


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


def _dictionary(m: Any, batch: Any, batch_idx: int) -> Any:
    found = m.net(batch)
    loss = (found - 1).square().mean()
    m.losses.append(loss.detach().clone())
    return {"loss": loss, "hidden": found, "weight": m.net[0].weight.detach().clone()}


def _look(m: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    m.log("hidden", outputs["hidden"].square().sum(), sync_dist=True, reduce_fx="mean")
    m.log("seen", outputs["weight"].square().sum())


def _groups(m: Any) -> Any:
    head, rest = m.net[2].parameters(), m.net[0].parameters()
    opt = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": rest}], 0.05, 0.9, nesterov=True)
    return [opt], [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)]


AROUND = {
    "a backward hook that clamps": odd(X, lambda m, x: m.net(x), True, net=_clamped_backward),
    "metrics and logs": odd(both(X, words(most=3)), _measured, True, net=two(),
        accuracy=lambda: torchmetrics.Accuracy("multiclass", num_classes=3)),
    "a checkpointed block": around({}, lambda m, x: m.last(checkpoint(m.net, x, use_reentrant=False)), last=lin(3, 2)),
    "a reentrant checkpoint": around({}, lambda m, x: m.last(checkpoint(m.net, x.requires_grad_(), use_reentrant=True)),
        last=lin(3, 2)),
    "an adversary held fixed": around({}, _adversary, judge=lin(3, 1)),
    "a step that returns a dictionary": odd(X, lambda m, x: x, True,
        hooks={"training_step": _dictionary, "on_train_batch_end": _look}, net=two()),
    "groups of an optimiser and a schedule": around({"configure_optimizers": _groups}),
    "a layer made in configure_model": around({"configure_model": lambda m: setattr(m, "extra",
        nn.Linear(3, 3).double())}, lambda m, x: m.extra(m.net(x))),
}  # fmt: skip
