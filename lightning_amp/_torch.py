"""Import every private name of torch that this package uses, with the reason; wrap private calls in functions."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# collectives that autograd and fake tensors support; torch.distributed.tensor uses them
import torch.distributed._functional_collectives as functional_collectives

# where recurrent networks find their kernels
from torch import _VF as recurrent_functions
from torch import Tensor, nn

# one operator on a list of tensors, which a device computes in one launch
from torch import _foreach_add_ as add_each
from torch import _foreach_copy_ as copy_each
from torch import _foreach_mul as times_each
from torch import _foreach_mul_ as scale_each
from torch import _foreach_neg_ as negate_each

# where libraries find FakeTensor, to ask whether a tensor is one
from torch import _subclasses as fake_tensors

# runs an operator without the __torch_function__ of a subclass of Tensor
from torch._C import DisableTorchFunction as without_torch_function
from torch._C import DisableTorchFunctionSubclass as disable_torch_function

# the innermost active hooks on tensors that autograd saves
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saving_hooks

# packs many tensors into one and unpacks them, without a Python call per tensor
from torch._C._nn import flatten_dense_tensors as flatten_each
from torch._C._nn import unflatten_dense_tensors as unflatten_like

# one operator with its schema, as the nodes of a captured graph have it
from torch._ops import OpOverload as OpOverload

# the memory format of a tensor's strides: that in which many kernels write their results
from torch._prims_common import suggest_memory_format as suggest_memory_format

# operators whose results on fake tensors are not those on meta tensors
from torch._subclasses.fake_impls import op_implementations_dict as special_fakes

# the error of an operator on fake tensors that returns a number of a tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutput

# tensors with a shape and no values; a module that gets one is being simulated
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

# computes only the shapes of operators on fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# while active, operators treat fake tensors as tensors of the device "meta"
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as as_meta

# the sequence number of the next node of the autograd graph
from torch.autograd import _get_sequence_nr as autograd_order  # type: ignore[attr-defined]

# the graph node of a Function written in Python, whose backward pass is user-defined
from torch.autograd.function import BackwardCFunction as PythonNode

# the marks that torch.distributed's composable functions, such as fully_shard, leave on a module
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

# the store of the default process group, which all ranks can access without a collective
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributions import Distribution

# records the operators of a call above autograd; torch.export and AOTAutograd start with it
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

# the common base of BatchNorm1d, 2d and 3d; `nn.SyncBatchNorm.convert_sync_batchnorm` tests for the same class
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

# the common base of nn.Dropout, nn.Dropout2d, nn.AlphaDropout, ...
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.optim import Optimizer

# a context that intercepts every operator: to count bytes, or to draw random numbers per cell
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# disables all such contexts: planning code must not be recorded as part of a step
from torch.utils._python_dispatch import _disable_current_modes as unseen

# put one of them back as it was
from torch.utils._python_dispatch import _pop_mode, _push_mode

# the leaves of nested tuples, lists and dictionaries
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# what non-reentrant checkpointing keeps of a call; its first argument runs the call again
from torch.utils.checkpoint import _CheckpointFrame as CheckpointFrame

# attention in one kernel, and its backward pass; the public function may pick one that stores all scores
attend_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
attend_on_cpu_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
attend_on_cuda = torch.ops.aten._scaled_dot_product_efficient_attention.default
attend_on_cuda_back = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
flash_on_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_on_cuda_back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

# names that are imported above under another name; mypy treats them as private otherwise
__all__ = [
    "AnyBatchNorm",
    "AnyDropout",
    "CheckpointFrame",
    "DataDependentOutput",
    "PythonNode",
    "as_meta",
    "autograd_order",
    "default_store",
    "special_fakes",
]
__all__ += ["add_each", "copy_each", "flatten_each", "negate_each", "scale_each", "times_each", "unflatten_like"]
__all__ += [
    "disable_torch_function",
    "fake_tensors",
    "functional_collectives",
    "recurrent_functions",
    "top_saving_hooks",
    "unseen",
    "without_torch_function",
]

# CPU flash attention, forward and backward -> the CUDA operator that computes the same
FLASH_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}

# environment variables that select or configure the allocator
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# packs a padded sequence; has no tag of values, though kernels of recurrent layers read its batch sizes from memory
pack_padded = torch.ops.aten._pack_padded_sequence.default

# x where another tensor is above a threshold, else 0, in one kernel
past_threshold = torch.ops.aten.threshold_backward.default

# the backward pass of a GELU, written to an existing tensor
gelu_backward = torch.ops.aten.gelu_backward.grad_input

# factor * sigmoid(beta x) in one kernel, written to an existing tensor
softplus_backward = torch.ops.aten.softplus_backward.grad_input

ACTIVATIONS_IN_C = "torch._C._nn"
"""Module with activations that accept `out=` and have no Python code around them, unlike torch.nn.functional."""

IS_ALL_TRUE = torch.ops.aten._is_all_true.default
"""Operator with which `torch.distributions` checks arguments (`validate_args`); little else uses it."""
GROUPED_MM = torch.ops.aten._grouped_mm.default
CTC_LOSS = torch.ops.aten._ctc_loss.Tensor
"""Variant with lengths as tensors; the backward pass of the variant with lists of numbers fails on fake tensors."""
RNN_ON_CPU = torch.ops.aten.mkldnn_rnn_layer.default

SOFTMAX_BACKWARD = (torch.ops.aten._softmax_backward_data.default, torch.ops.aten._softmax_backward_data.out)

# the attribute `grad` of every kind of tensor, which a property on a subclass replaces
GRADIENT: Any = torch._C.TensorBase.grad
SCALES_UPDATES = {"torch.optim._adafactor"}
"""Modules that read numbers of tensors only to scale updates by them: no shape and no branch depends on one."""


def softmax_backward(grad: Tensor, weights: Tensor, *, out: Tensor) -> None:
    """Compute the backward pass of a softmax over the last dim in one kernel, into `out`."""
    # torch writes contiguously, whatever the strides of `out` are
    assert out.is_contiguous(), "the output of a softmax's backward pass is contiguous"
    torch._softmax_backward_data(grad, weights, -1, out.dtype, grad_input=out)


def has_no_values(value: object) -> bool:
    """Whether `value` is a tensor without memory: a fake tensor (also a placeholder), or one on the device "meta"."""
    if not isinstance(value, Tensor):
        return False
    return any(isinstance(part, FakeTensor) or part.is_meta for part in parts_of(value))


def fake_like(first: dict[str, Any], on_meta: Tensor, device: torch.device) -> Tensor:
    """Make a fake tensor of `on_meta`; `first` has the attributes of a fake tensor of the same device that torch made.

    torch's constructor does the same, but takes longer than the rest of an operator on fake tensors.
    """
    found = Tensor._make_subclass(FakeTensor, on_meta, False, dispatch_device=True, device_for_backend_keys=device)
    if first["fake_mode"]._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
    else:
        torch._C._set_throw_on_mutable_data_ptr(found)
    vars(found).update(first)
    return found


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors inside a wrapper subclass, such as a rank's shard; of another tensor, the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    # a DTensor also lists its mesh, which is not a tensor
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [inner for part in parts if isinstance(part, Tensor) for inner in parts_of(part)]


def is_watched() -> bool:
    """Whether a mode intercepts every operator of this thread; it would not intercept those of other threads."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


class SharedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode that a deepcopy of its tensors, or of objects that hold some, shares.

    A copied FakeTensorMode has copies of torch's weak references to storages, and both release the same memory.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> "SharedFakeMode":
        """Return itself."""
        return self


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Suppress torch's log of operators that fail on fake tensors; the error is raised anyway."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def in_transform() -> bool:
    """Whether the current code runs inside a torch.func transform, such as vmap, grad or jvp."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def autograd_node() -> Any:
    """Return the node that the backward pass of this thread is computing; None outside of a backward pass."""
    return torch._C._current_autograd_node()


def version_of(x: Tensor) -> int:
    """Return autograd's counter of in-place writes to a tensor; an inference tensor has none."""
    return 0 if x.is_inference() else x._version


def counter_of(x: Tensor) -> Tensor:
    """Return a tensor without memory that shares the counter of in-place writes to a dense tensor."""
    found = x.detach()
    # the counter stays that of `x`
    found.data = x.new_empty(0)
    return found


def shares_version(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one counter of in-place writes: views do, results of `unsafe_chunk` do not."""
    if x.is_inference() or y.is_inference():
        return False
    before, other = x._version, max(x._version, y._version) + 1
    set_version: Any = torch._C._autograd._unsafe_set_version_counter
    # nothing else tells: write a number that neither has, and the old one back
    set_version((x,), (other,))
    found = y._version == other
    set_version((x,), (before,))
    return found


def whole_of(x: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself if it is not a view."""
    return x if x._base is None else x._base


def has_kernel(operator: OpOverload, key: str) -> bool:
    """Whether an operator has its own kernel under a dispatch key."""
    name = f"{operator._schema.name}.{operator._overloadname}".removesuffix(".default")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module was returned by `torch.compile`."""
    # imported here, because it takes seconds; if there is a compiled module, Lightning has imported it already
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule) or bool(vars(module).get("_compiler_ctx"))


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was returned by `torch.compile`, or compiled in place by `module.compile()`."""
    return is_wrapped(module) or bool(vars(module).get("_compiled_call_impl"))


def compile_context(module: nn.Module) -> Any:
    """Return the context of `torch.compile` that a compiled module runs in, with its backend and settings."""
    if is_wrapped(module):
        return vars(module)["dynamo_ctx"]
    # of `module.compile()` torch keeps a function, whose settings are in the closure of its public accessor
    return vars(module)["_compiled_call_impl"].get_compiler_config.__closure__[0].cell_contents


def innermost_backend(callback: Any) -> Any:
    """Return the backend in the wrappers that Dynamo puts around it."""
    from torch._dynamo.eval_frame import innermost_backend as find

    return find(callback)


def runs_uncompiled() -> bool:
    """Whether compiled modules run uncompiled now, by `torch.compiler.set_stance`."""
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "force_eager")


@contextmanager
def modes_on(modes: Sequence[Any]) -> Iterator[None]:
    """Activate dispatch modes again that `unseen` has disabled, without their `__enter__`; the first is innermost."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def compile_settings(*, graphs: int) -> AbstractContextManager[Any]:
    """Return a context with settings of torch.compile: one graph serves parameters and buffers of any size.

    More than `graphs` graphs of a function raise an error; by default torch would continue without compiling it.
    """
    # imported here, as above
    from torch._dynamo import config

    found: AbstractContextManager[Any] = config.patch(
        force_parameter_static_shapes=False,
        force_nn_module_property_static_shapes=False,
        recompile_limit=graphs,
        accumulated_recompile_limit=max(graphs, config.accumulated_recompile_limit),
        fail_on_recompile_limit_hit=True,
    )
    return found


def compiler_errors() -> type[Exception]:
    """Return the class of the errors of Dynamo and of the backends that it calls."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def outside_function_modes() -> AbstractContextManager[Any]:
    """Return a context without torch function modes, which torch.compile would trace."""
    return without_torch_function() if torch._C._len_torch_function_stack() else nullcontext()


def values_are_checked() -> bool:
    """Whether torch's distributions validate their arguments by default; a distribution may override this."""
    return Distribution._validate_args


def multiplies_in_tf32() -> bool:
    """Whether float32 products may run in TF32 on CUDA, by either of torch's two settings."""
    requested = torch.backends.cuda.matmul.fp32_precision
    # "none" means the setting of all backends
    of_all = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return bool((of_all if requested == "none" else requested) == "tf32")


def after_step_first(optimizer: Optimizer, hook: Callable[..., None]) -> Any:
    """Call a function after an optimizer's step, before the hooks that are there; return its handle."""
    handle = optimizer.register_step_post_hook(hook)
    # an OrderedDict, annotated as a dict
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def set_allocator(settings: str) -> None:
    """Configure an accelerator's allocator for future segments, as `ALLOCATOR_VARIABLES` do."""
    torch._C._accelerator_setAllocatorSettings(settings)


def own_class(module: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    """Return a module's class before `fully_shard`, and the attributes of `fully_shard`, which a copy cannot have."""
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)], (STATE_KEY, REGISTRY_KEY)
