"""Recognises the errors that mean that memory has run out. It does not need torch.

Errors cannot tell everything: some libraries crash if they cannot be loaded into memory. So the
limit of the process is checked before.
"""

from __future__ import annotations

import errno
import re
import sys

from eepo.types import UserError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

OUT_OF_MEMORY = "out of memory"
MIN_MEGABYTES = 1536  # of address space, for torch, its threads and a tiny model

# Messages of a plain RuntimeError: torch's CPU allocator (Linux, Windows), cuBLAS, the CUDA driver,
# a thread without memory for its stack; and of an ImportError: a library that cannot be loaded
_MESSAGES = re.compile(
    "out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED"
    "|can't start new thread|failed to map segment|cannot allocate memory",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"tried to allocate (\d+(?:\.\d+)? \w+)", re.IGNORECASE)


def check_limit() -> None:
    """Refuse to start if the process may not use enough memory to load its libraries."""
    if resource is None or "torch" in sys.modules:
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_MEGABYTES * 2**20:
        raise UserError(
            f"this process may use only {limit // 2**20} MB of memory (ulimit -v); "
            f"eepo needs at least {MIN_MEGABYTES} MB"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that a device or the operating system has no memory left.

    Or whether it was raised because of such an error: after one, the capture of a CUDA graph ends
    with another error.
    """
    return _find(error) is not None


def describe(error: BaseException) -> str:
    """Return `out of memory`, with the amount if the error names it."""
    amount = _AMOUNT.search(str(_find(error) or error))
    return f"{OUT_OF_MEMORY} (tried to allocate {amount.group(1)})" if amount else OUT_OF_MEMORY


def _find(error: BaseException | None) -> BaseException | None:
    while error is not None and not _means_no_memory(error):
        error = error.__cause__ or error.__context__
    return error


def _means_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError | ImportError) and bool(_MESSAGES.search(str(error)))
