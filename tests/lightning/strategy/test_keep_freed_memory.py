"""Claim: what a step frees is there for the next one without a page fault; other devices are left as they are."""

import subprocess
import sys

import pytest
import torch

from lightning_amp.lightning.strategy.keep_freed_memory import keep_freed_memory

STEPS = """
import resource
import torch
from lightning_amp.lightning.strategy.keep_freed_memory import keep_freed_memory

def faults(n=3):
    for i in range(n + 1):
        if i == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(2**20) for _ in range(30)]
        del kept
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // n

print(faults(), keep_freed_memory(torch.device("cpu"), 2**32), faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_a_step_takes_the_memory_of_the_one_before() -> None:
    # in a process of its own: the setting is the process's
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    before, kept, after = done.stdout.split()
    assert kept == "True"
    assert int(after) < int(before) / 20


def test_an_accelerator_has_an_allocator_of_its_own() -> None:
    assert not keep_freed_memory(torch.device("meta"), 2**32)
