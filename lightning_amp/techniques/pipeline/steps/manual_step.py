"""Run a step with manual optimisation (`automatic_optimization = False`) in a pipeline, by recording what it requests.

    recorded    every run of the step records calls of `self.manual_backward(loss)`, `self.clip_gradients`, step and
                zero_grad of the optimiser, and steps of schedulers, and executes none of them
    carry out   once the gradients of the batch are computed, every rank executes in that order what the last stage's
                run of the full batch has requested; the one backward pass of the loss returns the gradients

So all micro-batches of a batch end in one optimiser step, with gradients clipped by the norm over all stages. A step
that accumulates gradients (one optimiser step in four batches, for example) works without change.

Code after manual_backward runs before there are gradients, and on the last stage's rank only. So a step raises an error
if it reads or sets parameters, gradients or the optimiser there. It also raises if it calls backward twice or never,
or if it calls the optimiser's `step` before backward or with a closure.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_amp._torch import tree_leaves
from lightning_amp.errors import ModelError
from lightning_amp.techniques.put_methods import methods_put

OPTIMIZER, SCHEDULER, MODULE = "optimizer", "scheduler", "module"
BACKWARD = MODULE, "manual_backward"
Ask = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Object, method, positional and keyword arguments of a requested call."""


class ManualStep:
    """Record and execute the manual optimisation of one module; see `recorded` and `carry_out`."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    def recorded(self, step: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
        """Wrap a step so that it returns its "loss", the "asked" calls in order, and what the step has "returned"."""

        def called(*args: Any) -> dict[str, Any]:
            trainer = self._module.trainer
            optimizers, schedulers = len(trainer.optimizers), len(trainer.lr_scheduler_configs)
            if optimizers != 1 or schedulers > 1:
                raise refusal(
                    f"has {optimizers!r} optimizers and {schedulers!r} schedulers", "take one of each at most"
                )
            run = _ManualRun(has_scheduler=bool(schedulers))
            with ExitStack() as stack, methods_put([(self._module, run.names(stack))]):
                returned = step(*args)
            if run.loss is None:
                raise refusal("has not called self.manual_backward", "let every batch have one backward pass")
            return {"loss": run.loss, "asked": run.asked, "returned": returned}

        return called

    def carry_out(self, found: dict[str, Any]) -> Any:
        """Execute the calls that a run has requested, with gradients in its loss, and return the step's result."""
        module = self._module
        for whom, what, args, kwargs in found["asked"]:
            if whom == OPTIMIZER:
                getattr(module.optimizers(), what)(*args, **kwargs)
            elif whom == SCHEDULER:
                getattr(module.lr_schedulers(), what)(*args, **kwargs)
            elif (whom, what) == BACKWARD:
                module.manual_backward(found["loss"])
            else:
                module.clip_gradients(module.optimizers(), *args, **kwargs)  # type: ignore[arg-type]
        return found["returned"]


class _ManualRun:
    """Requests of one run of the step."""

    def __init__(self, *, has_scheduler: bool) -> None:
        self._has_scheduler = has_scheduler
        self.asked: list[Ask] = []
        self.loss: Tensor | None = None

    def names(self, stack: ExitStack) -> dict[str, Any]:
        """Return replacements of the module's methods; after manual_backward, `stack` holds a check of what is read."""
        optimizer = _Recorded(OPTIMIZER, {"zero_grad": partial(self._ask, OPTIMIZER, "zero_grad"), "step": self._step})
        # with one optimiser, toggle_model has nothing to freeze
        vars(optimizer)["toggle_model"] = lambda sync_grad=True: nullcontext()
        scheduler = _Recorded(SCHEDULER, {"step": partial(self._ask, SCHEDULER, "step")})

        def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.loss is not None:
                raise refusal("calls self.manual_backward twice", "let a step have one loss, the sum of its parts")
            _refuse_arguments("self.manual_backward", args, kwargs)
            self._ask(*BACKWARD)
            self.loss = loss
            # From here on one process would have gradients, and this run has none: code that reads them would differ.
            stack.enter_context(_ReadsNoParameters())

        def clip_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._ask(MODULE, "clip_gradients", *args, **kwargs)

        return {
            "optimizers": lambda use_pl_optimizer=True: optimizer,
            "lr_schedulers": lambda: scheduler if self._has_scheduler else None,
            "manual_backward": manual_backward,
            "clip_gradients": clip_gradients,
            "toggle_optimizer": lambda optimizer: None,
            "untoggle_optimizer": lambda optimizer: None,
        }

    def _ask(self, whom: str, what: str, *args: Any, **kwargs: Any) -> None:
        self.asked.append((whom, what, args, kwargs))

    def _step(self, *args: Any, **kwargs: Any) -> None:
        _refuse_arguments("step of its optimizer", args, kwargs)
        if self.loss is None:
            raise refusal(
                "steps its optimizer before self.manual_backward", "step after the backward pass of the same batch"
            )
        self._ask(OPTIMIZER, "step")


class _Recorded:
    """Stand-in for an optimiser or a scheduler in a step."""

    def __init__(self, whom: str, methods: Mapping[str, Callable[..., None]]) -> None:
        vars(self).update(methods, _whom=whom)

    def __getattr__(self, name: str) -> Any:
        raise refusal(f"uses {name!r} of its {self._whom}", "do that in on_train_batch_start or on_train_batch_end")


class _ReadsNoParameters(TorchFunctionMode):
    """Raise an error when any function reads a parameter or its gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves((args, kwargs))):
            raise refusal(
                f"reads a parameter or its gradient by {getattr(func, '__name__', func)!r} after self.manual_backward",
                "read it in on_before_optimizer_step or on_train_batch_end, and norms by"
                " self.trainer.strategy.gradient_norm()",
            )
        return func(*args, **(kwargs or {}))


def refusal(found: str, instead: str) -> ModelError:
    """Return the error for a step whose manual optimisation is not supported."""
    return ModelError(
        f"pipeline: a step with automatic_optimization=False {found}; allowed are one optimizer, one scheduler and,"
        " in every batch, one self.manual_backward(loss), after which the step may call self.clip_gradients, and"
        f" step and zero_grad of the optimizer: {instead}, or leave 'pipeline' out"
    )


def _refuse_arguments(what: str, args: Any, kwargs: Any) -> None:
    if args or kwargs:
        raise refusal(f"gives {what} {[*args, *kwargs]!r}", "call it without")
