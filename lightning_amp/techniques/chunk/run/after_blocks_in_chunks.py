"""Run what a module computes after its last block in chunks: the head of a language model, with its loss.

The module's own forward runs up to its last block, with everything that is installed there, and is left when that has
returned. What it would have computed of the result is then computed by a plan (graph/after_blocks.py).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_amp._torch import top_saving_hooks
from lightning_amp.errors import InstallError
from lightning_amp.footprint.chain.block_call import autocast_now, likeness
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.graph.after_blocks import AfterBlocks
from lightning_amp.techniques.chunk.run.in_chunks import InChunks


class _Reached(BaseException):
    """The last block has returned, with the result. No Exception, for a forward may catch those."""


class AfterBlocksInChunks(InChunks):
    """Called as `forward(module, *args, **kwargs)`, in place of the module's own.

    Args:
        budget_bytes: For what follows the last block, in training for both of its passes.
        n_calls: Calls of blocks in one forward pass.
    """

    def __init__(self, budget_bytes: int, n_calls: int) -> None:
        super().__init__(budget_bytes, train=True)
        # it checks what it captures by itself
        self.captures_whole = False
        self._n_calls = n_calls

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the module returns.

        Raises:
            InstallError: Its blocks are called otherwise than when the step was looked at, or within something that
                holds beyond the last one; or as `InChunks`.
        """
        before, result = self._to_the_last_block(module, args, kwargs)
        return super().__call__(AfterBlocks(module, before), args, kwargs, result)

    def _to_the_last_block(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Sequence[Any], Any]:
        """Results of the blocks before the last one, as `AfterBlocks` takes them, and that of the last one."""
        before: list[tuple[str, Any]] = []
        state = _state()

        def note(fqn: str, block: nn.Module, given: Any, result: Any) -> None:
            if len(before) + 1 < self._n_calls:
                before.append((fqn, likeness(result)))
                return
            if _state() != state:
                raise InstallError(
                    f"what follows the blocks of {self.fqn or type(module).__name__!r} cannot run in "
                    f"chunks: the last block, {fqn!r}, is called within something that ends after it, such "
                    "as autocast, another gradient mode or a checkpoint; remove its rule of chunk from the "
                    "plan"
                )
            raise _Reached(result)

        hooks: list[RemovableHandle] = []
        try:
            # the last of a block's hooks: what is installed there has ended, and has its result
            for fqn, block in find_blocks(module).items():
                hooks.append(block.register_forward_hook(partial(note, fqn)))
            type(module).forward(module, *args, **kwargs)
        except _Reached as end:
            return before, end.args[0]
        finally:
            for hook in hooks:
                hook.remove()
        raise InstallError(
            f"what follows the blocks of {self.fqn or type(module).__name__!r} cannot run in chunks: its"
            f" forward pass must call {self._n_calls!r} blocks; it has called {len(before)!r}; leave the"
            " rule of chunk for it out, or plan for the step that is run"
        )


def _state() -> Any:
    """What a context around the last block would have changed."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, autocast_now(), top_saving_hooks(False)
