"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable


def return_freed_memory() -> None:
    """Free what nothing refers to any more, and return it to the operating system.

    Matplotlib's figures have reference cycles, which Python collects late. The C library then keeps
    the freed blocks, because small blocks in use lie between them.
    """
    gc.collect()
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return `malloc_trim` of glibc. Other C libraries do not have it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
