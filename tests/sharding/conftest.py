"""Sharded tensors require torch 2.13."""

from lightning_amp.sharding._torch import skip_one_torch_function

collect_ignore_glob = [] if skip_one_torch_function is not None else ["test_*.py", "*/test_*.py"]
