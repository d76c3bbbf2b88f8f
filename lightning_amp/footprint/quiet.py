"""A Trainer that a user has not made says nothing."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing of a Trainer that the user has not made."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    children = [logging.getLogger(f"lightning.{name}.utilities.rank_zero") for name in ("pytorch", "fabric")]
    levels = [(logger, logger.level) for logger in loggers + children]
    for logger, _ in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
