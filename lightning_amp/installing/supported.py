"""Find which techniques a module's decoder does not support, by installing and undoing each.

Only techniques without a mesh are probed; of the others the parts are looked at that they replace. One that a module
refuses after all is an InstallError, and nothing is installed.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.checks.key import channels_problem, rows_problem
from lightning_amp.techniques.checks.strata_loop import walk_of
from lightning_amp.techniques.contract.protocol import ATTENTION_KEY, CONVOLUTION_KEY, ShardableAttention
from lightning_amp.techniques.contract.stand_in import part
from lightning_amp.techniques.table import STRATEGIES, targets_of

LOCAL = ("S3", "S4", "fused", "sdpa", "sparse", "recompute", "stream")


def with_unsupported(module: nn.Module, shape: ModelShape) -> ModelShape:
    """The shape of a module with what its decoder refuses.

    Args:
        module: The LightningModule; is left as it was.
        shape: Its shape, with the decoder's name.
    """
    if shape.decoder is None:
        return shape
    return replace(shape, decoder=replace(shape.decoder, unsupported=_unsupported(module, shape)))


def _unsupported(module: nn.Module, shape: ModelShape) -> tuple[str, ...]:
    assert shape.decoder is not None, "the caller has looked"
    decoder: Any = part(module, shape.decoder.fqn)
    refused = {strategy for strategy in LOCAL if not _installs(module, shape, strategy)}
    refused |= {strategy for strategy, parts in _needed(decoder).items() if not parts}
    return tuple(strategy for strategy in STRATEGIES if strategy in refused)


def _installs(module: nn.Module, shape: ModelShape, strategy: str) -> bool:
    assert shape.decoder is not None, "the caller has looked"
    if strategy in ("S3", "fused", "sdpa") and not shape.decoder.attention:
        return False
    try:
        rules = [
            Rule(fqn=fqn, spec=spec, strategy=strategy, why="tried")
            for fqn, spec in targets_of(strategy, shape)
        ]
        install_rules(module, rules).undo()
    except AmpError:
        return False
    return True


def _needed(decoder: Any) -> dict[str, bool]:
    """Whether a decoder has the parts that techniques with a mesh replace."""
    strata = list(decoder.strata)
    region = hasattr(decoder, "region")
    features = region and all(hasattr(stratum, "features") for stratum in strata)
    keys = [key for key in (getattr(stratum, "key", None) for stratum in strata) if key is not None]
    return {
        "S2": features,
        "S5": region
        and all(_has(stratum, ("key", "decode")) for stratum in strata)
        and all(_has_channels(key) for key in keys)
        and not any(channels_problem(key, decoder.dim, [0], [decoder.dim - 1]) for key in keys),
        "nodes": features
        and bool(keys)
        and all(_has(key, ATTENTION_KEY) for key in keys)
        and not any(rows_problem(key, decoder.dim) for key in keys),
        "strata": region and _walks(decoder),
    }


def _has(module: nn.Module, children: Iterable[str]) -> bool:
    return all(hasattr(module, name) for name in children)


def _has_channels(key: Any) -> bool:
    """Whether a key has the children that S5 shards."""
    if not _has(key, ATTENTION_KEY):
        return _has(key, CONVOLUTION_KEY)
    return any(isinstance(part, ShardableAttention) for part in key.attention.modules())


def _walks(decoder: Any) -> bool:
    try:
        walk_of(decoder, "strata")
    except AmpError:
        return False
    return True
