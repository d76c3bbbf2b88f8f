"""Name the Python functions that start the operators of generated code in less time than overloads take.

An overload, called from Python, looks its arguments up in a schema; a function of torch has a parser that was compiled.
Both start the same operator with the same arguments. What is not listed here is called as an overload.
"""

from lightning_amp._torch import ACTIVATIONS_IN_C, OpOverload

_FUNCTIONAL = (
    "avg_pool2d.default",
    "gelu.default",
    "gelu.out",
    "linear.default",
    "scaled_dot_product_attention.default",
)
_NN = (
    *("elu.default", "elu.out", "leaky_relu.default", "leaky_relu.out", "silu.default", "silu.out"),
    "upsample_nearest2d.vec",
)
_TENSOR = ("expand.default", "view.default")
_TORCH = (
    *("add.Tensor", "add.out", "addcmul.default", "addcmul.out", "bmm.default", "cat.default", "conv2d.default"),
    *("flatten.using_ints", "group_norm.default", "layer_norm.default", "matmul.default", "mean.dim", "mul.Tensor"),
    *("mul.out", "permute.default", "relu.default", "reshape.default", "select.int", "sigmoid.default", "sigmoid.out"),
    *("softmax.int", "sub.Tensor", "sub.out", "transpose.int", "unflatten.int", "unsqueeze.default"),
)
_SPACES = {"torch.nn.functional": _FUNCTIONAL, ACTIVATIONS_IN_C: _NN, "torch.Tensor": _TENSOR, "torch": _TORCH}
BINDINGS = {name: f"{space}.{name.partition('.')[0]}" for space, names in _SPACES.items() for name in names}
"""Of overloads of aten, as generated code has them."""


def binding(target: OpOverload) -> str | None:
    """The function that starts an operator, as Python source; None if there is none."""
    space, _, name = target._schema.name.partition("::")
    return BINDINGS.get(f"{name}.{target._overloadname}") if space == "aten" else None
