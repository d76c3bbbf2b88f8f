"""Shared fixtures; every test computes with one thread, so that two ranks on two cores do not disturb each other.

Nothing here imports torch: the tests of planning run without it.
"""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import REAL_DATA

# torch reads it when it is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
LOGS = {
    "lightning": logging.NOTSET,
    "lightning.pytorch": logging.INFO,
    "lightning.fabric": logging.INFO,
    "lightning.pytorch.utilities.rank_zero": logging.NOTSET,
    "lightning.fabric.utilities.rank_zero": logging.NOTSET,
}


def pytest_configure(config: pytest.Config) -> None:
    """Let workers take files in the order below: by themselves they begin with those of most tests, and the longest
    files have one or two.
    """
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (not skip) what this machine cannot run, and let files that start processes begin, then long ones.

    They take longest: begun last, one of them would be waited for by all workers.
    """
    ranks, long = ({item.path for item in items if item.get_closest_marker(name)} for name in ("ranks", "long"))
    items.sort(key=lambda item: (item.path not in ranks, item.path not in long))
    absent = [
        item
        for item in items
        if (item.get_closest_marker("gpu") and not _has_gpu())
        or ("real_data" in getattr(item, "fixturenames", ()) and not REAL_DATA.is_dir())
    ]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the helper that starts ranks whether this test says that it does, and let Lightning log as it does by
    itself: a run that was to be quiet may have been of this process. Before any fixture, for those of a module train
    too.
    """
    for name, level in LOGS.items():
        logging.getLogger(name).setLevel(level)
    ranks = sys.modules.get("tests.ranks")
    if ranks is not None:
        marks = {mark.name for mark in item.iter_markers()}
        ranks.MARKED = bool(marks & {"ranks", "alone", "exhaustive", "slow"})


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """Give the next test a process without a process group and with the environment that this one found."""
    before = dict(os.environ)
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        # Trainer(deterministic=True) leaves it on
        torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def real_data() -> Path:
    """The folder of real data files kept beside the checkout."""
    return REAL_DATA
