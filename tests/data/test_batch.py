"""Claim: integers of a batch are given in copies, unless they share memory."""

import numpy as np
import torch

from lightning_amp.data.batch import integers_in


def test_integers_that_share_memory_are_left_out() -> None:
    array, whole, own = np.arange(6), torch.arange(6), torch.arange(3)
    batch = {"views": [whole[:3], whole[3:]], "own": own, "float": torch.ones(3)}
    # two storages at one address
    batch["of an array"] = [torch.from_numpy(array), torch.from_numpy(array)]
    assert [id(x) for x in integers_in(batch)] == [id(own)]
    meta = [torch.ones(3, dtype=torch.int64, device="meta") for _ in range(2)]
    assert len(integers_in(meta)) == 2
