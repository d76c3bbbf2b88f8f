"""Any module with parameters, gradients and optimiser state split over the data axis, by torch's `fully_shard`.

    a rank has        ceil(rows / R) rows of every parameter, of its gradient and of its optimiser state
    forward           a unit (units.py) gathers its parameters before its forward, and drops them after it
    backward          it gathers them again; its gradients are averaged over the ranks, of which each keeps its rows
    the root          gathers the parameters of no unit for a whole step, from its beginning to the end of backward

The losses are weighed by the ranks' cells before (steps/cell_weight.py), so the averages are those of the union's mean
loss, exact up to rounding. Gradients are reduced in every backward pass, under accumulation too: nothing whole is kept.

Collectives of a unit per step: two all-gathers of its parameters, one sum of its gradients; before each of them, and at
the end of both passes, one all-reduce of two integers (agreement.py).

`training_step` and its like are no `forward`, so they are wrapped on the instance; so are methods that look at all
parameters in a step, while those of the root are gathered. `undo` gives the module back as it was, with whole
parameters: trained ones where `ShardedParameter.restore` was called before, else this rank's rows, and nan.

Known limits: second derivatives, and backward passes that the strategy has not begun, are refused; a block's parameters
are there while its forward runs, so code that reads them elsewhere sees a rank's rows (a DTensor).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_amp._torch import begin_gathered, end_gathered, make_root, start_backward, undo_fully_shard
from lightning_amp.data.batch_parts import tensors_in
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.parallel.contract.sharded_parameter import ShardedParameter
from lightning_amp.parallel.fsdp.agreement import Agreement
from lightning_amp.parallel.fsdp.collectives import AddUp, Gather
from lightning_amp.parallel.fsdp.parameters import ReachedParameters, split_parameters
from lightning_amp.parallel.fsdp.refusals import refuse
from lightning_amp.parallel.fsdp.units import find_units

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that need the root's parameters."""
ON_ALL = ("zero_grad", "toggle_optimizer", "untoggle_optimizer")
"""Methods that change all parameters or their gradients, and are to find the rank's rows."""
MIXED = "mixed torch.Tensor and DTensor"
"""What torch says where a rank's rows meet a whole tensor."""
STRAY = (
    "a backward pass was begun by loss.backward() or torch.autograd.grad, and under fsdp the strategy has to begin it,"
    " to weigh the loss and to average gradients: call self.manual_backward(loss) in a training step, or train with"
    " strategies='S1'"
)


class FullySharded:
    """A module whose parameters are split, until `undo`.

    Attributes:
        parameters: Those that are split; the others, which have no dimension, are whole on every rank.

    Args:
        module: Whole, equal on all ranks.
        fqns: Names or patterns of units, with "" for the rest of the module, which is always one.
        mesh: The data axis.
        offload: Whether a rank's rows lie in the host's memory.

    Raises:
        InstallError: Something in the module cannot be split, or a name is of no unit; the module is unchanged.
    """

    parameters: tuple[ShardedParameter, ...]

    def __init__(
        self, module: nn.Module, fqns: Sequence[str], mesh: DeviceMesh, *, offload: bool = False
    ) -> None:
        units = _chosen(module, fqns)
        refuse(module, units)
        self.parameters = ()
        self._module: Any = module
        self._agreement = Agreement(mesh)
        self._depth, self._begun = 0, False
        self._undo: list[Callable[[], None]] = []
        self._places = [
            (child, name, parameter)
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and parameter.dim()
        ]
        self._split([*units.values(), module], mesh, offload=offload)
        self.parameters = tuple(split_parameters(self._places, mesh))
        self._watch({**units, "": module})
        self._gather_once([*units.values(), module])
        for name in (*STEPS, *ON_ALL):
            self._wrap(name, self._whole_step if name in STEPS else self.on_rows)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Around the backward pass of a loss: gradients of all units are averaged; a collective.

        Raises:
            ModelError: Ranks have used other units; on every rank.
        """
        if loss.requires_grad:
            start_backward(self._module, loss)
        self._begun = True
        try:
            yield
        finally:
            self._begun = False
        self._agreement.on("ends the backward pass")
        self._agreement.look()
        if self._depth:
            # the pass has let go of the root's
            self._gather_root()

    def before_update(self) -> None:
        """Refuse, with a ModelError, gradients that have not reached the rows that an optimiser is to change."""
        if self._root.has_gradients():
            raise ModelError(STRAY)

    def after_update(self) -> None:
        """An optimiser has changed the rows: in a step of manual optimisation the root's are gathered anew."""
        if self._depth:
            self.on_rows(lambda: None)

    def undo(self) -> None:
        """Give the module back as it was; no collective. May be called twice."""
        while self._undo:
            self._undo.pop()()
        if not self.parameters:
            return
        self._module.reset_iter_state()
        for parameter in self.parameters:
            if parameter.dropped:
                parameter.restore_own()
        self._put_back()
        self.parameters = ()

    def _split(self, units: Sequence[nn.Module], mesh: DeviceMesh, *, offload: bool) -> None:
        """Let torch split the parameters of units, the root's last; an InstallError where it refuses."""
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
        undivided = {parameter for parameter in self._module.parameters() if not parameter.dim()}
        try:
            for unit in units:
                fully_shard(unit, mesh=mesh, offload_policy=policy, ignored_params=undivided)
            make_root(self._module)
        except Exception as error:
            self._put_back()
            raise InstallError(
                f"fsdp was asked for of {type(self._module).__name__!r}, and torch's fully_shard refused: {error}"
            ) from error

    def _put_back(self) -> None:
        undo_fully_shard(self._module)
        for child, name, whole in self._places:
            vars(whole).pop("_fsdp_orig_uid", None)
            child._parameters[name] = whole

    def _gather_root(self) -> None:
        begin_gathered(self._module)
        self._root.gathered()

    def _whole_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step with the root's parameters at hand."""
        if self._depth == 0:
            # of a step without a backward pass they are still there, and may be old
            self._module.reshard()
            self._gather_root()
        self._depth += 1
        try:
            output = step(*args, **kwargs)
        except BaseException as error:
            self._depth = 0
            self._module.reset_iter_state()
            if MIXED in str(error):
                raise ModelError(_read_elsewhere(error)) from error
            raise
        self._depth -= 1
        if self._depth == 0:
            end_gathered(self._module)
            self._agreement.on("ends the step")
            # a backward pass through the output is to come
            if not any(tensor.requires_grad for tensor in tensors_in(output)):
                self._module.reshard()
        return output

    def on_rows(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method while the module has the rank's rows as parameters, the root's too."""
        if self._depth:
            end_gathered(self._module)
        self._module.reshard()
        try:
            return method(*args, **kwargs)
        finally:
            if self._depth:
                self._gather_root()

    def _wrap(self, name: str, run: Callable[..., Any]) -> None:
        method = getattr(self._module, name, None)
        if method is None:
            return
        own = vars(self._module)
        before = {name: own[name]} if name in own else {}
        own[name] = wrapped = wraps(method)(partial(run, method))

        def undo() -> None:
            if own.get(name) is wrapped:
                del own[name]
                own.update(before)

        self._undo.append(undo)

    def _watch(self, units: dict[str, nn.Module]) -> None:
        """Compare what units do over the ranks, and see that the strategy has begun what they do in backward."""
        taken: set[int] = set()
        for fqn, unit in units.items():
            watch = ReachedParameters(unit, taken)
            held: Any = unit
            held.set_custom_all_gather(Gather(fqn, self._agreement))
            held.set_custom_reduce_scatter(AddUp(fqn, self._agreement, watch.take))
            if fqn:
                before = unit.register_forward_pre_hook(watch.gathered)
                after = unit.register_forward_hook(self._look_at_output)
                self._undo += [before.remove, after.remove]
            else:
                self._root = watch

    def _gather_once(self, units: Sequence[Any]) -> None:
        """Let torch make the tensors that parameters are gathered in.

        They are made once, and must not be those of torch.inference_mode: what comes first may be a validation.
        """
        with torch.inference_mode(False):
            for unit in units:
                unit.unshard()
                unit.reshard()

    def _look_at_output(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse_stray)  # type: ignore[no-untyped-call]

    def _refuse_stray(self, grad: Tensor) -> None:
        if not self._begun:
            raise ModelError(STRAY)


def _chosen(module: nn.Module, fqns: Sequence[str]) -> dict[str, nn.Module]:
    """The units of some names or patterns; the root is none of them."""
    possible = find_units(module)
    for fqn in fqns:
        if fqn and not any(fnmatchcase(unit, fqn) for unit in possible):
            raise InstallError(
                f"fsdp is to gather {fqn!r} by itself, which is no block with parameters of its own; those of"
                f" {type(module).__name__} are {list(possible)!r}, and '' is the rest of it"
            )
    if "" not in fqns:
        raise InstallError(
            f"fsdp was asked for of {list(fqns)!r} alone; it splits all parameters of a module: add a rule for '',"
            " which is what lies in no block"
        )
    return {unit: found for unit, found in possible.items() if any(fnmatchcase(unit, fqn) for fqn in fqns)}


def _read_elsewhere(error: BaseException) -> str:
    return (
        "under fsdp a block's parameters are whole while its forward runs, and a rank's rows elsewhere; code outside"
        f" of it has read some ({error}). Call the block instead of reading its parameters, or train with"
        " strategies='S1'"
    )
