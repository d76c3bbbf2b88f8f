"""Copy an object's mutable state, and share the rest."""

import copy
import random
from types import MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import nn

LONG = 64
"""Entries from which on a container is taken for data, and shared."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OWNERS = (nn.Module, LightningDataModule)
SHARED = (*OWNERS, Trainer, torch.Tensor, np.ndarray, type)


def apart(value: Any, memo: dict[int, Any]) -> Any:
    """A copy in what an object remembers of itself: attributes, small containers, random generators; shares the rest.

    Args:
        value: The object.
        memo: Copies by the id of what they are of; those of one memo refer to each other.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, GENERATORS):
        memo[id(value)] = _copied(value)
    elif isinstance(value, dict | list | tuple) and type(value) in (dict, list, tuple):
        if len(value) > LONG:
            return value
        if isinstance(value, dict):
            memo[id(value)] = found = {}
            found.update({key: apart(part, memo) for key, part in value.items()})
        else:
            memo[id(value)] = type(value)([apart(part, memo) for part in value])
    elif isinstance(value, MethodType):
        owner = value.__self__
        # a method of a module or data module may change that one, which is then a copy in what it remembers too
        own = _shallow(owner, memo) if isinstance(owner, OWNERS) and id(owner) not in memo else apart(owner, memo)
        memo[id(value)] = MethodType(value.__func__, own)
    elif _remembers(value):
        try:
            _shallow(value, memo)
        except Exception:
            return value
    return memo.get(id(value), value)


def _shallow(value: Any, memo: dict[int, Any]) -> Any:
    found = memo[id(value)] = copy.copy(value)
    vars(found).update({name: apart(part, memo) for name, part in vars(value).items()})
    return found


def _copied(generator: Any) -> Any:
    return generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)


def _remembers(value: Any) -> bool:
    """Whether an object has attributes, and python's own way of being copied, which makes nothing else."""
    kind: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, SHARED)
        and not callable(getattr(kind, "__copy__", None))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__setstate__")
        # it may close a file that the copy shares
        and not hasattr(kind, "__del__")
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and kind.__module__ != "builtins"
    )
