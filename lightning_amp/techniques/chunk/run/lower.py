"""Generate the Python code of a captured block's forward that runs regions in chunks.

    def region_0(put, size, softmax_input, value):      one chunk of `size` positions
        softmax = torch.softmax(softmax_input, -1); del softmax_input
        put(0, torch.matmul(softmax, value))
    def forward(weight, input_0): ...                   the block; a call of region_0 replaces its rows

Every value is deleted after its last use, so that live memory is as planned. Operators, their order and their arguments
are those of the graph; in a chunk, the size of the cut dim is that of the chunk.

The generated code calls operators by their Python functions (`BINDINGS`), which start the same operator with the same
arguments faster than overloads: functions have a compiled argument parser, while overloads look arguments up in a
schema. An operator that is not listed is called as an overload.
"""

import linecache
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from keyword import iskeyword
from operator import getitem
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from lightning_amp._torch import ACTIVATIONS_IN_C, OpOverload, tree_flatten, tree_leaves, tree_unflatten
from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.guards import state_of
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import Region, within, written_over
from lightning_amp.techniques.chunk.run.function import ChunkedRegion, Output
from lightning_amp.techniques.chunk.run.in_place import with_memory, writing
from lightning_amp.techniques.chunk.run.two_steps import neighbours

_SPACES = {
    "torch.nn.functional": "avg_pool2d.default gelu.default gelu.out linear.default"
    " scaled_dot_product_attention.default",
    ACTIVATIONS_IN_C: "elu.default elu.out leaky_relu.default leaky_relu.out silu.default silu.out"
    " upsample_nearest2d.vec",
    "torch.Tensor": "expand.default view.default",
    "torch": "add.Tensor add.out addcmul.default addcmul.out bmm.default cat.default conv2d.default flatten.using_ints"
    " group_norm.default layer_norm.default matmul.default mean.dim mul.Tensor mul.out permute.default relu.default"
    " reshape.default select.int sigmoid.default sigmoid.out softmax.int sub.Tensor sub.out transpose.int unflatten.int"
    " unsqueeze.default",
}
BINDINGS = {name: f"{space}.{name.partition('.')[0]}" for space, names in _SPACES.items() for name in names.split()}
"""Python function of each aten overload, as generated code calls it."""


def binding(target: OpOverload) -> str | None:
    """Return the function that starts an operator, as Python source; None if there is none."""
    space, _, name = target._schema.name.partition("::")
    return BINDINGS.get(f"{name}.{target._overloadname}") if space == "aten" else None


SIZES = ("size", "shape", "sizes")
"""Arguments of view operators with sizes of all result dims; for `unflatten`, of the dims made from one dim."""
_FILES = count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """Generated forward of a block.

    Attributes:
        capture: The captured block.
        code: Python source of `forward` and of one function per region.
        forward: Takes parameters and buffers, then tensor inputs; returns the flat results.
        regions: Regions by their function name in the code.
        cut: Regions of the plan, in order.
        inner: Forward that runs in every chunk, if chunks are nested.
        norms: Group norms that `capture` computes in two steps, by their place in the original block (two_steps.py).
    """

    capture: Capture
    code: str
    forward: FunctionType = field(repr=False)
    regions: Mapping[str, ChunkedRegion] = field(repr=False)
    cut: tuple[Region, ...] = ()
    inner: "Lowered | None" = field(default=None, repr=False)
    norms: frozenset[int] = frozenset()

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns for a call with the signature of the capture."""
        values, _ = tree_flatten((args, kwargs))
        given = (value for value in values if isinstance(value, Tensor))
        return tree_unflatten(self.forward(*state_of(block).values(), *given), self.capture.output)


def lower(capture: Capture, table: Table, regions: Sequence[Region]) -> Lowered:
    """Generate the forward of a block; its regions share no row, and `table` comes from `table_of`."""
    return _Writer(capture, table).lower(sorted(regions, key=lambda region: region.first))


def table_of(capture: Capture, *, near: bool = False) -> Table:
    """Return the table of a capture, marked so that no region contains an operator that must not run in chunks.

    Operators that do not compute tensors (such as a change of the gradient mode), and operators that read memory by
    offset (`as_strided`; chunks have other strides), are marked as writing to the memory that they may depend on.

    With `near`, for inference, dims of convolutions follow those of their input with neighbours (`OperatorRow.near`).
    """
    table = build_table(capture)
    if not torch.is_grad_enabled():
        table = with_memory(table, capture.nodes)
    rows = []
    for i, (node, row) in enumerate(zip(capture.nodes, table.rows, strict=True)):
        own = node.target is getitem or isinstance(node.target, OpOverload)
        if row.kind == OPERATOR and not own:
            row = replace(row, writes=(i,))
        elif row.op.startswith("aten.conv"):
            if near and (found := dict(neighbours(node))):
                dims = (((0, d),) if d in found else follows for d, follows in enumerate(row.dims or ()))
                row = replace(row, near=tuple(found.items()), dims=tuple(dims))
        elif "as_strided" in row.op:
            row = replace(row, writes=row.inputs)
        rows.append(row)
    return replace(table, rows=tuple(rows))


class _Size(str):
    """A size expression, printed without quotes; evaluated when a chunk runs."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A statement, and the rows whose values it makes and reads."""

    text: str
    made: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


class _Writer:
    """Writes the code: names of all rows, and values that have no source text and are passed as globals."""

    def __init__(self, capture: Capture, table: Table) -> None:
        self._capture, self._table = capture, table
        self._nodes = capture.nodes
        self._row = {node: i for i, node in enumerate(self._nodes)}
        self._values: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "inf": math.inf, "nan": math.nan}
        self._taken = {"put", "size", "forward", *self._values}
        # arguments have the names that `Capture.changed` uses
        given = chain(capture.names, (f"input {k}" for k in count()))
        self._names = [self._name(next(given) if node.op == "placeholder" else node.name) for node in self._nodes]

    def lower(self, regions: Sequence[Region]) -> Lowered:
        """Write and compile the code, and define the regions that it calls."""
        named = {self._name(f"region_{k}"): region for k, region in enumerate(regions)}
        parts = [self._region(name, region) for name, region in named.items()]
        code = "\n\n\n".join([*parts, self._forward(named)])
        # registered with linecache, so that tracebacks show the generated lines
        name = f"<lightning_amp.chunk {next(_FILES)}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        space = dict(self._values)
        exec(compile(code, name, "exec"), space)
        chunked = {name: self._chunked(space[name], region) for name, region in named.items()}
        # `space` has the globals of the generated functions. Each region function, which computes one chunk, is
        # replaced under its name by the object that runs all chunks
        space |= chunked
        return Lowered(capture=self._capture, code=code, forward=space["forward"], regions=chunked, cut=tuple(regions))

    def _name(self, wish: str) -> str:
        """Return a free Python name, as similar to `wish` as possible."""
        name = "".join(c if c.isalnum() and c.isascii() else "_" for c in wish)
        name = f"_{name}" if not name or name[0].isdigit() or iskeyword(name) else name
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _forward(self, regions: Mapping[str, Region]) -> str:
        arguments = [i for i, node in enumerate(self._nodes) if node.op == "placeholder"]
        (output,) = (node for node in self._capture.graph.graph.nodes if node.op == "output")  # type: ignore[union-attr]
        lines = list(self._main(regions))
        read = tuple(self._row[node] for node in tree_leaves(output.args) if isinstance(node, Node))
        lines.append(_Line(f"return {self._text(output.args[0])}", read=read))
        head = f"def forward({', '.join(self._names[i] for i in arguments)}):"
        return "\n".join([head, *self._with_ends(lines, set(arguments))])

    def _main(self, regions: Mapping[str, Region]) -> Iterator[_Line]:
        """Yield rows one by one; for a region the rows before its chunks, then one call that runs all chunks."""
        within = {i: name for name, region in regions.items() for i in region.inside(self._table)}
        before = {i for region in regions.values() for i in region.before}
        # a region is called at the place of its last row; rows that are computed before its pieces come earlier, at
        # their own places
        ends = {region.last: name for name, region in regions.items()}
        for i, node in enumerate(self._nodes):
            if node.op == "get_attr":
                value = getattr(self._capture.graph, str(node.target))
                yield _Line(f"{self._names[i]} = {self._constant(value)}", made=(i,))
            elif node.op != "placeholder" and i not in within:
                yield self._statement(i, in_place=i not in before)
            if i in ends:
                region = regions[ends[i]]
                inputs, outputs = region.inputs(self._table), region.outputs(self._table)
                names = ", ".join(self._names[k] for k in outputs)
                call = f"{ends[i]}({', '.join(self._names[k] for k in inputs)})"
                yield _Line(f"[{names}] = {call}", outputs, inputs)

    def _region(self, name: str, region: Region) -> str:
        inputs, outputs = region.inputs(self._table), region.outputs(self._table)
        lines = []
        for i in region.inside(self._table):
            in_place = within(self._table.rows, self._table.rows[i], region.inside(self._table))
            lines.append(self._statement(i, region, in_place=in_place))
            if i in outputs:
                lines.append(_Line(f"put({outputs.index(i)}, {self._names[i]})", read=(i,)))
        head = f"def {name}({', '.join(['put', 'size', *(self._names[k] for k in inputs)])}):"
        body = self._with_ends(lines, set(inputs))
        return "\n".join([*self._comment(region), head, *body])

    def _comment(self, region: Region) -> Iterator[str]:
        def listed(rows: Iterable[int]) -> str:
            return ", ".join(
                f"{self._names[i]} {'summed' if i in region.sums else 'dim ' + str(region.dims[i])}" for i in rows
            )

        sizes = [size for _, size in region.pieces()]
        last = f", the last of {sizes[-1]}" if sizes[-1] != sizes[0] else ""
        inputs = region.inputs(self._table)
        whole = [self._names[i] for i in inputs if i not in region.dims]
        yield f"# {len(sizes)} chunks of {sizes[0]} of {region.units} positions{last}"
        if region.reach:
            yield f"# with {region.reach} on either side of every chunk"
        yield f"# cut: {listed(i for i in inputs if i in region.dims)}"
        if whole:
            yield f"# whole: {', '.join(whole)}"
        yield f"# results: {listed(region.outputs(self._table))}"

    def _statement(self, i: int, region: Region | None = None, *, in_place: bool) -> _Line:
        over = self._table.rows[i].over if in_place else -1
        text = f"{self._names[i]} = {self._call(i, region, over)}"
        return _Line(text, (i,), tuple(dict.fromkeys(self._row[n] for n in self._nodes[i].all_input_nodes)))

    def _call(self, i: int, region: Region | None, over: int) -> str:
        node = self._nodes[i]
        if node.target is getitem:
            return f"{self._text(node.args[0])}[{node.args[1]!r}]"
        if node.target is torch.ops.aten.dropout.default and node.args[2:] == (False,):
            return self._text(node.args[0])
        args, kwargs = list(node.args), dict(node.kwargs)
        if region is not None and i in region.dims:
            self._resize(i, region, args, kwargs)
        given = [self._text(a) for a in args] + [f"{k}={self._text(v)}" for k, v in kwargs.items()]
        target = node.target
        if over >= 0:
            target, given = writing(target), [*given, f"out={self._names[over]}"]
        return f"{self._function(target)}({', '.join(given)})"

    def _resize(self, i: int, region: Region, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Replace the full size by that of a chunk in the arguments of a view."""
        schema = self._nodes[i].target._schema  # type: ignore[union-attr]
        dim, shape = region.dims[i], self._table.rows[i].shape
        for place, argument in enumerate(schema.arguments):
            if argument.name not in SIZES:
                continue
            at = dim
            if schema.name == "aten::unflatten":
                of = len(self._table.rows[self._table.rows[i].inputs[0]].shape)
                at -= int(args[1] if len(args) > 1 else kwargs["dim"]) % of
            holder, key = (args, place) if place < len(args) else (kwargs, argument.name)
            sizes = list(holder[key])  # type: ignore[index]
            # the list is a copy, because the same graph is lowered for other plans; -1 is valid for any length
            if 0 <= at < len(sizes) and sizes[at] != -1:
                each = shape[dim] // region.units
                sizes[at] = _Size("size" if each == 1 else f"{each} * size")
                holder[key] = sizes  # type: ignore[index]

    def _with_ends(self, lines: Sequence[_Line], kept: set[int]) -> Iterator[str]:
        """Yield statements, each followed by `del` of the values that no later statement reads."""
        # a value without a reader is deleted by the statement that makes it
        last = {i: n for n, line in enumerate(lines) for i in (*line.made, *line.read)}
        for n, line in enumerate(lines):
            ended = [self._names[i] for i in (*line.read, *line.made) if last[i] == n and i not in kept]
            gone = f"; del {', '.join(dict.fromkeys(ended))}" if ended and not line.text.startswith("return") else ""
            yield f"    {line.text}{gone}"

    def _function(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            if found := binding(target):
                return found
            space, _, name = target._schema.name.partition("::")
            path = (name, target._overloadname)
            if not any(iskeyword(part) or not part.isidentifier() for part in path):
                return ".".join(("aten", *path) if space == "aten" else ("torch.ops", space, *path))
        return self._constant(target)

    def _text(self, value: Any) -> str:
        """Return a value as Python source."""
        if isinstance(value, Node):
            return self._names[self._row[value]]
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self._text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, _Size | torch.dtype | torch.memory_format | torch.layout):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Return the global name of a value that has no source text."""
        known = next((name for name, own in self._values.items() if own is value), None)
        name = known or self._name(getattr(value, "__name__", "") or "constant")
        self._values[name] = value
        return name

    def _chunked(self, compute: Callable[..., None], region: Region) -> ChunkedRegion:
        over, inputs = written_over(self._table, region), region.inputs(self._table)
        outputs = tuple(
            Output(
                name=self._names[i],
                shape=tuple(self._nodes[i].meta["val"].shape),
                stride=dense_strides(self._nodes[i].meta["val"]),
                dtype=self._nodes[i].meta["val"].dtype,
                dim=None if i in region.sums else region.dims[i],
                needs_grad=self._table.rows[i].needs_grad,
                over=inputs.index(over[i]) if i in over else None,
            )
            for i in region.outputs(self._table)
        )
        return ChunkedRegion(
            compute=compute,
            length=region.units,
            bounds=region.pieces(),
            input_dims=tuple(map(region.dims.get, inputs)),
            outputs=outputs,
            reach=region.reach,
        )


def dense_strides(value: Tensor) -> tuple[int, ...]:
    """Return strides in the same dim order as a tensor's, without gaps, so that the same views are possible."""
    order = sorted(range(value.dim()), key=lambda d: (value.stride(d), -d), reverse=True)
    strides, step = [0] * value.dim(), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(value.shape[d], 1)
    return tuple(strides)
