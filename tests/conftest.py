"""Shared fixtures; every test runs single-threaded so that two ranks on two cores do not disturb each other."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (not skip) what this machine cannot run: no GPU, or no real data set beside the checkout."""
    import torch

    absent = [
        item
        for item in items
        if (item.get_closest_marker("gpu") and not torch.cuda.is_available())
        or ("real_data" in getattr(item, "fixturenames", ()) and not REAL_DATA.is_dir())
    ]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """Give the next test a process without a process group and with the environment that this one found."""
    import torch.distributed as dist

    before = dict(os.environ)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def real_data() -> Path:
    """The folder of real data files kept beside the checkout."""
    return REAL_DATA
