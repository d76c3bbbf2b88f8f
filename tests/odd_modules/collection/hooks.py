"""Code beside the operators: hooks, autograd Functions, checkpoints, compiled layers, forwards of an instance."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.odd_modules.collection.blocks import Plain, of, of_blocks
from tests.odd_modules.collection.row import COMPILED, X, around, lin, odd, two


class Scale(torch.autograd.Function):
    """Keeps a tensor by autograd and another by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sign, ctx.factor = torch.sign(x), factor
        return x.abs() * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.sign * ctx.factor + 0 * x, None


Custom = of("Custom", lambda m, x: Scale.apply(Plain.forward(m, x), 0.7))


class BackwardHook(Plain):
    """Hooks of the backward pass inside, on a module and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_hook(lambda module, given, got: (2 * given[0],))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(lambda grad: 3 * grad)
        return x


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, given, result: result * 2)


class Compiled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.compile(self.a, backend="eager")


class OwnForward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other  # type: ignore[method-assign]

    def other(self, x: Tensor) -> Tensor:
        return x


def _hooked(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    x.register_hook(lambda g: g / (g.norm() + 1))
    return m.c(m.b(x.tanh()).tanh() + x)


def _clamped_backward() -> nn.Module:
    net = two()()
    net[2].register_full_backward_pre_hook(lambda module, outer: (outer[0].clamp(-0.01, 0.01),))
    return net


HOOKS = {
    "an autograd Function that keeps a tensor by itself": of_blocks(Custom, {
        "chunk": "has the autograd Function 'Scale'",
        "sequence": "'Scale' in 'OfBlocks'", "tensor3d": "autograd Functions do not see parts"}),
    "hooks of the backward pass": of_blocks(BackwardHook, {"chunk": "its submodule 'a' has hooks .backward_hooks.",
        "sequence": "'BackwardHookFunction'", "tensor3d": "autograd Functions do not see parts",
        "pipeline": "which has backward_hooks"}),
    "a hook that doubles": of_blocks(Hooked, {
        "recompute": "its submodule 'a' has forward_hooks, which would run twice",
        "chunk": "its submodule 'a' has hooks .forward_hooks.", "pipeline": "which has forward_hooks"}),
    "a compiled layer": of_blocks(Compiled, {"recompute": "its submodule 'a' is compiled",
        "chunk": "its submodule 'a' is compiled"} | dict.fromkeys(("replay", "offload", "logits", "fsdp", "tensor3d"),
        COMPILED)),
    "a forward set on the instance": of_blocks(OwnForward, dict.fromkeys(("recompute", "chunk", "pipeline"),
        "`forward` is set on the instance")),
    "a hook that normalises a gradient": odd(X, _hooked, True, a=lin(6, 8), b=lin(8, 8), c=lin(8, 3)),
    "a backward hook that clamps": odd(X, lambda m, x: m.net(x), True, says={"sequence": "'BackwardHookFunction'",
        "tensor3d": "autograd Functions do not see parts", "pipeline": "which has backward_pre_hooks"},
        net=_clamped_backward),
    "a checkpointed block": around({}, lambda m, x: m.last(checkpoint(m.net, x, use_reentrant=False)), {
        "sequence": "'untyped_storage' in", "pipeline": "reads a parameter that another rank holds"}, last=lin(3, 2)),
    "a reentrant checkpoint": around({}, lambda m, x: m.last(checkpoint(m.net, x.requires_grad_(), use_reentrant=True)),
        {"sequence": "'CheckpointFunction' in",
        "tensor3d over x and y": "call checkpoint with use_reentrant=False", "pipeline": "use_reentrant=True"},
        last=lin(3, 2)),
}  # fmt: skip
