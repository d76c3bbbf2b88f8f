"""Import the private parts of torch's compilers that this technique uses, which take a second to import."""

from typing import Any, NamedTuple


class FunctorchParts(NamedTuple):
    """The settings of AOTAutograd, and what partitions its joint graphs."""

    config: Any
    partitioners: Any


class InductorParts(NamedTuple):
    """The settings of TorchInductor, and what compiles its kernels and loads its code."""

    config: Any
    AsyncCompile: Any
    PyCodeCache: Any


def functorch_parts() -> FunctorchParts:
    """Return the parts of AOTAutograd."""
    from torch._functorch import config, partitioners

    return FunctorchParts(config, partitioners)


def inductor_parts() -> InductorParts:
    """Return the parts of TorchInductor."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    return InductorParts(config, AsyncCompile, PyCodeCache)
