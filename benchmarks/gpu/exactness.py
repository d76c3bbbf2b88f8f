"""Every technique on the device against the plain decoder in float64 on the CPU: the loss and all gradients.

A technique may be as wrong as rounding is in its precision (`Precision.allowed`), or some times as wrong as the plain
decoder is there. The whole reference model is compared too, without what it draws by a device's own generator.

    error    norm of the difference, relative to the tensor's norm or 1 % of that of all gradients, the larger
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import FLOAT32, FLOAT64, PRECISIONS, Precision
from benchmarks.gpu.runner import Work, first_line
from benchmarks.gpu.subject import EAGER, OURS, CellsInMemory, Settings, decoder_batch, moved, plan_of
from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import HIC, inputs_from
from lightning_amp.models.latents import normal_kl
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.simulation.models_without_values import DecoderAlone
from lightning_amp.techniques.rates_of import rates_of
from lightning_amp.verification.compare import errors

CPU = torch.device("cpu")
TIMES = 4.0
"""As wrong as this many times the plain decoder in the same precision is rounding too."""
CELLS = 6
Values = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Techniques that are installed together, and their settings."""

    strategies: tuple[str, ...]
    settings: Settings = field(default_factory=dict)
    sparse: bool = True

    def __str__(self) -> str:
        said = [",".join(self.strategies), *(f"{name}={value}" for name, value in self.settings.items())]
        return " ".join([*said, *([] if self.sparse else ["dense counts"])])


FORMS = (
    Form(strategies=EAGER, sparse=False),
    Form(strategies=("S1", "S3")),
    Form(strategies=("S1", "S3"), settings={"retain": True, "buckets": 2}),
    Form(strategies=("S1", "S4")),
    Form(strategies=("S1", "fused")),
    Form(strategies=("S1", "fused"), settings={"keep": True}),
    Form(strategies=("S1", "sdpa")),
    Form(strategies=("S1", "sparse")),
    Form(strategies=("S1", "sparse"), sparse=False),
    Form(strategies=("S1", "recompute")),
    Form(strategies=("S1", "stream")),
    Form(strategies=("S1", "S3", "S4", "sparse", "stream"), settings={"cells": 4}),
    Form(strategies=("S1", "S4", "fused", "sparse", "recompute")),
    Form(strategies=OURS),
    Form(strategies=("S1", "S4", "sdpa", "sparse", "stream")),
    Form(strategies=OURS, settings={"cells": 4, "keep": True}),
    Form(strategies=OURS, sparse=False),
    Form(strategies=("S1", "S4", "compile"), sparse=False),
    Form(strategies=("S1", "S4", "compile"), settings={"mode": "reduce-overhead"}, sparse=False),
)


def run(work: Work) -> None:
    """Compare all forms of all decoders in all precisions, float64 first, and the whole model."""
    wrong = 0
    for precision in PRECISIONS:
        for name, shape in decoders(tiny=work.tiny):
            wrong += _compare_decoder(work, name, shape, precision)
        wrong += _compare_model(work, precision)
    work.record.fact(compared=len(work.record.entry["rows"]), wrong=wrong)
    if wrong:
        raise AssertionError(f"{wrong} of the rows have failed, or are wrong by more than rounding")


def decoders(*, tiny: bool) -> Iterator[tuple[str, DecoderShape]]:
    """Decoders of all kinds, small: the last bucket of attention is cut short."""
    anchors, window, strata = (50, 8, 3) if tiny else (230, 20, 5)
    base = DecoderShape(
        fqn="decoder",
        anchors=anchors,
        dim=16,
        features=tuple(anchors - k for k in range(strata)),
        distances=tuple(range(strata)),
        attention=True,
        window=window,
    )
    yield "attention", base
    yield "chained, 2 experiments", replace(base, variant="paper", chained=True, n_batches=2)
    yield "spread features", replace(base, features=tuple(anchors - 9 * k - 1 for k in range(strata)))
    yield "convolution", replace(base, attention=False)


def _compare_decoder(work: Work, name: str, shape: DecoderShape, precision: Precision) -> int:
    torch.manual_seed(1)
    module = DecoderAlone(shape).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    forms = {
        str(form): partial(_decoder_values, module, shape, form, precision, work.device)
        for form in FORMS
        if _runs(form, name, shape, precision, cuda=work.device.type == "cuda")
    }
    expected = _decoder_values(module, shape, FORMS[0], FLOAT64, CPU)
    return _compare(work, name, precision, expected, forms)


def _runs(form: Form, name: str, shape: DecoderShape, precision: Precision, *, cuda: bool) -> bool:
    if not shape.attention and {"S3", "fused", "sdpa"} & set(form.strategies):
        return False
    if "sdpa" in form.strategies and precision is FLOAT64 and cuda:
        # torch has no fused kernel for it there, and sdpa says so
        return False
    # a compiler takes long: once is enough, and on a CPU tests do it
    compiles = cuda and precision is FLOAT32 and name == "attention"
    return "compile" not in form.strategies or compiles


def _compare(
    work: Work, what: str, precision: Precision, expected: Values, forms: Mapping[str, Callable[[], Values]]
) -> int:
    """A row for each form, the plain one first; returns how many are wrong."""
    plain, wrong = 0.0, 0
    for n, (form, find) in enumerate(forms.items()):
        if not work.has_time(f"{what}, {form} and what follows, {precision.name}"):
            break
        try:
            found = find()
        except Exception as error:
            # one technique that cannot run hides nothing of the others
            errors = {"loss_error": None, "gradient_error": None, "of": first_line(error)}
            work.record.row(decoder=what, form=form, precision=precision.name, **errors, answer="**failed**")
            wrong += 1
            continue
        off, bad = _row(work, what, form, precision, (found, expected), plain)
        plain = plain if n else off
        wrong += bad
    return wrong


def _decoder_values(
    module: DecoderAlone, shape: DecoderShape, form: Form, precision: Precision, device: torch.device
) -> Values:
    own = copy.deepcopy(module).to(device=device, dtype=precision.dtype)
    batch = moved(decoder_batch(shape, CELLS, sparse=form.sparse, dtype=precision.dtype), device)
    made = plan_of(shape, form.strategies, cells=CELLS, device=device, settings=form.settings)
    install(own, made)
    with precision.computing(device):
        loss = own.get_submodule(shape.fqn)(**batch)
        (loss * precision.scale).backward()
    leaves = {"u": batch["u"], "v": batch["v"], **dict(own.named_parameters())}
    return _values(loss, leaves, precision)


def _values(loss: Tensor, leaves: dict[str, Tensor], precision: Precision) -> Values:
    """The loss and all gradients, in the host's memory and double precision."""
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    found = {name: grad.double().cpu() / precision.scale for name, grad in gradients.items()}
    return {"loss": loss.detach().double().cpu()} | found


def _row(
    work: Work, what: str, form: str, precision: Precision, values: tuple[Values, Values], plain: float
) -> tuple[float, int]:
    """Record a comparison, given the error of the plain form; returns the largest error, and whether it is wrong."""
    found, expected = ({name: value for name, value in side.items() if name != "loss"} for side in values)
    off = errors(found, expected)
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"))
    loss = float((values[0]["loss"] - values[1]["loss"]).abs() / values[1]["loss"].abs())
    most = max(precision.allowed, TIMES * plain)
    # not a number is wrong too, which is no more than anything
    wrong = not (loss <= most and off[worst] <= most)
    work.record.row(
        decoder=what,
        form=form,
        precision=precision.name,
        loss_error=loss,
        gradient_error=off[worst],
        of=worst,
        answer="**wrong**" if wrong else "exact",
    )
    return max(loss, off[worst]), int(wrong)


def _compare_model(work: Work, precision: Precision) -> int:
    bins, strata, genes = (40, 3, 12) if work.tiny else (200, 5, 60)
    data = CellsInMemory(cells=CELLS, bins=bins, strata=strata, genes=genes)
    torch.manual_seed(2)
    module = GLUE(16, 24, window=8, dropout=0.2).build(inputs_from(data)).double()
    forms = {
        ",".join(chosen): partial(_model_values, module, data, chosen, precision, work.device)
        for chosen in (EAGER, OURS)
    }
    return _compare(work, "reference model", precision, _model_values(module, data, None, FLOAT64, CPU), forms)


def _model_values(
    module: GLUE, data: CellsInMemory, strategies: tuple[str, ...] | None, precision: Precision, device: torch.device
) -> Values:
    own = copy.deepcopy(module).to(device=device, dtype=precision.dtype)
    batch = {name: moved(_cells(data, name, strategies, precision.dtype), device) for name in data.tables}
    if strategies is not None:
        shape = describe(own, batch_size=CELLS)
        rates = rates_of(device)[0]
        made = plan(profile_of_module(shape), strategies=strategies, batch_size=CELLS, shape=shape, rates=rates)
        install(own, made)
    with precision.computing(device):
        loss = _model_loss(own, batch)
        (loss * precision.scale).backward()
    return _values(loss, dict(own.named_parameters()), precision)


def _model_loss(model: GLUE, batch: Any) -> Tensor:
    """All terms that draw nothing from a device's generator: noise of cells is a function of their keys."""
    latents = model.latents(batch)
    v, std = model.vertices()
    total = model.graph_encoder.kl(v, std)
    for name, cells in batch.items():
        u = latents[name]
        total = total + model.nll(name, cells, u=u.sample, v=v)
        total = total + normal_kl(u.loc, u.std) / cells["x"].shape[1]
    return total


def _cells(data: CellsInMemory, name: str, strategies: tuple[str, ...] | None, dtype: torch.dtype) -> dict[str, Any]:
    rows = data.tables[name].rows(torch.arange(CELLS).numpy(), sparse=name == HIC and strategies is not None)
    cells: dict[str, Any] = {**rows, "draw": torch.arange(CELLS) + 7}
    cells["library"] = cells["library"].to(dtype)
    cells["x"] = cells["x"].to(dtype=dtype)
    return cells
