"""Compare a foreign decoder with ours at its real size, on the first batches, and detect later changes of it.

    copies       both with the same parameters in float64; the real lists, buckets and buffers, no hooks
    compared     the summed log-probability of every stratum; then again near these parameters, with its derivative
                 along one random direction of u, v, l and all parameters, in which any different gradient shows; and
                 the attributes that forward changes
    memory       the derivative is computed in forward mode, so no activations are saved; ours runs stratum by stratum

    snapshot     parameters, children and lists of indices by identity; numbers, strings, buffers and other tensors by
                 value; no hooks on modules that ours does not run, except those of Lightning and this package, which
                 only observe

Parameters that move to a device or change dtype keep their identity. A tensor that is another object, or was written
to, is compared once with the stored values, rounded as such a change rounds. So steps without changes do not
synchronize the device. The module and the caller's random state do not change.
Known limits: gradients that only a backward pass changes (hooks on tensors) are compared only on the small copy. A
stratum is not compared where the module's result is not finite. Changes of classes, inside attributes of other types
and lists, through `tensor.data`, or below float32 rounding are not detected. Legend: cell (B), anchor (N), dim (D),
stratum (K), feature (F).
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_amp._torch import has_no_values, version_of
from lightning_amp.adapters.forms.adapted_decoder import LISTS, AdaptedDecoder, AdaptedStratum
from lightning_amp.adapters.forms.multires import MultiResDecoder
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import AmpError, InstallError, ModelError
from lightning_amp.footprint.forward_overrides import HOOKS
from lightning_amp.footprint.run_again.recompute_state import DEPTH, mark_of
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.checks.same_function import failure, own_attributes

SHOWN = 3
PLAIN = (int, float, str)
WATCHERS = ("lightning_amp", "lightning", "pytorch_lightning")
"""Packages whose hooks change nothing: the check for finite numbers, profilers, summaries."""


class Snapshot:
    """Snapshot of a foreign decoder."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self._found, tensors = _found(module)
        self._tensors = {name: _TensorThen(tensor) for name, tensor in tensors.items()}

    def check(self, module: nn.Module, decoder: nn.Module) -> None:
        """Raise if the module has changed since the snapshot."""
        found, tensors = _found(module)
        changes = [
            # a parameter that is None counts as missing
            f"{name!r} {_change(self._found.get(name), found.get(name))}"
            for name in self._found | found
            if not _same(self._found.get(name), found.get(name))
        ]
        changes += [
            f"{name!r} has other values than it had"
            for name, kept in self._tensors.items()
            if not kept.is_still(tensors.get(name))
        ]
        changes += [f"{name!r} has hooks, which would not run" for name in hooked(module, decoder)]
        if changes:
            raise InstallError(
                f"the decoder {type(module).__name__!r} has changed since the plan was installed:"
                f" {', '.join(changes[:SHOWN])}{f' and {len(changes) - SHOWN} more' if len(changes) > SHOWN else ''};"
                " what the plan runs in its place was made before that: make such changes before fit, in `__init__`,"
                " `configure_model` or `setup`, or train with strategies='S1', which runs the decoder's own forward"
            )


class Marks:
    """Snapshot of all attributes of a module and its submodules, nested ones included, without lists of indices.

    `changed` must be called before other code changes the module.
    """

    def __init__(self, module: nn.Module) -> None:
        # kept alive, so that no new object gets the id of an old one
        self._kept: list[object] = []
        self._marks = self._of(module)

    def changed(self, module: nn.Module) -> list[str]:
        """Return the names of attributes that have changed."""
        after = self._of(module)
        return [name for name in self._marks | after if self._marks.get(name) != after.get(name)]

    def _of(self, module: nn.Module) -> dict[str, Any]:
        seen: dict[int, Any] = {id(child): child for child in module.modules()}
        found: dict[str, Any] = {}
        for fqn, child in module.named_modules():
            for name, value in (own_attributes(child) | child._parameters | child._buffers | child._modules).items():
                if fqn or name not in LISTS:
                    found[f"{fqn}.{name}" if fqn else name] = value
        self._kept += [seen, found]
        return {name: mark_of(value, seen, DEPTH) for name, value in found.items()}


class _TensorThen:
    """Stored values of a tensor, which may move to another device or change its dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach().cpu().clone()
        self._object, self._version = tensor, version_of(tensor)

    def is_still(self, tensor: Tensor | None) -> bool:
        """Return whether `tensor` is the stored one, or has the same values."""
        if tensor is None:
            return False
        if tensor is self._object and version_of(tensor) == self._version:
            return True
        same = torch.equal(_rounded(self._values, tensor.dtype), _rounded(tensor.detach().cpu(), tensor.dtype))
        if same:
            self._object, self._version = tensor, version_of(tensor)
        return same


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values as a conversion to this dtype does, possibly through float32."""
    if not values.is_floating_point():
        return values
    return values.float().to(dtype if dtype.itemsize < torch.float32.itemsize else torch.float32)


def _found(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return attributes that are compared by identity or equality, and tensors that are not parameters."""
    found: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    # all names of a module: it may be replaced under one of them
    for fqn, child in module.named_modules(remove_duplicate=False):
        prefix = f"{fqn}." if fqn else ""
        for name, value in chain(child._parameters.items(), child._modules.items()):
            found[prefix + name] = value
        for name, value in chain(child._buffers.items(), own_attributes(child).items()):
            if isinstance(value, PLAIN):
                found[prefix + name] = value
            elif isinstance(value, Tensor):
                tensors[prefix + name] = value
    for name in (*LISTS, "res_specs"):
        # not getattr: a property may return a new list every time
        found[name] = vars(module).get(name)
    return found, tensors


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b)


def _change(old: object, new: object) -> str:
    if old is None or new is None:
        return "was added" if old is None else "is not there any more"
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return f"was {old!r} and is {new!r}"
    return f"is another {type(new).__name__} than it was"


def hooked(module: nn.Module, decoder: nn.Module) -> list[str]:
    """Return the names of modules in a foreign decoder whose hooks would not run, because ours does not run them.

    These are attention and gated activations, which ours computes itself, and layers that ours does not share.
    """
    found = {
        fqn: child
        for fqn, child in module.named_modules()
        if fqn and any(not _watches(hook) for kind in HOOKS for hook in getattr(child, kind).values())
    }
    run = set(decoder.modules()) if found else set()
    return [fqn for fqn, child in found.items() if child not in run]


def _watches(hook: Any) -> bool:
    source = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return source.split(".")[0] in WATCHERS


def no_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a memo with which deepcopy omits a module's hooks."""
    return {id(getattr(child, kind)): OrderedDict() for child in module.modules() for kind in HOOKS}


CLOSE = 1e-9
MOVE = 0.1
LEAST_CELLS = 2
ALWAYS_BYTES = 2**24
PARTS = ("log-probability", "gradient")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class FirstBatch:
    """Compare a foreign decoder with ours in its first call of every kind.

    Kinds are training and evaluation, with a subset of anchors and without, with gradients and without.
    """

    def __init__(self, module: nn.Module, decoder: AdaptedDecoder) -> None:
        self.module = module
        # a copy from before installation: techniques replace modules of ours, but not parameters and their layers
        self.plain = copy.deepcopy(decoder, no_hooks(decoder) | {id(t): t for t in _tensors(decoder)})
        self.cells = 0
        self._calls: set[tuple[bool, ...]] = set()

    def allow(self, *, usual: int, free: int | None) -> str:
        """Allow a comparison within some memory; return why there will be none, or "".

        The comparison takes as many cells as fit in `usual`, the bytes of the strata in a step, but at least two;
        `free` is the free memory in bytes, None if unknown.
        """
        plain, parameters = self.plain, sum(p.numel() for p in self.module.parameters())
        # all parameters, one stratum of eager attention, and results for the features of all strata; every number is
        # float64 and may have a derivative
        rows = plain.n_anchors * (12 * plain.window + 27 * plain.dim)
        fixed, each = 16 * (2 * parameters + rows), 16 * 14 * plain.n_features
        least = fixed + LEAST_CELLS * each
        if free is not None and least > free:
            left = format_bytes(max(free, 0))
            return f"needs {format_bytes(least)} in addition to the rest of a step, and {left} are left"
        self.cells = max(LEAST_CELLS, (max(usual, ALWAYS_BYTES) - fixed) // each)
        return ""

    def look(self, inputs: Inputs, x: Tensor | SparseCounts | None, subset: Any = None) -> None:
        """Compare on these inputs and counts (None: zeros), if allowed and not done yet for this kind of call."""
        call = self.module.training, subset is None
        # derivatives take most of the time, and matter only if gradients are enabled
        directed = torch.is_grad_enabled()
        if not self.cells or has_no_values(inputs[0]):
            # a step that is counted has no values to compare
            return
        # a comparison with derivatives includes one without
        if (*call, True) in self._calls or (*call, directed) in self._calls:
            return
        cells, rows = min(self.cells, len(inputs[0])), len(inputs[1])
        where = f"on the first batch of {cells!r} cells and {rows!r} rows of v"
        try:
            with torch.inference_mode(False), torch.no_grad():
                found = self._difference(inputs, x, subset, directed=False)
                if directed and not found:
                    found = self._difference(inputs, x, subset, directed=True)
        except (AmpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"the decoder {type(self.module).__name__!r} fails where it is compared with what the plan runs in its"
                f" place, {where}, with {failure(error)}: repair that, or train with strategies='S1', which runs the"
                " decoder's own forward"
            ) from error
        if found:
            raise ModelError(
                f"the decoder {type(self.module).__name__!r} {found} what the plan runs in its place, {where}; on a"
                " small example they agree: it does something with its sizes, or with a setting or buffer, that no"
                " decoder of HiGLUE's does. Train with strategies='S1', which runs the decoder's own forward"
            )
        self._calls.add((*call, directed))

    def _difference(self, inputs: Inputs, x: Tensor | SparseCounts | None, subset: Any, *, directed: bool) -> str:
        module, plain = self._copies()
        theirs = type(module).forward
        if subset is not None:
            theirs, plain = partial(theirs, subset=subset), cast(MultiResDecoder, plain).among(subset)
        u, v, b, l = inputs  # noqa: E741
        some = slice(min(self.cells, len(u)))
        b = b[some] if b.dim() and len(b) == len(u) else b
        counts = torch.zeros(len(u[some]), plain.n_features, device=u.device) if x is None else x[some]
        dense = counts.to_dense() if isinstance(counts, SparseCounts) else counts
        inputs = _exact(u[some]), _exact(v), b, _exact(l[some])
        return difference(module, theirs, plain, inputs, _exact(dense), directed=directed)

    def _copies(self) -> tuple[nn.Module, AdaptedDecoder]:
        memo = no_hooks(self.module) | no_hooks(self.plain)
        for tensor in _tensors(self.module):
            exact = _exact(tensor) if tensor.is_floating_point() else tensor.detach().clone()
            memo[id(tensor)] = nn.Parameter(exact) if isinstance(tensor, nn.Parameter) else exact
        memo[id(vars(self.module).get("forward"))] = None
        module = copy.deepcopy(self.module, memo)
        vars(module).pop("forward", None)
        return module, copy.deepcopy(self.plain, memo)


def difference(
    module: nn.Module,  # it and `decoder` have the same parameters, which are written to
    theirs: Callable[..., Any],  # the module's forward
    decoder: AdaptedDecoder,
    inputs: Inputs,
    x: Tensor,
    *,
    directed: bool,  # compare derivatives too, at parameters that were moved away from their values
) -> str:
    """Describe the difference between a foreign decoder in float64 and ours, to precede "ours"; "" if there is none."""
    for parameter in module.parameters():
        # not no_grad: code may read whether gradients are enabled; without requires_grad nothing is saved
        parameter.requires_grad_(False)
    devices = [x.device] if x.device.type == "cuda" else []
    with (
        # torch warns about itself at its first forward-mode derivative
        warnings.catch_warnings(action="ignore"),
        torch.enable_grad(),
        torch.random.fork_rng(devices),
        forward_ad.dual_level(),
    ):
        inputs = _directed(module, inputs) if directed else inputs
        marks = Marks(module)
        with torch.autocast(x.device.type, enabled=False):
            # computed together, compared per stratum: in a sum over all strata, two errors could cancel
            log_prob = theirs(module, *inputs).log_prob(x)
            expected = _numbers(log_prob[:, slice(*cast(AdaptedStratum, one).columns)].sum() for one in decoder.strata)
            names = marks.changed(module)
            (u, v, b, l), ours = inputs, []  # noqa: E741
            log_weights = decoder.log_weights(u)
            for k, one in enumerate(decoder.strata):
                stratum = cast(AdaptedStratum, one)
                nll, v = stratum(v, u, **stratum.arguments(k, log_weights, batch=b, library=l, x=x))
                ours.append(-nll)
            found = _numbers(ours)
    if names:
        return f"changes its attributes {names[:SHOWN]!r} in forward, unlike"
    known = expected.isfinite()
    # relative to the norm: derivatives of single strata may be near zero
    scale = torch.stack([expected[0].abs(), expected[1][known[1]].norm().expand_as(expected[1])])
    wrong = known & ~((found - expected).abs() <= CLOSE * scale)
    for what, strata in zip(PARTS, wrong, strict=True):
        if strata.any():
            return f"has another {what} in the strata {strata.nonzero().flatten().tolist()!r} than"
    return ""


def _directed(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs as dual numbers with a random direction; parameters are moved and made dual in place."""
    generator = torch.Generator().manual_seed(0)

    def directed(value: Tensor, move: float = 0.0) -> Tensor:
        way = torch.randn(value.shape, dtype=value.dtype, generator=generator).to(value.device)
        return cast(Tensor, forward_ad.make_dual(value + move * way, way))  # type: ignore[no-untyped-call]

    for parameter in module.parameters():
        # many parameters are zero initially, so an error in a product of two would not show
        parameter.copy_(directed(parameter.detach(), MOVE))
    u, v, b, l = inputs  # noqa: E741
    return directed(u), directed(v), b, directed(l)


def _numbers(totals: Iterable[Tensor]) -> Tensor:
    """Return values and derivatives [2, stratum]; the derivative of a tensor without a direction is 0."""
    pairs = [forward_ad.unpack_dual(total) for total in totals]  # type: ignore[no-untyped-call]
    ways = [torch.zeros_like(one) if way is None else way for one, way in pairs]
    return torch.stack([torch.stack([one for one, _ in pairs]), torch.stack(ways)])


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
