"""Call functions around `one_hot`, which torch computes by other operators on fake tensors than on real ones.

It is replaced in all modules that have its name. A mode of torch functions would see it too, but while one is active,
torch's attention does not take its fast path, which rounds otherwise.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from threading import get_ident
from typing import Any

from torch.nn import functional

from lightning_amp.holding import replacing

ONE_HOT = functional.one_hot


@contextmanager
def around_one_hot(begins: Callable[[], None], ends: Callable[[], None]) -> Iterator[None]:
    """Context manager in which calls of `one_hot` in this thread are between calls of two functions."""
    plain, thread = functional.one_hot, get_ident()

    @wraps(ONE_HOT)
    def one_hot(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return plain(*args, **kwargs)
        begins()
        try:
            return plain(*args, **kwargs)
        finally:
            ends()

    with ExitStack() as undo:
        for module in _holders(len(sys.modules)):
            undo.enter_context(replacing(module, one_hot=one_hot))
        yield


@lru_cache(1)
def _holders(_n_modules: int) -> list[Any]:
    """Return the modules that have the name; they are looked for when others were imported."""
    # what packages put into sys.modules may be no module
    tables = ((module, getattr(module, "__dict__", None)) for module in [*sys.modules.values()])
    found = ((module, table.get("one_hot")) for module, table in tables if isinstance(table, dict))
    # unless it is replaced now
    return [module for module, one in found if getattr(one, "__wrapped__", one) is ONE_HOT]
