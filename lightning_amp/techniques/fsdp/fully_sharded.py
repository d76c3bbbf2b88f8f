"""Apply torch's `fully_shard` (FSDP2) to any module: parameters, gradients and optimiser state over the data axis.

    a rank has        ceil(rows / R) rows of every parameter, of its gradient and of its optimiser state
    forward           a unit (look.py) gathers its parameters before its forward, and frees them after it
    backward          it gathers them again; its gradients are averaged over the ranks, and each rank keeps its rows
    the root          gathers the parameters of no unit for a full step, from its start to the end of backward; if the
                      step continues after it, their `.grad` is that of the rows, for manual clipping

The losses are weighted by the ranks' cells before (loss_weight.py), so the averages are the gradients of the mean loss
of the union batch, exact up to rounding. Gradients are reduced in every backward pass, also when they are accumulated:
no full gradients are kept.

Collectives of a unit per step: two all-gathers of its parameters, one reduction of its gradients; before each of them,
and at the end of both passes, one all-reduce of two integers (ranks/collectives.py).

In groups of S ranks, such as those of a node (HSDP), R is S: a group has all parameters, and gathers and reduces among
its ranks, followed by one all-reduce of the rows' gradients between the groups. All ranks of the data axis compare
their collectives. With `offload` the rows, their gradients and the optimiser's state lie in host memory, and the
optimiser runs there. A module that is on the host comes to the device a unit at a time, to be sharded; another one is
there once.

`training_step` and similar methods are not `forward`, so they are overridden on the instance; so are methods that
iterate over all parameters in a step, while those of the root are gathered. `undo` restores the module with full
parameters: trained ones if `ShardedParameter.restore` was called before, otherwise this rank's rows, and nan.

Writes into a gathered parameter (a critic's weights clamped in `training_step`) would be lost, and raise an error.

Known limits: second derivatives, and backward passes that the strategy has not started, raise an error. A block's
parameters are gathered only while its forward runs, so other code reads a rank's rows (a DTensor). Writes through
`.data` are detected in the first `LOOKS` steps only, and only for parameters outside blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.techniques.contract.protocol import Units
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, is_split, local
from lightning_amp.techniques.fsdp._torch import (
    begin_gathered,
    end_gathered,
    forget_step,
    make_root,
    start_backward,
    undo_fully_shard,
)
from lightning_amp.techniques.fsdp.look import SWAPPED, WRITTEN, chosen_units, refuse
from lightning_amp.techniques.fsdp.parameters import AddUp, Gather, ReachedParameters, shards_of, split_units
from lightning_amp.techniques.put_methods import STEPS, put_methods
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.collectives import Agreement, is_tried
from lightning_amp.techniques.ranks.sharded_region import leaves_of

ON_ALL = ("zero_grad", "toggle_optimizer", "untoggle_optimizer")
"""Methods that change all parameters or their gradients, and must run on the rank's rows."""
MIXED = "mixed torch.Tensor and DTensor"
"""Part of torch's error message when a rank's rows meet a full tensor."""
WRITES_INPUT = "RegisterPostBackwardFunction is a view and is being modified inplace"
"""The same when a block writes into what it is called with."""
LOOKS = 2
"""Number of training steps with expensive checks: values of parameters, and the leaves that a loss reads."""
STRAY = (
    "a backward pass was begun by loss.backward() or torch.autograd.grad, and under fsdp the strategy has to begin it,"
    " to weigh the loss and to average gradients: call self.manual_backward(loss) in place of loss.backward(); with"
    " torch.autograd.grad in a training step, as for a gradient penalty, train with strategies='S1'"
)


class FullySharded(Units):
    """A module whose parameters are sharded, until `undo`.

    Attributes:
        sharded: The sharded parameters; others, which have 0 dimensions, are replicated.
        groups, offload: As the arguments.

    Args:
        module: Has full parameters, equal on all ranks.
        fqns: Names or patterns of units, with "" for the rest of the module, which is always one.
        mesh: The data axis.
        groups: The same ranks with the axes "replicate" and "shard": parameters are sharded over the latter. With None,
            they are sharded over the full data axis.
        offload: Whether a rank's rows lie in host memory.

    Raises:
        InstallError: A parameter cannot be sharded, or a name matches no unit; the module is unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        fqns: Sequence[str],
        mesh: DeviceMesh,
        *,
        groups: DeviceMesh | None = None,
        offload: bool = False,
    ) -> None:
        units = chosen_units(module, fqns)
        # a gradient in host memory cannot be set on a parameter on the device
        self._shows = not offload or mesh.device_type == "cpu"
        refuse(module, units, by_hand=self._shows)
        self.sharded, self.groups, self.offload = (), groups, offload
        self._module: Any = module
        self._mesh, self._agreement = mesh, Agreement(mesh, "fsdp")
        self._depth, self._begun, self._looks = 0, False, LOOKS
        self._undo: list[Callable[[], None]] = []
        self._shown: list[tuple[ShardedParameter, Tensor, Tensor | None]] = []
        self._places = [
            (child, name, parameter)
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and parameter.dim()
        ]
        over = mesh if groups is None else groups["replicate", "shard"]
        self._split([*units.values(), module], over, offload=offload)
        among = mesh if groups is None else groups["shard"]
        self.sharded = tuple(shards_of(self._places, among))
        # kept to detect assignments to .data, which change neither the object nor its version
        self._storages = [parameter.shard.untyped_storage() for parameter in self.sharded]
        # after sharding: hooks of units must see the gathered parameters
        self._watch({**units, "": module})
        # Torch allocates the tensors of gathered parameters once, and they must not be inference tensors, although a
        # validation may run first.
        with torch.inference_mode(False):
            unit: Any
            for unit in (*units.values(), module):
                unit.unshard()
                unit.reshard()
        methods = {name: getattr(module, name) for name in (*STEPS, *ON_ALL) if getattr(module, name, None)}
        run = dict.fromkeys(STEPS, self._whole_step) | dict.fromkeys(ON_ALL, self.on_rows)
        put = {name: wraps(method)(partial(run[name], method)) for name, method in methods.items()}
        self._undo.append(put_methods(module, put))

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Context manager for the backward pass of a loss: gradients of all units are averaged; a collective.

        Raises:
            ModelError: Ranks have used different units (raised on every rank), or the loss reads a rank's rows.
        """
        if is_split(loss):
            raise ModelError(
                _read_elsewhere("the loss is computed from a rank's rows, such as a penalty on all weights")
            )
        if self._looks:
            self._refuse_old(loss)
        self._refuse_written(self._root)
        self._hide_gradients()
        if loss.requires_grad:
            start_backward(self._module, loss)
        self._begun = True
        try:
            yield
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise ModelError(_read_elsewhere(str(error))) from error
        finally:
            self._begun = False
        self._agreement.on("ends the backward pass")
        self._agreement.look()
        # with manual optimisation the step continues, and may read the root's parameters or clip their gradients
        if self._depth:
            # the backward pass has freed the root's
            self._gather_root()

    def before_update(self) -> None:
        """Raise a ModelError for gradients that have not been reduced to the rows that an optimiser updates."""
        if self._root.has_gradients():
            raise ModelError(STRAY)
        for parameter, whole, shown in self._shown:
            if whole.grad is not shown:
                # the user has replaced the gradient
                parameter.shard.grad = whole.grad

    def after_update(self) -> None:
        """Gather the root's parameters again, if a step with manual optimisation has changed the rows."""
        if self._depth:
            self.on_rows(lambda: None)

    def undo(self) -> None:
        """Restore the module, without a collective; may be called twice."""
        while self._undo:
            self._undo.pop()()
        if not self.sharded:
            return
        forget_step(self._module)
        self._shown = []
        for parameter in self.sharded:
            if parameter.dropped:
                parameter.restore_own()
        self._put_back()
        self.sharded = ()

    def _split(self, units: Sequence[nn.Module], mesh: DeviceMesh, *, offload: bool) -> None:
        """Shard the parameters of units with torch, the root's last; raises an InstallError if torch does."""
        try:
            split_units(self._module, units, mesh, offload=offload)
            make_root(self._module)
        except Exception as error:
            self._put_back()
            raise InstallError(
                f"fsdp does not support {type(self._module).__name__!r}: torch's fully_shard refused: {error}"
            ) from error

    def _put_back(self) -> None:
        undo_fully_shard(self._module)
        for child, name, whole in self._places:
            vars(whole).pop("_fsdp_orig_uid", None)
            child._parameters[name] = whole

    def _gather_root(self) -> None:
        begin_gathered(self._module)
        self._root.gathered()
        self._hide_gradients()
        for parameter in self.sharded if self._shows else ():
            whole = parameter.module._parameters[parameter.name]
            if whole is not None and not is_split(whole):
                whole.grad = parameter.shard.grad
                self._shown.append((parameter, whole, whole.grad))

    def _hide_gradients(self) -> None:
        """Reset shown gradients before a backward pass, which would add full gradients to those of the rows."""
        for _, whole, _ in self._shown:
            whole.grad = None
        self._shown = []

    def _whole_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step with the root's parameters gathered."""
        # a step may call another one, as a training step that validates: only the outermost gathers
        outermost = self._depth == 0
        if outermost:
            self._refuse_replaced()
            # after a step without a backward pass, gathered parameters may be outdated
            self._module.reshard()
            self._gather_root()
        self._depth += 1
        try:
            output = step(*args, **kwargs)
        except BaseException as error:
            self._depth = 0
            forget_step(self._module)
            if outermost:
                self._agreement.after(error, "ends the step")
            for part, said in ((MIXED, _read_elsewhere(str(error))), (WRITES_INPUT, WRITTEN)):
                if part in str(error):
                    raise ModelError(said) from error
            raise
        self._depth -= 1
        if self._depth == 0:
            looks = self._looks > 0 and torch.is_grad_enabled()
            self._looks -= looks
            self._refuse_written(self._root, by_value=looks)
            end_gathered(self._module)
            self._agreement.on("ends the step")
            # otherwise a backward pass through the output follows
            if not any(tensor.requires_grad for tensor in tensors_in(output)):
                self._module.reshard()
            if is_tried():
                # as a rank on which the pass has failed: torch prefetches by the order of earlier passes
                forget_step(self._module)
        return output

    def on_rows(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method while all parameters of the module, also the root's, are the rank's rows."""
        if self._depth:
            self._refuse_written(self._root)
            end_gathered(self._module)
        self._module.reshard()
        try:
            return method(*args, **kwargs)
        finally:
            if self._depth:
                self._gather_root()

    def _watch(self, units: dict[str, nn.Module]) -> None:
        """Compare the units' collectives over the ranks, and detect backward passes that the user started."""
        taken: set[int] = set()
        names = {id(unit): fqn for fqn, unit in units.items()}
        # torch's classes of split modules, which refuse it without a name; in the class, so that no copy of a module's
        # attributes has it
        kinds: set[Any] = {type(unit) for unit in units.values()}
        for kind in kinds:
            self._undo.append(partial(setattr, kind, "__deepcopy__", vars(kind)["__deepcopy__"]))
            kind.__deepcopy__ = lambda unit, memo: _refuse_copy(names.get(id(unit), ""))
        for fqn, unit in units.items():
            watch = ReachedParameters(unit, taken)
            held: Any = unit
            held.set_custom_all_gather(Gather(fqn, self._agreement))
            held.set_custom_reduce_scatter(AddUp(fqn, self._agreement, watch.take))
            if fqn:
                # before torch's hook, which replaces whatever is in the place of the parameters
                own = unit.register_forward_pre_hook(partial(refuse_swapped, fqn), prepend=True)
                before = unit.register_forward_pre_hook(watch.gathered)
                after = unit.register_forward_hook(partial(self._look_at_output, watch))
                self._undo += [own.remove, before.remove, after.remove]
            else:
                self._root = watch

    def _look_at_output(self, watch: ReachedParameters, module: nn.Module, args: Any, output: Any) -> None:
        self._refuse_written(watch)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse_stray)  # type: ignore[no-untyped-call]

    def _refuse_written(self, watch: ReachedParameters, *, by_value: bool = False) -> None:
        """Raise a ModelError for writes into gathered parameters; with `by_value` this is a collective."""
        names = watch.written()
        if by_value:
            names += [parameter.name for parameter in self.sharded if _differs(parameter)]
            found = torch.tensor(float(bool(names)), device=self._mesh.device_type)
            if collectives.all_reduce(self._mesh, found, "max") and not names:
                names = ["a parameter of no block"]
        if names:
            raise ModelError(
                f"under fsdp {names[0]!r} is gathered for a training step, or while its block runs, and was changed in"
                " place meanwhile, which would be lost: the ranks' rows are what is trained. Change it in a hook"
                " between steps, such as on_train_batch_end, under torch.no_grad(), or train with strategies='S1'"
            )

    def _refuse_replaced(self) -> None:
        """Raise a ModelError for rows whose `.data` was assigned: for a DTensor that changes nothing."""
        for parameter, storage in zip(self.sharded, self._storages, strict=True):
            if parameter.shard.untyped_storage() is not storage:
                raise ModelError(
                    f"under fsdp something was assigned to the .data of {parameter.name!r}, which does not reach the"
                    " ranks' rows; change them in place between steps, as by p.data.copy_(...) or"
                    " p.data.mul_(m).add_(...), or train with strategies='S1'"
                )

    def _refuse_old(self, loss: Tensor) -> None:
        """Raise a ModelError for a loss that reads a parameter from before sharding, by a reference in user code."""
        replaced = {id(parameter.whole): parameter.name for parameter in self.sharded}
        found = next((replaced[id(leaf)] for leaf, _ in leaves_of(loss) if id(leaf) in replaced), None)
        if found is not None:
            raise ModelError(
                f"under fsdp {found!r} was split over the ranks, and a function, hook or object reads the parameter"
                " that it was before, which has no values any more and is not trained; let it reach the parameter"
                " through its module, or train with strategies='S1'"
            )

    def _refuse_stray(self, grad: Tensor) -> None:
        if not self._begun:
            raise ModelError(STRAY)


def refuse_swapped(fqn: str, unit: nn.Module, *_: Any) -> None:
    """Raise a ModelError for a call of a unit in which other tensors replace its parameters."""
    if not all(isinstance(parameter, nn.Parameter) for parameter in unit.parameters()):
        raise ModelError(f"under fsdp {SWAPPED.format(fqn)}")


def _refuse_copy(fqn: str) -> None:
    what = repr(fqn) if fqn else "the module"
    raise ModelError(
        f"under fsdp {what} was copied (copy.deepcopy), and the copy would have a rank's rows of its parameters: make"
        " it in __init__, before they are split, and move its values between steps, or train with strategies='S1'"
    )


def _differs(parameter: ShardedParameter) -> bool:
    """Whether the full parameter is gathered, and differs from this rank's rows."""
    whole, rows = parameter.module._parameters[parameter.name], local(parameter.shard)
    return not (whole is None or is_split(whole)) and not torch.equal(parameter.own(whole).to(rows.device), rows)


def _read_elsewhere(what: str) -> str:
    return (
        "under fsdp a block's parameters are whole while its forward runs, and a rank's rows elsewhere; code outside"
        f" of it has read some ({what}). Call the block instead of reading its parameters, use the optimiser's"
        " weight_decay for a penalty on weights, or train with strategies='S1'"
    )
