"""Predicted seconds of the zoo's models, by the rates of a CPU core and by their measured operators.

    python -m benchmarks.kernels.measured_operators [--only NAME ...] [--write]

For each model, and all operators of a step with SGD (`lightning-amp calibrate MODULE:CLASS`): the ratio of predicted to
measured seconds of the whole batch, and of three quarters of it, whose operators are not among the measured ones; by
the rates of the data sheet of one core, then by measured operators. Models are left out whose package is not installed.
"""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import geometric_mean

import torch

from benchmarks.page import ROOT, origin, write_as_it_grows
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.subject import made
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import AmpError
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.quantities import format_seconds
from lightning_amp.simulation.calibrate_operators import TimedStep, calibrate_operators

NAMES = (
    *(
        "transformers: gpt2",
        "timm: test_vit",
        "torchvision: squeezenet1_1",
        "transformers: bert",
        "torchvision: resnet",
    ),
    *(
        "timm: test_convnext",
        "transformers: llama",
        "monai: UNet 2D",
        "diffusers: UNet2DModel",
        "x_transformers: Decoder",
    ),
    *("torch: nn.TransformerEncoder", "transformers: wav2vec2", "vit_pytorch: ViT"),
)
HEADER = ["model", "step", "by rates", "by operators", "3/4, by rates", "3/4, by operators"]


def off(ratio: float) -> float:
    """How far a ratio is from 1, in either direction."""
    return max(ratio, 1 / ratio)


def row(name: str) -> tuple[list[str], list[float]]:
    """The cells of a model, and its four ratios; the reason where it cannot be measured."""
    module, batch = made(CASES[name], torch.float32)
    try:
        found = calibrate_operators(module, batch, run_settings=BY_ITSELF, rates=CPU_CORE, device=torch.device("cpu"))
    except AmpError as error:
        return [name, str(error), "", "", "", ""], []
    whole, check = found.steps[-1], found.check
    ratios = [*_ratios(whole), *([] if check is None else _ratios(check))]
    cells = [f"{ratio:.2f}" for ratio in ratios] + [""] * (4 - len(ratios))
    return [name, format_seconds(whole.measured), *cells], ratios


def _ratios(step: TimedStep) -> list[float]:
    return [step.before / step.measured, step.after / step.measured]


def main() -> None:
    """Print the table; with --write the page has it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=NAMES, choices=CASES, metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write the table into docs/paper/csimd.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in arguments.only if find_spec(CASES[name].package) is not None]
    every = list[list[float]]()

    def rows() -> Iterator[list[str]]:
        for name in names:
            cells, ratios = row(name)
            every.append(ratios)
            yield cells
        columns = zip(*(found for found in every if len(found) == 4), strict=True)
        yield ["off by, in the mean", "", *(f"{geometric_mean(map(off, column)):.2f}" for column in columns)]

    first = (
        f"{origin('python -m benchmarks.kernels.measured_operators')} Predicted over measured seconds of a step with"
        " SGD, of the batch and of three quarters of it."
    )
    write_as_it_grows(
        ROOT / "docs/paper/csimd.md", "kernels.measured_operators", first, HEADER, rows(), write=arguments.write
    )


if __name__ == "__main__":
    main()
