"""Running out of memory: telling it from other errors, and letting go of what the failed attempt held.

An attempt that failed keeps its tensors alive through the error's traceback. So catch the error, `release` it, leave
the `except` block, and only then try something smaller.
"""

from __future__ import annotations

import traceback

import torch
from accelerate.utils.memory import clear_device_cache

_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What CUDA, other devices' backends, torch's allocator on a CPU and cuBLAS say, whatever class they say it with."""
_SHOWN_CHARS = 240


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def release(error: BaseException) -> str:
    """Let go of all that a failed attempt held, and return the error's words in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    clear_device_cache(garbage_collection=True)
    return words if len(words) <= _SHOWN_CHARS else f"{words[:_SHOWN_CHARS]}..."
