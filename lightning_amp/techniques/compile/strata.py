"""Run a stratum's key and the likelihood of its cells through torch.compile (compile).

    key     one graph for all strata, which have equally many anchors
    nll     one graph for all numbers of features and cells

Exact up to rounding, without collectives. Modules with a hand-written backward pass (`stays_eager`), and keys that
`stream` has replaced, run eagerly between graphs. Without such modules, code that does not fit into one graph raises
torch's error; more graphs than `GRAPHS` always do. In a simulation nothing is compiled. mode="reduce-overhead" records
CUDA graphs, which own the memory of a stratum's results until the next step; it does not support a backward pass
between two strata, as with `stream`.

Known limits: the bytes that a compiled stratum keeps, and its peak, depend on the compiler and are not predicted;
`mean` and `spine` are not compiled.
"""

import time
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_amp._torch import compile_settings, has_no_values
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import Position, overrides_of
from lightning_amp.shapes import Scalar
from lightning_amp.techniques.compile.row import CompileStrata
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder
from lightning_amp.techniques.hic.strata.stream import StreamedStrata

MODES = ("default", "reduce-overhead")
GRAPHS = 8
"""Most graphs of the same code, for a decoder and for each of its strata; torch's own limit is 8. Most need a few
graphs: with and without gradients, one cell or many. Strata that differ in a number, as convolutions in their distance,
need as many each.
"""


def compile_strata(decoder: DecomposedDecoder, spec: CompileStrata, mesh: object) -> Change:
    """Run a decoder's strata through torch.compile."""
    device = next(cast(nn.Module, decoder).parameters()).device
    _check_mode(spec.mode, device, decoder)
    if device.type != "meta":
        _check_compiler(device)
    swaps: dict[str, nn.Module] = {}
    forwards: dict[str, Any] = {}
    graphs = GRAPHS * (1 + len(decoder.strata))
    for k, stratum in enumerate(cast(Any, decoder.strata)):
        if not callable(getattr(stratum, "nll", None)) or not hasattr(stratum, "sum_over_cells"):
            raise InstallError(
                f"compile does not support {type(stratum).__name__!r}, which has no method `nll` that its"
                " child `sum_over_cells` is called with; give it these, or leave 'compile' out"
            )
        eager = [name for name, leaf in stratum.named_modules() if getattr(leaf, "stays_eager", False)]
        in_key = [name for name in eager if name.startswith("key.")]
        nll = Compiled(spec.mode, dynamic=True, whole=eager == in_key, graphs=graphs)
        swaps[f"strata.{k}.sum_over_cells"] = CompiledCells(stratum.sum_over_cells, nll)
        key = getattr(stratum, "key", None)
        if key is not None and "forward" not in vars(key):
            forwards[f"strata.{k}.key"] = Compiled(spec.mode, dynamic=False, whole=not in_key, graphs=graphs)
        forwards |= {f"strata.{k}.{name}": AsItIs() for name in eager}
    return Change(swaps, forwards=forwards)


@dataclass(frozen=True)
class Compiled:
    """Replacement for a module's forward, or for one of its methods, that runs through torch.compile."""

    mode: str
    dynamic: bool  # whether one graph serves all sizes
    whole: bool  # whether it must be a single graph, without eager code in between
    graphs: int  # most graphs of the same code, for different settings and sizes

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the class's `forward`, compiled."""
        return self.run(type(module).forward, module, *args, **kwargs)

    def run(self, function: Any, module: nn.Module, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run `function(module, first, ...)`, compiled; `first` is a tensor."""
        if has_no_values(first):
            return function(module, first, *args, **kwargs)
        with compile_settings(graphs=self.graphs):
            return _compiled(function, self)(module, first, *args, **kwargs)


class CompiledCells(nn.Module):
    """Sum the compiled likelihood of a stratum over its cells; made by `compile_strata`."""

    def __init__(self, inner: nn.Module, compiled: Compiled) -> None:
        super().__init__()
        self.inner = inner
        self.compiled = compiled

    def forward(self, nll: Any, key: Tensor, u: Tensor, **cells: Any) -> Scalar:
        """Sum over cells of `nll(key, u, **cells)`."""
        return cast(Tensor, self.inner(partial(self.compiled.run, nll.__func__, nll.__self__), key, u, **cells))


class AsItIs:
    """Forward of a module that torch.compile must not trace: its class's `forward`."""

    def __init__(self) -> None:
        _hide()

    def __reduce__(self) -> tuple[type["AsItIs"], tuple[()]]:
        # unpickling in another process excludes it from compilation too
        return AsItIs, ()

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Run the class's `forward`."""
        return type(module).forward(module, *args)


@cache
def _hide() -> None:
    # not at class definition: this import of torch's compiler takes seconds, and most runs compile nothing
    AsItIs.__call__ = torch.compiler.disable(AsItIs.__call__)  # type: ignore[method-assign, no-untyped-call]


# cached by the function of a class, not by a stratum's method, so that strata of one class share a compiled function
# and its graphs
@cache
def _compiled(function: Any, how: Compiled) -> Any:
    return torch.compile(function, mode=how.mode, dynamic=how.dynamic, fullgraph=how.whole)


def _check_mode(mode: str, device: torch.device, decoder: Any) -> None:
    if mode not in MODES:
        raise InstallError(f"compile got mode={mode!r}; allowed are {', '.join(map(repr, MODES))}")
    if mode == "default" or device.type == "meta":
        return
    if device.type != "cuda":
        raise InstallError(
            f"compile got mode={mode!r}, whose graphs are CUDA's, on a device of type {device.type!r}; set"
            " mode='default' there"
        )
    twice = (one for stratum in decoder.strata for one in overrides_of(stratum) or () if one.position is Position.TWICE)
    between = "stream" if isinstance(decoder.walk, StreamedStrata) else next((one.strategy for one in twice), "")
    if between:
        raise InstallError(
            f"compile got mode={mode!r}, whose graphs own what a stratum returns until the next step, together with"
            f" {between}, which runs a backward pass between strata; set mode='default', or leave {between!r} out"
        )


def _check_compiler(device: torch.device) -> None:
    """Compile a small new function before the run; it is new so that no result in the disk cache is used."""
    # torch counts the graphs of a process, and those of earlier runs would use up the limit
    torch.compiler.reset()
    new = time.time_ns()
    try:
        torch.compile(lambda x: x + new, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:
        raise InstallError(
            f"compile is not supported on {str(device)!r}, where torch.compile cannot compile an addition:"
            f" {error}; it needs a C++ compiler, and Triton on CUDA: install them, or leave 'compile' out"
        ) from error
