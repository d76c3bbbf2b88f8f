"""Leave FLOPs out of Lightning's summary of a module where nobody has counted them: it would show 0 for each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count

from lightning_amp.lightning._compat import rank_zero_info
from lightning_amp.text_table import table

FLOPS = "FLOPs"


def leave_out_flops(trainer: pl.Trainer) -> Callable[[], None]:
    """Let the trainer's summary have no FLOPs, unless an example input gave them; return a function that undoes it."""
    # subclasses write what they like
    changed = [one for one in trainer.callbacks if type(one) in (ModelSummary, RichModelSummary)]  # type: ignore[attr-defined]
    for callback in changed:
        vars(callback)["summarize"] = partial(_summarize, callback.summarize)

    def undo() -> None:
        for callback in changed:
            vars(callback).pop("summarize", None)

    return undo


def _summarize(
    plain: Callable[..., None],
    summary_data: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    **options: Any,
) -> None:
    if total_flops:
        plain(
            summary_data,
            total_parameters,
            trainable_parameters,
            model_size,
            total_training_modes,
            total_flops=total_flops,
            **options,
        )
        return
    columns = {name: values for name, values in summary_data if name.strip() and name != FLOPS}
    rows = [[str(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
    trained, every = (get_human_readable_count(n).strip() for n in (trainable_parameters, total_parameters))
    text = table([name.lower() for name in columns], rows)
    rank_zero_info(f"{text}\n\n{trained} of {every} parameters are trained, {model_size:.3g} MB in all\n")
