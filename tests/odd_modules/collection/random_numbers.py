"""Blocks that draw random numbers: of torch, Python and NumPy, of generators that they hold or that nobody can see."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.odd_modules.collection.blocks import Plain, of, of_blocks
from tests.odd_modules.collection.row import IN_EVERY_PASS, UNCAPTURED

Dropout = of("Dropout", lambda m, x: F.dropout(Plain.forward(m, x), 0.3, m.training) + torch.rand_like(x))
PythonRandom = of("PythonRandom", lambda m, x: Plain.forward(m, x) * random.random())
NumpyRandom = of("NumpyRandom", lambda m, x: Plain.forward(m, x) * float(np.random.rand()))


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.generator.random())


class OwnRandomState(OwnGenerator):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) * float(self.generator.rand())


class OwnTorchGenerator(OwnGenerator):
    """Draws nothing on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class MakesGenerator(Plain):
    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
        return super().forward(x) * drawn


GENERATOR = torch.Generator()
"""Drawn from where nobody can see it."""


class GlobalGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        GENERATOR.manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)


HELD = {
    "recompute": "it changes what 'generator' holds",
    "chunk": "changes the attribute 'generator'",
    "pipeline": IN_EVERY_PASS,
}
GLOBAL = {"chunk": "draws from Python's or NumPy's random numbers"}
RANDOM_NUMBERS = {
    "dropout, and noise of torch": of_blocks(Dropout, drawn=True),
    "Python's random numbers": of_blocks(PythonRandom, GLOBAL, drawn=True),
    "NumPy's random numbers": of_blocks(NumpyRandom, GLOBAL, drawn=True),
    "a generator of NumPy's": of_blocks(OwnGenerator, HELD, drawn=True),
    "a RandomState of NumPy's": of_blocks(OwnRandomState, HELD, drawn=True),
    "a generator of torch's": of_blocks(OwnTorchGenerator, HELD | {"chunk": UNCAPTURED}, drawn=True),
    "a generator made in every pass": of_blocks(MakesGenerator, {"chunk": UNCAPTURED}, drawn=True),
    "a generator that nobody can see": of_blocks(GlobalGenerator, {"chunk": UNCAPTURED,
        "recompute": "its second pass gives other numbers than its first",
        "pipeline": "compute a sample from other samples"}, drawn=True),
}  # fmt: skip
