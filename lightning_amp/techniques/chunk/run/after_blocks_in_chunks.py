"""Run in chunks what a module computes after its last block, such as the head and loss of a language model.

The module's own forward runs up to the end of its last block, with everything installed there, and is then aborted. The
rest is computed by a plan (graph/after_blocks.py).
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
from lightning_amp.techniques.chunk.regions.costs import HasSpeed
from lightning_amp.techniques.chunk.run.in_chunks import InChunks


class _Reached(BaseException):
    """Raised with the result of the last block. Not an Exception, because a forward may catch those."""


class AfterBlocksInChunks(InChunks):
    """Replacement of a module's forward, called as `forward(module, *args, **kwargs)`.

    Args:
        budget_bytes: Budget of the code after the last block; in training, of its forward and backward pass.
        n_calls: Number of block calls in one forward pass.
        policy, rates: As for `InChunks`.
    """

    def __init__(self, budget_bytes: int, n_calls: int, *, policy: str = "auto", rates: HasSpeed | None = None) -> None:
        super().__init__(budget_bytes, train=True, policy=policy, rates=rates)
        # not all of the module is captured: its blocks are not, and the capture checks the modules outside of them
        self.captures_whole = False
        self._n_calls = n_calls

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result.

        Raises:
            InstallError: The calls of blocks differ from the planned step, or the last block is called inside a context
                that also covers code after it; or as in `InChunks`.
        """
        before, result = self._to_the_last_block(module, args, kwargs)
        return super().__call__(AfterBlocks(module, before), args, kwargs, result)

    def _to_the_last_block(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Sequence[Any], Any]:
        """Return the results of earlier blocks, as `AfterBlocks` takes them, and the result of the last block."""
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
            # registered last, so that all other hooks and installed techniques of the block have run
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
    """Return the modes that a context around the last block would have changed."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, autocast_now(), top_saving_hooks(False)
