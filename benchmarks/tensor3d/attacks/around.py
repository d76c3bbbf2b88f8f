"""Attacks by what a LightningModule does around its layers: hooks, metrics, logs, copies, checkpoints, steps."""

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.tensor3d.small import attack
from tests.odd_modules.collection.outputs import dictionary, look
from tests.odd_modules.collection.row import both, buf, features, lin, words
from tests.odd_modules.collection.state import queue

X = features(6)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _with(register: Any) -> Any:
    def make() -> nn.Module:
        net = _net()
        register(net)
        return net

    return make


def _keep_output(net: nn.Module) -> None:
    net[0].register_forward_hook(lambda module, given, out: setattr(module, "kept", out))


def _scale_output(net: nn.Module) -> None:
    net[0].register_forward_hook(lambda module, given, out: out * 2)


def _pre(net: nn.Module) -> None:
    net[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def _backward(net: nn.Module) -> None:
    net[0].register_full_backward_hook(lambda module, inner, outer: tuple(g and 2 * g for g in inner) and None)


def _backward_scaled(net: nn.Module) -> None:
    net[2].register_full_backward_hook(lambda module, inner, outer: (0.5 * inner[0],))


def _backward_clamped(net: nn.Module) -> None:
    net[2].register_full_backward_pre_hook(lambda module, outer: (outer[0].clamp(-0.01, 0.01),))


def _kept(m: Any, x: Tensor) -> Tensor:
    return m.net(x).mean() + 0.1 * m.net[0].kept.square().mean()


def _measured(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.accuracy(logits, y)
    m.log("accuracy", m.accuracy, on_step=False, on_epoch=True)
    m.log("confidence", logits.softmax(-1).amax(-1).mean())
    m.log_dict({"weight": m.net[0].weight.norm(), "bias": m.net[0].bias.abs().amax()})
    return F.cross_entropy(logits, y)


def _metric_of_features(m: Any, batch: Any) -> Tensor:
    hidden = m.net[0](batch)
    m.error.update(hidden, torch.zeros_like(hidden))
    m.log("error", m.error.compute())
    return m.net[2](hidden)


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.last(checkpoint(m.net, x, use_reentrant=False))


def _twice_checkpointed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: m.last(checkpoint(m.net, y, use_reentrant=False)), x, use_reentrant=False)


def _reentrant(m: Any, x: Tensor) -> Tensor:
    return m.last(checkpoint(m.net, x.requires_grad_(), use_reentrant=True))


def _sometimes(m: Any, x: Tensor) -> Tensor:
    return m.two(m.one(x)) if m.global_step % 2 == 0 else m.two(x)


def _by_rate(m: Any, x: Tensor) -> Tensor:
    rate = m.trainer.optimizers[0].param_groups[0]["lr"] if m.trainer.optimizers else 0.05
    return m.net(x) * (1 + rate)


def _evaluated(m: Any, x: Tensor) -> Tensor:
    m.net.eval()
    with torch.no_grad():
        target = m.net(x)
    m.net.train()
    return (m.net(x + 0.1) - target - 1).square().mean()


def _state(m: Any, x: Tensor) -> Tensor:
    norm = sum(value.square().sum() for value in m.net.state_dict().values())
    return (m.net(x) - 1).square().mean() * (1 + norm)


def _applied(m: Any, x: Tensor) -> Tensor:
    found = []
    m.net.apply(lambda module: found.append(module.weight.sum()) if isinstance(module, nn.Linear) else None)
    return (m.net(x) - 1).square().mean() + sum(found).square()


def _frozen_in_step(m: Any, x: Tensor) -> Tensor:
    m.net[0].requires_grad_(False)
    found = m.net(x)
    m.net[0].requires_grad_(True)
    return found


def _adversary(m: Any, x: Tensor) -> Tensor:
    """The discriminator's weights are held fixed by functional_call."""
    fixed = {name: value.detach() for name, value in m.judge.named_parameters()}
    return torch.func.functional_call(m.judge, fixed, m.net(x)).mean() + m.judge(m.net(x).detach()).square().mean()


def _history(m: Any, x: Tensor) -> Tensor:
    """Features of the last step are negatives of this one."""
    h = m.net(x)
    old = m.before if m.before is not None and m.before.shape == h.shape else torch.zeros_like(h)
    m.before = h.detach()
    return (h - old - 1).square().mean()


def _nothing(m: Any, x: Tensor) -> Tensor:
    return m.net(x) if len(m.losses) != 1 else m.net(x) * 0


def _scaled(m: Any, optimizer: Any) -> None:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def _clip_by_hand(m: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(m.parameters(), 0.05)


def _log_gradients(m: Any, optimizer: Any) -> None:
    m.log_dict(grad_norm(m, 2))


def _clip(m: Any, optimizer: Any, **given: Any) -> None:
    m.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def _closure(m: Any, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
    optimizer.step(closure=optimizer_closure)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def _two_groups(m: Any) -> Any:
    head, rest = m.net[2].parameters(), m.net[0].parameters()
    opt = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": rest}], 0.05, 0.9, nesterov=True)
    return [opt], [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)]


def _by_dim(m: Any) -> Any:
    wide, thin = ([p for p in m.parameters() if (p.dim() > 1) == want] for want in (True, False))
    return torch.optim.SGD([{"params": wide, "weight_decay": 0.1}, {"params": thin}], 0.05)


def _by_norm(m: Any) -> Any:
    """Rates by the norm of a parameter."""
    return torch.optim.SGD([{"params": [p], "lr": 0.05 * float(p.detach().norm())} for p in m.parameters()], 0.05)


def _seen_gradients(m: Any) -> None:
    m.seen.append(
        torch.as_tensor(m.trainer.strategy.gradient_norm())
        if hasattr(m.trainer.strategy, "gradient_norm")
        else torch.stack([p.grad.norm() for p in m.parameters()]).norm()
    )


def _init(m: Any) -> None:
    torch.manual_seed(1)
    for p in m.parameters():
        nn.init.normal_(p, std=0.3)


def _grown(m: Any) -> None:
    m.extra = nn.Linear(3, 3).double()


AROUND = [
    attack("a hook that keeps an output", X, _kept, net=_with(_keep_output)),
    attack("a hook that scales an output", X, lambda m, x: m.net(x), net=_with(_scale_output)),
    attack("a hook before a layer", X, lambda m, x: m.net(x), net=_with(_pre)),
    attack("a backward hook that looks", X, lambda m, x: m.net(x), net=_with(_backward)),
    attack("a backward hook that scales", X, lambda m, x: m.net(x), net=_with(_backward_scaled)),
    attack("a backward hook that clamps", X, lambda m, x: m.net(x), True, net=_with(_backward_clamped)),
    attack(
        "metrics and logs",
        both(X, words(most=3)),
        _measured,
        True,
        net=_net,
        accuracy=lambda: torchmetrics.Accuracy("multiclass", num_classes=3),
    ),
    attack("a metric of features", X, _metric_of_features, True, net=_net, error=torchmetrics.MeanSquaredError),
    attack("a checkpointed block", X, _checkpointed, net=_net, last=lin(3, 2)),
    attack("checkpoints inside of each other", X, _twice_checkpointed, net=_net, last=lin(3, 2)),
    attack(
        "a checkpointed block with dropout",
        X,
        _checkpointed,
        drawn=True,
        net=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)),
        last=lin(3, 2),
    ),
    attack("a reentrant checkpoint", X, _reentrant, net=_net, last=lin(3, 2)),
    attack("a layer of every second step", X, _sometimes, one=lin(6, 6), two=lin(6, 3)),
    attack("the rate of the optimiser in the step", X, _by_rate, net=_net),
    attack("a pass in evaluation", X, _evaluated, net=_net),
    attack("state in the step", X, _state, net=_net),
    attack("a function applied to modules", X, _applied, net=_net),
    attack("a layer frozen in the step", X, _frozen_in_step, net=_net),
    attack("an adversary held fixed", X, _adversary, net=_net, judge=lin(3, 1)),
    attack("features of the step before", X, _history, True, net=_net, before=lambda: None),
    attack("a queue of features", X, queue, True, net=_net, queue=buf(5, 3)),
    attack("a step without a gradient", X, _nothing, net=_net),
    attack(
        "a step that returns a dictionary",
        X,
        lambda m, x: x,
        True,
        hooks={"training_step": dictionary, "on_train_batch_end": look},
        net=_net,
    ),
    attack(
        "gradients scaled before the update",
        X,
        lambda m, x: m.net(x),
        hooks={"on_before_optimizer_step": _scaled},
        net=_net,
    ),
    attack(
        "clipping by hand in a hook",
        X,
        lambda m, x: m.net(x),
        hooks={"on_before_optimizer_step": _clip_by_hand},
        net=_net,
    ),
    attack(
        "norms of gradients in the log",
        X,
        lambda m, x: m.net(x),
        hooks={"on_before_optimizer_step": _log_gradients},
        net=_net,
    ),
    attack("clipping by the module", X, lambda m, x: m.net(x), hooks={"configure_gradient_clipping": _clip}, net=_net),
    attack("an update by the module", X, lambda m, x: m.net(x), hooks={"optimizer_step": _closure}, net=_net),
    attack(
        "groups of an optimiser and a schedule",
        X,
        lambda m, x: m.net(x),
        hooks={"configure_optimizers": _two_groups},
        net=_net,
    ),
    attack("groups by dims", X, lambda m, x: m.net(x), hooks={"configure_optimizers": _by_dim}, net=_net),
    attack("rates by norms", X, lambda m, x: m.net(x), hooks={"configure_optimizers": _by_norm}, net=_net),
    attack("values drawn at the start of the fit", X, lambda m, x: m.net(x), hooks={"on_fit_start": _init}, net=_net),
    attack(
        "values drawn at the start of training", X, lambda m, x: m.net(x), hooks={"on_train_start": _init}, net=_net
    ),
    attack(
        "a layer made in configure_model",
        X,
        lambda m, x: m.extra(m.net(x)),
        hooks={"configure_model": _grown},
        net=_net,
    ),
    attack(
        "a copy made before the fit",
        X,
        lambda m, x: (m.net(x) - m.old(x)).square().mean() + m.net(x).mean(),
        net=_net,
        old=lambda: None,
        hooks={"setup": lambda m, stage: setattr(m, "old", deepcopy(m.net).requires_grad_(False))},
    ),
    attack(
        "a copy made when training starts",
        X,
        lambda m, x: (m.net(x) - (m.old or m.net)(x)).square().mean() + m.net(x).mean(),
        net=_net,
        old=lambda: None,
        hooks={"on_train_start": lambda m: setattr(m, "old", deepcopy(m.net).requires_grad_(False))},
    ),
]
