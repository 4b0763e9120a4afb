"""Lists of token lists as two flat arrays, for npz files. Knows only numpy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]  # one row of token ids


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest dtype of files for token ids below `vocab_size`."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def pack(rows: Sequence[Sequence[int] | Tokens], dtype: type) -> tuple[Tokens, NDArray[np.int64]]:
    """`(values, offsets)`: row i is `values[offsets[i]:offsets[i + 1]]`."""
    values: list[Tokens] = [np.asarray(row, dtype) for row in rows]
    return np.concatenate([np.zeros(0, dtype), *values]), np.cumsum([0, *map(len, rows)], dtype=np.int64)


def unpack(values: Tokens, offsets: NDArray[np.int64]) -> list[Tokens]:
    """The rows again, as views."""
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def save_arrays(path: Path, **arrays: Any) -> None:
    """An npz file that is whole or not there."""
    partial = path.with_name(path.name + ".partial.npz")
    np.savez(partial, **arrays)
    os.replace(partial, path)
