"""Claim: a stage reads no number that it draws after another rank has drawn, for it would be another one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.errors import InstallError
from lightning_amp.techniques.pipeline.run.block_walk import spans
from tests.techniques.pipeline.test_block_walk import CPU, Net, X, staged, through, without


def drawn(net: Net, x: Tensor) -> Tensor:
    """Noise for all blocks, drawn after a draw for the first one; what is drawn between blocks is for the next one."""
    h = F.dropout(net.embed(x), 0.5)
    noise = torch.rand(2)
    for block in net.blocks:
        h = block(h + noise)
    return h


def between(net: Net, x: Tensor) -> Tensor:
    h = F.dropout(net.embed(x), 0.5)
    for block in net.blocks:
        h = block(h + torch.rand(2))
    return h


def skips_layers(net: Net, x: Tensor) -> Tensor:
    """As transformers do it that skip a layer with some probability: 0 if it is not set."""
    h = F.dropout(net.embed(x), 0.5)
    for block in net.blocks:
        if torch.rand([]) < 0.0 or torch.rand(1) >= 1:
            continue
        h = block(h)
    return h


def skips_some(net: Net, x: Tensor) -> Tensor:
    h = F.dropout(net.embed(x), 0.5)
    for block in net.blocks:
        chance = torch.rand([])
        chance *= 2
        if chance < 1.0:
            h = h + 1
        h = block(h)
    return h


def attends(net: Net, x: Tensor) -> Tensor:
    h = net.embed(x)
    h = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])[0, 0]
    h = torch.native_dropout(h, 0.5, train=False)[0]
    noise = torch.rand(3, 2)
    for block in net.blocks:
        h = block(h + noise)
    return h


class Drops(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(super().forward(h), 0.5) * torch.rand(())


def drawn_later(net: Net, x: Tensor) -> Tensor:
    net.blocks[0].__class__ = Drops
    h = net.blocks[0](net.embed(x))
    noise = torch.rand(2)
    for block in list(net.blocks)[1:]:
        h = block(h + noise)
    return h


class Noises(nn.Linear):
    def forward(self, h: Tensor) -> Any:
        return super().forward(h), torch.empty(2).normal_()


def from_a_block(net: Net, x: Tensor) -> Tensor:
    net.blocks[0].__class__ = Noises
    h, noise = net.blocks[0](net.embed(x))
    for block in list(net.blocks)[1:]:
        h = block(h + noise)
    return h


class Keeps(nn.Linear):
    def forward(self, h: Tensor) -> Any:
        self.noise = [torch.rand(2)]
        return super().forward(h)


def from_an_attribute(net: Net, x: Tensor) -> Tensor:
    first: Any = net.blocks[0]
    first.__class__ = Keeps
    h = first(net.embed(x))
    for block in list(net.blocks)[1:]:
        h = block(h + first.noise[0])
    return h


def test_what_is_drawn_after_another_rank_has_drawn_is_not_read() -> None:
    middle, last = spans((1, 3, 4))[1:]
    # draws follow those of the first block where a stage has received its result
    of_last = ((walk, last) for walk in (drawn, drawn_later, from_a_block, from_an_attribute))
    for walk, span in ((drawn, middle), *of_last):
        net = Net(walk)
        staged_walk = staged(net)
        without(net, span)
        # the second time a block's shapes are known
        for _ in range(2):
            with pytest.raises(InstallError, match="an earlier stage"):
                staged_walk.run(span, lambda net=net: net(X), receive=lambda _: X.clone(), device=CPU)
    through(between)


def test_what_an_earlier_draw_does_not_decide_is_no_reason_to_refuse() -> None:
    for walk in (skips_layers, attends):
        torch.manual_seed(1)
        through(walk)
    with pytest.raises(InstallError, match="needs values that another rank computed"):
        through(skips_some)
