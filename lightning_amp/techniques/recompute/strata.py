"""Replace the loop over a decoder's strata by one that keeps no stratum: each is computed again in the backward pass.

The same computation twice (torch.utils.checkpoint), with the same random numbers, for decoders whose loss is not
computed inside them; where it is, `stream` keeps as little and computes everything once. All that K strata keep becomes
what one keeps, and v. The second time, a stratum reads the parameters and buffers that it had the first time. What has
been changed in place since, and a change of `training`, is refused. Hooks on a stratum run in the first pass only.
Known limits: a buffer that a stratum changes is read the second time as the first has left it; a change of sparse
counts, or of a tensor that is no parameter, buffer or argument, is not noticed.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp._torch import version_of
from lightning_amp.errors import InstallError
from lightning_amp.shapes import Scalar
from lightning_amp.techniques.checks.decoder import walk_of
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, LoopTechnique
from lightning_amp.techniques.precomputed_gradients import call_with, places
from lightning_amp.techniques.recompute.row import RecomputeStrata


def recompute_strata(decoder: DecomposedDecoder, spec: RecomputeStrata, mesh: object) -> Change:
    """Compute a decoder's strata again in the backward pass."""
    return Change({"walk": RecomputedStrata(walk_of(decoder, "recompute", once=True))})


class RecomputedStrata(LoopTechnique):
    """The strata loop that keeps no stratum; made by `recompute_strata`."""

    goes_back = "recompute"

    def forward(self, strata: nn.ModuleList, *latents: Tensor, **options: Any) -> Scalar:
        """Negative log-likelihood summed over cells and features."""
        again = [_Again(cast(Any, stratum)) for stratum in strata]
        return cast(Tensor, self.inner(again, *latents, **options))


class _Again:
    """Stands in for a stratum in the loop."""

    def __init__(self, stratum: Any) -> None:
        self.stratum = stratum
        self.arguments: Callable[..., dict[str, Tensor]] = stratum.arguments

    def spine(self, v: Tensor) -> Tensor:
        return cast(Tensor, self.stratum.spine(v))

    def __call__(self, v: Tensor, u: Tensor, **cells: Tensor) -> tuple[Tensor, Tensor]:
        stratum, read = self.stratum, _Read(self.stratum, {"v": v, "u": u} | cells)
        # checkpoint calls `run` again in the backward pass; there `forward` is called, so that hooks run once
        passes = iter(("first",))

        def run(v: Tensor, u: Tensor, cells: dict[str, Tensor]) -> Any:
            if next(passes, None):
                return stratum(v, u, **cells)
            return read.again(lambda: stratum.forward(v, u, **cells))

        found = checkpoint(run, v, u, cells, use_reentrant=False)
        read.settle()
        return cast(tuple[Tensor, Tensor], found)


class _Read:
    """What a stratum reads in its first pass; made before it."""

    def __init__(self, stratum: nn.Module, arguments: Mapping[str, object]) -> None:
        self.stratum = stratum
        same: dict[int, Tensor] = {}
        # aliases, for an optimiser's step writes in place: the alias has the new values too, and its version tells. One
        # alias for a tensor with two names, so that the second pass ties what the first one tied. Whether a parameter
        # needs a gradient says what a pass keeps, and may be another by then
        self.tensors = {name: same.setdefault(id(t), _alias(t)) for name, t in places(stratum).items()}
        self.arguments = {f"argument {n}": t.detach() for n, t in arguments.items() if isinstance(t, Tensor)}
        self.versions, self.modes = self._versions(), self._modes()
        self.changing: list[str] = []

    def settle(self) -> None:
        """After the first pass: leave out what it changes itself."""
        self.changing = self._changed()

    def again(self, call: Callable[[], Any]) -> Any:
        """What a call of the stratum returns that reads the same."""
        changed = [name for name in self._changed() if name not in self.changing]
        if self._modes() != self.modes:
            changed.append("train() or eval()")
        if changed:
            raise InstallError(
                f"a stratum ({type(self.stratum).__name__}) cannot be computed again in the backward "
                f"pass: what it reads has changed since the forward pass: {', '.join(changed[:5])}; "
                "change it after the backward pass, or leave 'recompute' out"
            )
        # what a stratum changes itself it may change again, in a copy
        apart = {name: _alias(self.tensors[name].clone()) for name in self.changing if name in self.tensors}
        return call_with(self.tensors | apart, self.stratum, call)

    def _changed(self) -> list[str]:
        now = self._versions()
        return [name for name in now if now[name] != self.versions[name]]

    def _versions(self) -> dict[str, int]:
        return {name: version_of(t) for name, t in (self.tensors | self.arguments).items()}

    def _modes(self) -> list[bool]:
        return [part.training for part in self.stratum.modules()]


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach()
