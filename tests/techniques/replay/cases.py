"""Steps that are hard to replay: each makes a function that returns a loss, its parameters, and perhaps a module."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DOUBLE = torch.float64
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {}


def case(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    CASES[make.__name__] = make
    return make


def trained(
    make: Callable[[], tuple[Any, ...]], inside: Callable[[Any, bool], Any] = lambda parameters, first: nullcontext()
) -> list[Any]:
    """Two steps of a case, `inside` of which its forward passes run: losses, gradients, weights after two updates,
    buffers, and a random number after them."""
    torch.manual_seed(0)
    step, parameters, *modules = make()
    torch.manual_seed(1)
    found, optimizer = list[Any](), torch.optim.Adam(parameters, lr=1e-3)
    for first in (True, False):
        optimizer.zero_grad()
        with inside(parameters, first):
            loss = step()
        loss.backward()
        found += [loss.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in parameters)]
        optimizer.step()
    buffers = [buffer for module in modules for buffer in module.buffers()]
    return [*found, *(p.detach() for p in parameters), *buffers, torch.rand(1)]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def weight(*shape: int, seed: int = 3) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=DOUBLE) * 0.3)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9 + sum(shape)), dtype=DOUBLE)


@case
def in_place_chain() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = rows(4, 8) @ w
        h += 1
        h.mul_(2)
        h = h.relu_()
        h = h * h
        h.sigmoid_()
        return (h @ w).square().sum()

    return step, [w]


@case
def batch_norm_twice() -> tuple[Any, ...]:
    norm, w = nn.BatchNorm1d(8).double(), weight(8, 8)

    def step() -> Tensor:
        h = norm(norm(rows(4, 8) @ w).relu() @ w)
        return h.square().sum() + (norm.running_var * h).sum()

    return step, [w, *norm.parameters()], norm


@case
def a_moving_average_is_read() -> tuple[Any, ...]:
    w, mean = weight(8, 8), torch.zeros(8, dtype=DOUBLE)

    def step() -> Tensor:
        h = rows(4, 8) @ w
        with torch.no_grad():
            mean.mul_(0.9).add_(h.mean(0) * 0.1)
        y = (h - mean).tanh()
        with torch.no_grad():
            mean.add_(1)
        return (y * (h + mean.clone())).sum()

    return step, [w]


@case
def heads_and_slices() -> tuple[Any, ...]:
    w = weight(8, 24)

    def step() -> Tensor:
        q, k, v = (rows(4, 6, 8) @ w).view(4, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        y = torch.zeros(4, 2, 6, 8, dtype=DOUBLE)
        y[..., :4] = found
        y[..., 4:] = found.flip(-1)
        z = torch.zeros(6, 8, dtype=DOUBLE)
        z[1:3] = y[0, 0, 1:3]
        z.t()[2] = y[0, 1].t()[3]
        return y.square().sum() + (z * y).sum()

    return step, [w]


@case
def random_numbers() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        own = torch.Generator().manual_seed(4)
        h = functional.dropout(rows(6, 8) @ w, 0.3, True)
        h = functional.rrelu(functional.alpha_dropout(h, 0.2, True), training=True)
        h = h * torch.rand(6, 8, generator=own, dtype=DOUBLE) + torch.randn_like(h) * h
        h = h * torch.empty(6, 8, dtype=DOUBLE).uniform_(generator=own)
        return (h @ w).square().sum() + (torch.bernoulli(torch.full((6, 8), 0.5, dtype=DOUBLE)) * h).sum()

    return step, [w]


@case
def recurrent() -> tuple[Any, ...]:
    lstm, cell = nn.LSTM(8, 8, 2, dropout=0.2, bidirectional=True).double(), nn.GRUCell(8, 8).double()

    def step() -> Tensor:
        h, found = torch.zeros(3, 8, dtype=DOUBLE), list[Tensor]()
        for t in range(6):
            h = cell(rows(3, 8) * t, h)
            found.append(h)
        return lstm(rows(5, 3, 8))[0].square().sum() + torch.stack(found).cumsum(0).square().sum()

    return step, [*lstm.parameters(), *cell.parameters()]


@case
def recurrent_by_the_kernel_of_a_processor() -> tuple[Any, ...]:
    """In float32, whose kernel returns a workspace only where gradients are enabled."""
    lstm = nn.LSTM(8, 8)

    def step() -> Tensor:
        h = lstm(rows(5, 3, 8).float())[0]
        with torch.no_grad():
            target = lstm(h)[0] * 2
        return (lstm(h)[0] - target).square().sum()

    return step, [*lstm.parameters()]


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        z = y.exp()
        ctx.save_for_backward(x, w, z)
        ctx.other = y * 1
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, z = ctx.saved_tensors
        grad = grad * z + 0 * ctx.other
        return grad @ w.t(), x.t() @ grad


@case
def own_function() -> tuple[Any, ...]:
    w = weight(8, 8)
    return lambda: Exponential.apply(Exponential.apply(rows(4, 8) * 0.1, w) * 0.01, w).sum(), [w]


@case
def checkpoints_inside() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        def part(x: Tensor) -> Tensor:
            return functional.dropout((x @ w).sin(), 0.3)

        h = checkpoint(part, rows(4, 8), use_reentrant=False) @ w
        return checkpoint(part, h, use_reentrant=False).square().sum()

    return step, [w]


@case
def gradient_in_the_loss() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        x = rows(4, 8).requires_grad_()
        y = ((x @ w).tanh() @ w).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (grad.norm(dim=1) - 1).square().sum()

    return step, [w]


@case
def backward_twice() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = ((rows(4, 8) @ w).tanh() @ w).sin()
        h.sum().backward(retain_graph=True)
        return (h * h).sum()

    return step, [w]


@case
def branches_on_values() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = rows(4, 8) @ w
        for _ in range(3):
            h = h.sin() @ w if h.sum().item() > 0 else h.cos() * 2
        return h.square().sum()

    return step, [w]


@case
def complex_numbers() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = torch.fft.rfft(rows(4, 8) @ w)
        h = h * torch.view_as_complex(torch.stack([h.real, h.imag], -1))
        h = torch.fft.irfft(h.conj() * h + h.conj(), n=8)
        return (h @ w).square().sum() + torch.view_as_real(torch.fft.fft(h)).square().sum()

    return step, [w]


@case
def other_types() -> tuple[Any, ...]:
    w, half = weight(8, 8), nn.Parameter(weight(8, 8).float().detach())

    def step() -> Tensor:
        h = (rows(4, 8) @ w).float()
        h = (h * h).bfloat16().relu().double()
        found = (h @ w).sum() + h.view(torch.int64).bitwise_and(7).double().mul(h).sum()
        with torch.autocast("cpu", torch.bfloat16):
            h = functional.layer_norm(rows(4, 8).float() @ half, (8,))
            h = functional.linear(functional.linear(h, half).relu(), half)
        return found + h.float().square().sum()

    return step, [w, half]


@case
def lists_of_tensors() -> tuple[Any, ...]:
    w, v = weight(8, 8), weight(8, 8, seed=5)

    def step() -> Tensor:
        both = [p.clone() for p in torch._foreach_mul([w, v], 2.0)]
        torch._foreach_add_(both, 1.0)
        return (rows(4, 8) @ both[0] @ both[1]).square().sum()

    return step, [w, v]


@case
def normalised_weights() -> tuple[Any, ...]:
    parametrized: Any = nn.utils.parametrizations
    layer = parametrized.spectral_norm(parametrized.weight_norm(nn.Linear(8, 8))).double()
    return lambda: layer(layer(rows(4, 8)).tanh()).square().sum(), list(layer.parameters()), layer


@case
def hooks_of_tensors() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = rows(4, 8) @ w
        h.register_hook(lambda grad: grad * 2)
        h = h.sin()
        h.retain_grad()
        y = (h @ w).cos()
        y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return y.square().sum()

    return step, [w]


@case
def other_storages() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = rows(4, 8) @ w
        y, other = h.exp(), torch.zeros(4, 8, dtype=DOUBLE)
        other.data = y.detach() * 2
        sparse = torch.sparse.mm(torch.eye(4, dtype=DOUBLE).to_sparse(), y * other)
        return (sparse.sin() @ w).sum()

    return step, [w]


@case
def transforms() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        each: Tensor = torch.vmap(lambda x: (x @ w).sin().sum())(rows(4, 8))
        return each.square().sum()

    return step, [w]


@case
def parts_without_gradients() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        with torch.no_grad():
            target = (rows(4, 8) @ w).softmax(-1)
        found = (rows(4, 8) @ w).log_softmax(-1)
        with torch.inference_mode():
            more = (target * 2).sum()
        return -(target * found).sum() + float(more)

    return step, [w]


@case
def forward_mode() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        y, tangent = torch.func.jvp(lambda x: (x @ w).sin() @ w, (rows(4, 8),), (rows(4, 8).cos(),))
        jacobian: Any = torch.func.jacfwd(lambda x: (x @ w).tanh().sum(0))(rows(4, 8))
        return (y * tangent).square().sum() + jacobian.square().sum()

    return step, [w]


@case
def forward_over_reverse() -> tuple[Any, ...]:
    w = weight(8, 8)

    def step() -> Tensor:
        h = (rows(4, 8) @ w).sin()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(h, torch.ones_like(h))
            (grad,) = torch.autograd.grad(((x @ w).tanh() @ w).exp().sum(), x, create_graph=True)
            return forward_ad.unpack_dual(grad).tangent.square().sum()

    return step, [w]
