"""Describe why a step could not be counted, and at which line of the user's code."""

import linecache
from pathlib import Path
from traceback import walk_tb

import lightning
import torch

LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, lightning.__file__))
OWN = str(Path(__file__).parents[1])
READS = ("DataDependent", "_local_scalar_dense", ".item()", ".numpy()", "data-dependent")
SHAPES = ("DynamicOutputShape",)
DISTRIBUTIONS = "/torch/distributions/"
CHECKS = (":__init__", ":_validate_sample", ":check")
"""Functions of `torch.distributions` that look at values; most of its checks pass without (QuickFakes)."""
TRANSFORM = "/torch/_functorch/"


def why_values(error: Exception) -> str:
    """Why a step cannot run on tensors that have a shape and no values."""
    said, at = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}", users_line(error)
    place = f" ({at:.80})" if at else ""
    if any(DISTRIBUTIONS in place and place.endswith(CHECKS) for place in _functions(error)):
        return (
            f"torch.distributions checks the values of its arguments{place}: validate_args=False leaves the check out"
            f" [{said}]"
        )
    if any(word in said for word in READS):
        return f"it reads the value of a tensor, as by .item() or `if tensor:`{place} [{said}]"
    if any(word in said for word in SHAPES):
        return f"the shape of a tensor depends on values, as of x[mask]{place} [{said}]"
    return f"it fails on tensors without values{place} [{said}]"


def of_transform(error: Exception) -> bool:
    """Whether it arose in a function that torch.func has transformed."""
    return any(TRANSFORM in place for place in _functions(error))


def _functions(error: Exception) -> list[str]:
    """As "torch/nn/functional.py:relu"."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    return [f"{code.co_filename}:{code.co_name}".replace("\\", "/") for code in codes]


def users_line(error: BaseException) -> str:
    """As "model.py:41: scores = q @ k"; "" where no line is the user's."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in lines if not file.startswith((*LIBRARIES, OWN, "<"))]
    if not own:
        return ""
    file, number = own[-1]
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
