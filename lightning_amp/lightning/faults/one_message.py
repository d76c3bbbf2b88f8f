"""Print a user's mistake that ends all ranks once, by its message alone.

Every rank raises the same PlanError or InstallError, so rank 0 speaks for all. Ranks that the main process has started
by multiprocessing raise it there too, where torch would raise their tracebacks as text.
"""

import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_amp import errors
from lightning_amp.lightning._compat import MultiProcessingLauncher, rank_zero_only

OF_ALL_RANKS = (errors.PlanError, errors.InstallError)
RAISED = re.compile(
    r"\nlightning_amp\.errors\.(PlanError|InstallError): ((?:(?!\nTraceback \().)*)\Z", re.DOTALL
)


class MistakesOnce:
    """`sys.excepthook` that leaves every other exception to the hook before it."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> None:
        """Print the message of an uncaught mistake on rank 0."""
        if not issubclass(kind, OF_ALL_RANKS):
            self._before(kind, error, trace)
            return
        text = "".join(traceback.format_exception_only(error))
        rank_zero_only(print)(text, end="", file=sys.stderr)


def print_mistakes_once() -> None:
    """Put the hook in; it may be called again."""
    if not isinstance(sys.excepthook, MistakesOnce):
        sys.excepthook = MistakesOnce(sys.excepthook)


class MistakesLauncher(MultiProcessingLauncher):
    """Lightning's; a mistake that its processes raise is raised as such."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and wait for them."""
        try:
            return super().launch(*args, **kwargs)
        except ProcessRaisedException as error:
            found = RAISED.search(str(error).rstrip())
            if found is None:
                raise
            raise getattr(errors, found[1])(found[2]) from None


def raise_mistakes(launcher: object) -> None:
    """Let Lightning's launcher do so; others stay as they are."""
    if type(launcher) is MultiProcessingLauncher:
        launcher.__class__ = MistakesLauncher
