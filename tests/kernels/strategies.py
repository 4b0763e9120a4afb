"""Hypothesis strategies shared by the kernel tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

KINDS = ("peaky", "flat", "equal", "zero", "rounded", "holes", "tail")


def candidates(rng: np.random.Generator, levels: int, width: int, kind: str) -> np.ndarray:
    """[L, K] float32 candidate log-probs, descending where finite, of one adversarial kind."""
    scale = {"peaky": 6.0, "flat": 0.05}.get(kind, 1.5)
    x = np.sort(rng.normal(size=(levels, width)) * scale, axis=1)[:, ::-1]
    x = x - np.log(np.exp(x).sum(1, keepdims=True)) if width else x
    if kind == "equal":
        x = np.full_like(x, -np.log(max(width, 1)))
    if kind == "zero":
        x = np.zeros_like(x)
    if kind == "rounded":  # few distinct values: exact ties between paths of different depths
        x = np.round(x)
    x = np.minimum(x, 0).astype(np.float32)
    if kind == "holes":
        x[rng.random(x.shape) < 0.3] = rng.choice([-np.inf, np.nan, np.inf])
    if kind == "tail":
        x[np.arange(width)[None] >= rng.integers(0, width + 1, size=(levels, 1))] = -np.inf
    return x


def token_ids(rng: np.random.Generator, levels: int, width: int) -> np.ndarray:
    """[L, K] int32, different within a row; token 0 is common."""
    rows = [rng.permutation(width + 3)[:width] for _ in range(levels)]
    return np.array(rows, np.int32).reshape(levels, width)


seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
kinds = st.sampled_from(KINDS)
