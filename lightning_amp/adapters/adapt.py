"""Detect HiGLUE decoders in a LightningModule, and replace their `forward` by ours until `undo`.

Parameters, names, children and state_dict do not change: `forward` is set on the instance. `keep` restores the original
`forward` of each decoder that no rule of the plan has changed; its results are then bitwise the same as before. If a
decoder changes later (another parameter object, child, setting, buffer or hook), calling it raises an error.

The number of rows of v is not available before the first call, which is that of a counted step, or of the first step.
A number that differs from the number of anchors of the features is used from then on: additional rows of v cost memory
and time in every key.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_amp._torch import has_no_values
from lightning_amp.adapters.detect_form import adapted
from lightning_amp.adapters.first_batch import FirstBatch, Snapshot
from lightning_amp.adapters.forms.adapted_decoder import LISTS, AdaptedDecoder, NotDetected
from lightning_amp.adapters.forms.higlue import TABLE, lacks, resembles
from lightning_amp.adapters.forms.multires import MultiResDecoder, resembles_multires
from lightning_amp.adapters.lazy_distribution import LazyDistribution
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.contract.protocol import StandIn

INPUTS = ("u", "v", "b", "l")
INTEGERS = (torch.int64, torch.int32)
"""Dtypes that torch accepts as row indices; it treats uint8 and bool as masks."""


class Adapted:
    """Decoders of a LightningModule whose `forward` is replaced by ours."""

    def __init__(self) -> None:
        self.decoders: dict[str, nn.Module] = {}
        # one sentence each: why a similar module was not detected, and what is not predicted for a detected decoder
        self.notes: list[str] = []
        self._forwards: dict[str, tuple[nn.Module, _DecoderForward]] = {}
        self._watches: list[RemovableHandle] = []

    def add(self, fqn: str, module: nn.Module) -> None:
        """Replace the `forward` of one decoder; raises NotDetected if none of ours computes the same."""
        decoder = adapted(module)
        if isinstance(decoder, MultiResDecoder):
            self.notes += [f"{fqn!r} {note}" for note in decoder.unpredicted(module)]
        self._forwards[fqn] = module, _DecoderForward(decoder, module)
        self.stand_in()

    def stand_in(self) -> None:
        """Replace the `forward` of all detected decoders, including those that `keep` or `undo` restored."""
        for fqn, (module, forward) in self._forwards.items():
            cast(Any, module).forward = forward
            self.decoders[fqn] = module

    def rows(self) -> list[int | None]:
        """Return the rows of v in the last call of each decoder or a copy of it; None before one."""
        return [forward.rows.seen for _, forward in self._forwards.values()]

    def use_rows(self, rows: list[int | None]) -> list[str]:
        """Use these numbers of rows of v, in the order of `rows`; return a note on each that is another."""
        pairs = zip(self._forwards.values(), rows, strict=True)
        found = [forward.use_rows(n) for (_, forward), n in pairs if n is not None]
        return [note for note in found if note]

    def tell_rows(self, tell: Callable[[str], None]) -> None:
        """Check the number of rows of v in each decoder's first call; if it differs, use it from then on and report it.

        `tell` is called on all ranks before the decoder computes anything, at most once for each decoder.
        """
        for module, forward in self._forwards.values():
            if forward.decoder.reads_all_rows:
                self._watches.append(_watch(module, forward, tell))

    def keep(self, changed: Iterable[str]) -> None:
        """Restore the original `forward` of each decoder that contains none of these changed modules."""
        names = tuple(changed)
        for fqn in list(self.decoders):
            if not any(name.startswith(f"{fqn}.") for name in names):
                vars(self.decoders.pop(fqn)).pop("forward", None)

    def compare(self, plan: Plan) -> list[str]:
        """Compare changed decoders on the first batch; return a note for each for which memory is too small."""
        usual = plan.predicted_peak_bytes - plan.predicted_base_bytes
        free = None if plan.budget_bytes is None else plan.budget_bytes - plan.predicted_base_bytes
        notes = []
        for fqn, child in self.decoders.items():
            reason = cast(Any, child).forward.first_batch.allow(usual=usual, free=free)
            if reason and any(f"{rule.fqn}.".startswith(f"{fqn}.") for rule in plan.rules):
                notes.append(
                    f"{fqn!r} was detected by a small example, and is not compared with its own forward on the first"
                    f" batch: that {reason}"
                )
        return notes

    def undo(self) -> None:
        """Restore the original `forward` of all decoders; may be called twice."""
        while self._watches:
            self._watches.pop().remove()
        while self.decoders:
            vars(self.decoders.popitem()[1]).pop("forward", None)


def adapt(module: nn.Module, *, needed: bool = True) -> Adapted:
    """Replace the `forward` of all decoders that are detected in a LightningModule.

    A decoder whose comparison raises is an error if a technique needs it (`needed`), and otherwise only a note. Known
    limit: a LightningModule that is itself a decoder is not replaced; a note says so.
    """
    found = Adapted()
    for fqn, child in module.named_modules():
        # most modules have none of these, which all decoders of this shape have at least one of
        if not any(hasattr(child, name) for name in (*LISTS, TABLE)):
            continue
        try:
            if not (resembles(child) or resembles_multires(child)):
                missing = lacks(child)
                if missing:
                    raise NotDetected(f"has no {', '.join(missing)}")
                continue
            if not fqn:
                raise NotDetected("is the LightningModule itself: make the decoder a module in it")
            found.add(fqn, child)
        # caught before ModelError, of which it is a subclass
        except NotDetected as reason:
            found.notes.append(
                f"{(fqn or type(child).__name__)!r} looks like a decoder of HiGLUE's shape and is trained as any other"
                f" module (S1), because it {reason}"
            )
        except ModelError as error:
            if needed:
                raise
            found.notes.append(str(error))
    return found


def _watch(module: nn.Module, forward: "_DecoderForward", tell: Callable[[str], None]) -> RemovableHandle:
    def look(called: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # a copy of the module has the hook too
        if called is not module:
            return
        handle.remove()
        v = named.get("v", given[1] if len(given) > 1 else None)
        # set before the forward pass, so that keys have a row for every row of v
        if isinstance(v, Tensor) and v.dim() == 2 and (note := forward.use_rows(len(v))):
            tell(note)

    handle = module.register_forward_pre_hook(look, with_kwargs=True)
    return handle


class _Rows:
    """Rows of v in the last call of a decoder; copies of the decoder share it."""

    seen: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Rows":
        return self


class _DecoderForward(StandIn):
    """Replacement for the `forward` of a user's decoder."""

    decoder: AdaptedDecoder

    def __init__(self, decoder: AdaptedDecoder, module: nn.Module) -> None:
        super().__init__(decoder)
        self.module = module
        self.snapshot = Snapshot(module)
        self.first_batch = FirstBatch(module, decoder)
        self.rows = _Rows()

    def use_rows(self, rows: int) -> str:
        """Expect so many rows of v from now on; return a note if it were others, else ""."""
        decoder = self.decoder
        if not decoder.reads_all_rows or rows == decoder.n_anchors:
            return ""
        known, decoder.n_anchors = decoder.n_anchors, rows
        self.first_batch.plain.n_anchors = rows
        return f"in its first step v has {rows!r} rows, where the decoder's features have {known!r} anchors"

    def __call__(self, *given: Any, **named: Any) -> LazyDistribution:
        """Return the distribution of the cells' counts, computed on request; takes u, v, b and l."""
        self.snapshot.check(self.module, self.decoder)
        decoder, options = self.decoder, {}
        names = (*INPUTS, "subset") if isinstance(decoder, MultiResDecoder) else INPUTS
        named = _by_name(given, named, names)
        u, v, b, l = (named[name] for name in INPUTS)  # noqa: E741
        self.rows.seen = len(v) if isinstance(v, Tensor) and v.dim() == 2 else None
        subset = named.get("subset")
        if isinstance(decoder, MultiResDecoder) and subset is not None:
            decoder, options = decoder.among(subset), {"subset": subset}
        l = decoder.library(u, l)  # noqa: E741
        # tables with one row do not read b, so an invalid b would raise no error
        n_cells, n_rows = len(u), len(cast(Any, self.module).scale_lin)
        allowed = (
            f"allowed is the row of the tables for every cell, integers of the shape {(n_cells,)!r} from 0 to"
            f" {n_rows - 1!r}"
        )
        if not isinstance(b, Tensor) or b.dtype not in INTEGERS or tuple(b.shape) not in ((n_cells,), (1,), ()):
            found = f"{b.dtype} of the shape {tuple(b.shape)!r}" if isinstance(b, Tensor) else repr(b)
            raise ModelError(f"a decoder of HiGLUE's shape was called with b={found}; {allowed}")
        # negative rows count from the end, as in the original `forward`
        known = b.device.type == "cpu" and b.numel() and not has_no_values(b)
        if known and not -n_rows <= int(b.min()) <= int(b.max()) < n_rows:
            raise ModelError(
                f"a decoder of HiGLUE's shape was called with b from {int(b.min())!r} to {int(b.max())!r}; {allowed}"
            )
        inputs = u, v, b, l
        # taken from the class: the instance's `forward` is this object
        eager = partial(type(self.module).forward, self.module, **options)

        look = partial(self.first_batch.look, inputs, **options)
        return LazyDistribution(decoder, eager, inputs, self.snapshot.parameters, look)


def _by_name(given: tuple[Any, ...], named: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    found = dict(zip(names, given, strict=False)) | named
    # fewer names than arguments: one argument was passed twice
    fits = len(found) == len(given) + len(named) and set(INPUTS) <= set(found) <= set(names)
    if not fits:
        raise InstallError(
            f"a decoder of HiGLUE's shape was called with {len(given)!r} arguments and {sorted(named)!r} by"
            f" name; allowed are {names!r}, the only ones that the plan's decoder takes: leave out the"
            " others, or train with strategies='S1', which runs the decoder's own forward"
        )
    return found
