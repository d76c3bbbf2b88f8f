"""Run the graphs of a compiled module on fake tensors: every byte is counted, and no kernel is compiled.

A copy's compiled module is compiled once more, by the user's own backend, with the graph's inputs as they come. What a
backend made of the joint graph of AOTAutograd runs as in training: the same buffers are made, reused and freed in the
same order. Backends that run operators (such as "aot_eager") need nothing else. TorchInductor's generated Python code
runs too, with kernels that compute nothing, and operators of other libraries on fake tensors.

Operators below the compiled call are recorded like all others; tracing and compiling are not. Dynamo traces a module
without the recorder's hooks, which are no part of what is trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_amp._torch import (
    FakeTensor,
    compile_context,
    fake_tensors,
    innermost_backend,
    is_compiled,
    is_wrapped,
    modes_on,
    unseen,
)
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.no_side_effects import files_on_disk
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.holding import replacing
from lightning_amp.techniques.compiled_budget._torch import functorch_parts, inductor_parts

HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
KERNELS = ("cpp_pybinding", "cpp", "triton")
"""Methods of TorchInductor's `AsyncCompile` that compile a kernel."""


def compiled_in(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled modules in a module by name; "" is the module itself."""
    found = dict[str, nn.Module]()
    for name, child in module.named_modules():
        if is_compiled(child) and not any(not one or name.startswith(f"{one}.") for one in found):
            found[name] = child
    return found


def counted_call(module: nn.Module, original: nn.Module, name: str) -> Callable[..., Any]:
    """Return what a copy of a compiled module runs on fake tensors instead of its compiled code.

    Args:
        module: The copy.
        original: The user's module, which has the backend and the settings.
        name: Its name, for errors.
    """
    context, modes = compile_context(original), list[Any]()
    chosen: Any = innermost_backend(context.callback)

    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        # TorchInductor compiles a probe of the CPU's instructions once for the process, in files
        with _without_kernels(), files_on_disk():
            compiled = chosen(graph, inputs)

        def run(*args: Any) -> Any:
            with modes_on(modes):
                return compiled(*args)

        return cast(Any, torch.compiler.disable)(run)  # type: ignore[no-any-return]

    call: Any = module._orig_mod if is_wrapped(module) else module._call_impl
    # one graph: the code between two would not be counted
    compiled = torch.compile(call, backend=backend, dynamic=context._dynamic, fullgraph=True)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            modes[:] = stack.enter_context(unseen())
            stack.enter_context(_without_hooks())
            stack.enter_context(torch.compiler.set_stance("default"))
            stack.enter_context(replacing(fake_tensors, FakeTensor=FakeTensor))
            stack.enter_context(replacing(QuickFakes, __torch_dispatch__=_dispatch()))
            try:
                return cast(Any, compiled)(*args, **kwargs)
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                raise ModelError(
                    f"compiled_budget: {name or type(module).__name__!r} does not compile to one graph: {first};"
                    " compile parts of it without graph breaks, or leave compiled_budget out"
                ) from error

    return counted


@cache
def _dispatch() -> Callable[..., Any]:
    return cast(Any, torch.compiler.disable)(QuickFakes.__torch_dispatch__)  # type: ignore[no-any-return]


@contextmanager
def _without_hooks() -> Iterator[None]:
    with ExitStack() as stack:
        for name in HOOKS:
            hooks = getattr(torch_module, name)
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        yield


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Let TorchInductor generate its code, and load it with kernels that compute nothing; its caches are not used."""
    inductor, functorch = inductor_parts(), functorch_parts()
    written = [""]

    def write(source: str, extra: str = "") -> tuple[str, str]:
        written[:] = [source]
        return "counted", ""

    def load(key: str, path: str, linemap: Any = None, attrs: Any = None, **_: Any) -> ModuleType:
        # a module of its own: torch's would be found again by the run that trains
        found = ModuleType(key)
        found.__file__ = path
        exec(compile(written[0], "counted", "exec"), vars(found))
        vars(found).update(attrs or {}, **_FAKES)
        return found

    with ExitStack() as stack:
        stack.enter_context(replacing(inductor.PyCodeCache, write=write, load_by_key_path=load))
        stack.enter_context(replacing(inductor.AsyncCompile, **dict.fromkeys(KERNELS, _no_kernel)))
        stack.enter_context(functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        stack.enter_context(
            inductor.config.patch(
                {"fx_graph_cache": False, "size_asserts": False, "alignment_asserts": False, "triton.cudagraphs": False}
            )
        )
        yield


class _Kernel:
    """A kernel that computes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__


def _no_kernel(*_: Any, **__: Any) -> _Kernel:
    return _Kernel()


def _empty(device: str) -> Callable[..., Tensor]:
    def make(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return make


def _view(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    # as inductor's own function, whose views autograd does not see
    return tensor.detach().as_strided(size, stride, tensor.storage_offset() + offset)


_FAKES = {"empty_strided_cpu": _empty("cpu"), "empty_strided_cuda": _empty("cuda"), "reinterpret_tensor": _view}
"""What generated code calls below the dispatcher, as operators."""
