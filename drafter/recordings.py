"""Recorded answers of a target, and how often a replay of them is to be right. For benchmarks. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recording:
    """One request's answer as plain decoding gave it."""

    prompt_tokens: int
    token_ids: tuple[int, ...]


def read_recordings(path: str | Path) -> dict[str, Recording]:
    """Recordings by request id, from JSON lines `{"request_id": str, "prompt_tokens": int, "token_ids": [int, …]}`.

    Other keys are not looked at. Raises ValueError where there is no such file or a line is something else.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no recording at {path}; `ddtree bench --record {path}` writes one from plain decoding")
    recordings: dict[str, Recording] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            name, prompt, tokens = (entry[key] for key in ("request_id", "prompt_tokens", "token_ids"))
            valid = isinstance(name, str) and isinstance(prompt, int) and all(isinstance(t, int) for t in tokens)
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            raise ValueError(f"{path}, line {number}: expected request_id, prompt_tokens and token_ids as JSON")
        recordings[name] = Recording(prompt, tuple(tokens))
    if not recordings:
        raise ValueError(f"{path} holds no recording; `ddtree bench --record {path}` writes some from plain decoding")
    return recordings


def acceptance_by_depth(horizon: int, acceptance: Sequence[float] | None, length: float | None) -> tuple[float, ...]:
    """For each of the `horizon` depths, the probability that its token is right where all before it were.

    Args:
        acceptance: the probabilities themselves; depths past the last one have 0.
        length: instead of them, the acceptance length that one and the same probability for all depths comes to.
    Raises:
        ValueError: more depths than there are, or a length that no probability gives.
    """
    if acceptance is not None:
        if len(acceptance) > horizon:
            raise ValueError(f"acceptance is given for {len(acceptance)} depths; this drafter has {horizon}")
        return (*acceptance, *[0.0] * (horizon - len(acceptance)))
    assert length is not None, "one of the two is given"
    if not 1 <= length <= horizon + 1:
        raise ValueError(f"an acceptance length of {length} is impossible: {horizon} depths give 1 to {horizon + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length([middle] * horizon) < length else (low, middle)
    return (high,) * horizon


def expected_length(acceptance: Sequence[float]) -> float:
    """Tokens gained per round where depth d is right with probability acceptance[d - 1]: 1 + a₁ + a₁a₂ + …"""
    total = reached = 1.0
    for probability in acceptance:
        reached *= probability
        total += reached
    return total
