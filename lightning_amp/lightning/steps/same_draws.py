"""Run a step with a constant in place of every random number, so that it computes a sample from the sample alone.

A dispatch mode replaces what random operators return: uniform and normal numbers by one number, masks of dropout by
ones, a permutation by the order, draws of classes by the likeliest. Dropout inside of other operators is off.

It also ends the step before it writes to parameters, and notes what decides whether its loss can be judged: exchanges
with other ranks, and means over labels.

Known limits: random numbers of Python and NumPy are not replaced.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import TorchDispatchMode, parts_of
from lightning_amp.footprint.copies.restore_state import LIBRARIES
from lightning_amp.footprint.live_bytes import COLLECTIVES, named_arguments, tensors_written
from lightning_amp.lightning.steps.uneven_means import why_uneven

MOST_DRAWS = 10_000
"""Draws of one step: one that draws until a condition holds would not end."""
DROPOUT = ("dropout", "dropout_p")
"""Arguments with the probability of a dropout inside of an operator."""
NLL = ("nll_loss_forward", "nll_loss2d_forward")
MEAN = 1
"""Value of `reduction` in operators."""


class NotJudged(Exception):
    """A step whose loss cannot be judged; the text is the reason."""


def _middle(low: str, high: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda given: (given.get(low, 0) + given[high]) // 2


def _likeliest(given: Mapping[str, Any]) -> Tensor:
    found: Tensor = given["self"].topk(given["num_samples"]).indices
    return found


CONSTANTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "rand": lambda given: 0.5,
    "rand_like": lambda given: 0.5,
    "randn": lambda given: 0.5,
    "randn_like": lambda given: 0.5,
    "uniform": lambda given: (given["from"] + given["to"]) / 2,
    "normal": lambda given: given.get("mean", 0.0) + 0.5 * given.get("std", 1.0),
    "bernoulli": lambda given: given.get("p", given["self"]) > 0,
    "randint": _middle("low", "high"),
    "randint_like": _middle("low", "high"),
    "random": lambda given: 1 if given.get("to") is None else _middle("from", "to")(given),
    "randperm": lambda given: torch.arange(given["n"]),
    "exponential": lambda given: 1 / given["lambd"],
    "multinomial": _likeliest,
    "poisson": lambda given: given["self"].round(),
    "binomial": lambda given: (given["count"] * given["prob"]).round(),
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
}
"""What random operators return, by their arguments."""


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode of a step without random numbers.

    Attributes:
        exchanges: Whether the step itself communicates with other ranks.
        labels: What a cross-entropy divides by that depends on its labels; "" if none does.
        means: Results of every mean over labels, with what it divides by.

    Args:
        kept: Tensors that the step must not write to.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = {part.untyped_storage()._cdata for tensor in kept for part in parts_of(tensor)}
        self._draws = 0
        self.exchanges, self.labels, self.means = False, "", list[tuple[Tensor, Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return its constant.

        Raises:
            NotJudged: It writes to a tensor that is kept, or draws random numbers that have no constant.
        """
        kwargs = dict(kwargs or {})
        if func.namespace in COLLECTIVES:
            self.exchanges = self.exchanges or _called_by_user()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._refuse_kept(tensors_written(func, args, kwargs))
        name = func._opname
        if name in NLL:
            given = named_arguments(func, args, kwargs)
            mean = "mean" if given["reduction"] == MEAN else ""
            self.labels = self.labels or why_uneven(given["target"], given["weight"], given["ignore_index"], mean)
            if mean:
                self.means.append(func(*args, **kwargs))
                return self.means[-1]
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        return self._drawn(func, name.removesuffix("_"), args, kwargs)

    def _drawn(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        self._draws += 1
        if self._draws > MOST_DRAWS:
            raise NotJudged(f"it draws random numbers more than {MOST_DRAWS} times")
        given = named_arguments(func, args, kwargs)
        for place, argument in enumerate(func._schema.arguments):
            if argument.name in DROPOUT or (argument.name == "p" and name == "native_dropout"):
                args = (*args[:place], 0.0, *args[place + 1 :]) if place < len(args) else args
                return func(*args, **kwargs, **({} if place < len(args) else {argument.name: 0.0}))
        if name not in CONSTANTS or given.get("out") is not None:
            raise NotJudged(f"it draws random numbers by {func}")
        # the generator of an attribute must not move on
        if given.pop("generator", None) is not None:
            place = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == "generator")
            args = (*args[:place], None, *args[place + 1 :]) if place < len(args) else args
            kwargs = kwargs | ({"generator": None} if "generator" in kwargs else {})
        # before an operator that draws in place
        value = CONSTANTS[name](given)
        made = func(*args, **kwargs)
        return made.copy_(value) if isinstance(value, Tensor) else made.fill_(value)

    def _refuse_kept(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            if any(part.untyped_storage()._cdata in self._kept for part in parts_of(tensor)):
                raise NotJudged("it writes to parameters")


def _called_by_user() -> bool:
    """Whether code of the user communicates, not FSDP or a technique for it: by the first that is no library."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        # what `self.trainer.strategy` offers is called by the user
        of_strategy = name.startswith("lightning_amp.lightning.strategy.")
        if not of_strategy and name.startswith(("torch.distributed.fsdp", "lightning_amp.")):
            return False
        if not of_strategy and name.partition(".")[0] not in LIBRARIES:
            return True
        frame = frame.f_back
    return False
