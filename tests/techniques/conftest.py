"""Sharded tensors require torch 2.13, and so do the techniques that run the step under a mode of theirs."""

from lightning_amp.sharding._torch import skip_one_torch_function

LATER = ("sequence", "tensor3d", "logits", "replay", "offload")
collect_ignore_glob = [] if skip_one_torch_function is not None else [f"{name}/test_*.py" for name in LATER]
