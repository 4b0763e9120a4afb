"""OpenMP's threads between two computations. Knows neither what is computed nor when.

After a parallel part the threads of a pool spin for some milliseconds (libgomp: 5 to 9 on a server's cores), to be at hand for
the next one. Within a forward that makes it fast. After it they keep a core from whoever computes next: a drafter whose turn
follows the verifier's takes twice the time (docs/experiments.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

LIBRARIES = ("libgomp.so.1", "libiomp5.so", "libomp.so")
SOFT = 1  # omp_pause_soft: settings stay
_pauses: list[
    Callable[[int], int]
] = []  # of the libraries that were loaded when some first were: looking for others takes 70 µs


def end_threads() -> None:
    """Ends those of the calling thread's pool; the next parallel part makes them anew, which takes about half a millisecond.

    Does nothing where no OpenMP library is loaded, or one from before `omp_pause_resource_all` (OpenMP 5.0, 3.2.44).
    """
    if not _pauses:
        for name in LIBRARIES:
            with suppress(OSError, AttributeError):
                _pauses.append(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all)
    for pause in _pauses:
        pause(SOFT)
