"""The border around a decoder's strata under S2, S5 and nodes: inside, every rank has its own share of the work.

    S5         u and v become the own channels; backward, one all-gather of their gradients
    S2         the loss of the own features is summed over the ranks (one all-reduce, forward)
    S2 only    gradients of u, v and log_weights are summed over the ranks (one all-reduce, backward)
    S2 and S5  gradients of log_weights are summed (one all-reduce, backward): those of u and v are whole already,
               because the scores are scattered to the features' owners forward and gathered backward
    nodes      v becomes the own rows, the losses are summed as under S2; backward, one all-gather of the gradients of
               the own rows, and of the parts of those of u and log_weights

Everything outside then has equal gradients on all ranks of the model axis and needs no sum over it. Parameters inside
are held whole by every rank, and each rank's gradient is a part of the whole: they need one sum (`Change.partial`).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.parallel import collectives
from lightning_amp.parallel.anchor_rows import AnchorRows, take_rows
from lightning_amp.parallel.channels import Channels, take_channels


class SharedRegion(nn.Module):
    """The border of a region that the ranks of a mesh axis share.

    Args:
        mesh: The mesh axis.
        channels: Channel sets of S5, None without it.
        features: Whether S2 shares the features.
        rows: The ranks' anchors under nodes, None without it.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        channels: Channels | None = None,
        features: bool = False,
        rows: AnchorRows | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.channels = channels
        self.features = features
        self.rows = rows

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        shared = f"channels={self.channels is not None}, features={self.features}"
        return f"ranks={self.mesh.size()}, {shared if self.rows is None else f'rows={self.rows.sizes}'}"

    def enter(
        self,
        u: Float[Tensor, "cell dim"],
        v: Float[Tensor, "anchor dim"],
        log_weights: Float[Tensor, "#cell stratum"],
    ) -> tuple[
        Float[Tensor, "cell own_dim"], Float[Tensor, "own_anchor own_dim"], Float[Tensor, "#cell stratum"]
    ]:
        """What the strata read on this rank."""
        if self.rows is not None:
            return take_rows(self.rows, u, v, log_weights)
        if self.channels is None:
            entered = (
                collectives.enter(self.mesh, u, v, log_weights) if self.features else (u, v, log_weights)
            )
            return entered[0], entered[1], entered[2]
        u, v = take_channels(self.channels, u, v)
        if self.features:
            (log_weights,) = collectives.enter(self.mesh, log_weights)
        return u, v, log_weights

    def leave(self, total: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The negative log-likelihood over all ranks' features."""
        summed = self.features or self.rows is not None
        return collectives.leave(self.mesh, total) if summed else total


def share_region(
    region: nn.Module | None,
    mesh: DeviceMesh,
    *,
    channels: Channels | None = None,
    features: bool = False,
    rows: AnchorRows | None = None,
) -> SharedRegion:
    """The border with one more technique; S2 and S5 may come in any order, nodes comes alone.

    Raises:
        InstallError: The region is missing, has state, or does something at the border that would be lost.
    """
    if isinstance(region, SharedRegion) and (rows or region.rows):
        raise InstallError(
            f"a strategy was asked for on a decoder whose child `region` is {region!r}; it would split the decoder in a"
            " second way, which nodes does not allow: leave out 'nodes' or the other (S2, S5, strata)"
        )
    if isinstance(region, SharedRegion):
        return SharedRegion(mesh, channels=channels or region.channels, features=features or region.features)
    problem = _problem(region)
    asker = "nodes" if rows else "S2" if features else "S5"
    if problem:
        raise InstallError(
            f"{asker} was asked for on a decoder whose child `region` {problem}; only a border"
            " without state whose enter(u, v, log_weights) and leave(total) return what they were given can be"
            " replaced: move the rest to the decoder, or leave the strategy out"
        )
    return SharedRegion(mesh, channels=channels, features=features, rows=rows)


def _problem(region: nn.Module | None) -> str:
    border: Any = region
    if border is None or not all(callable(getattr(border, name, None)) for name in ("enter", "leave")):
        return f"is {region!r}"
    names = sorted(border.state_dict())
    if names:
        return f"has the state {names!r}"
    given, total = (torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 5)), torch.ones(())
    try:
        unchanged = all(a is b for a, b in zip(border.enter(*given), given, strict=True))
        unchanged = unchanged and border.leave(total) is total
    except Exception as error:
        return f"fails on a small example with {error!r}"
    return "" if unchanged else f"({type(region).__name__}) changes what it is given"
