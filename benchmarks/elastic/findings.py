"""What an elastic run shows: speed over time and by phase, answers beside those of the reference, the verdict. JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..chaos.findings import compare
from ..chaos.streams import Ask, Stream
from .tokens import Counts

COUNTS = ("rounds", "generated_tokens", "drafted_tokens", "accepted_tokens", "fallbacks", "moves", "moved_rows")
LEAST_S = 1.0  # a shorter time has one round or none


@dataclass
class Phase:
    """A time with so many drafters. Times are seconds, monotonic; counts are those of `/health`."""

    drafters: int
    asked: float  # when the number was asked for
    before: Mapping[str, Any]  # counts then
    after: Mapping[str, Any] = field(default_factory=dict)  # counts when it ended
    reached: float | None = None  # when the drafters were there
    ended: float | None = None


def throughput(counts: Counts, begin: float, end: float) -> list[float]:
    """Tokens in each whole second from `begin` to `end`."""
    seconds = begin + np.arange(int(end - begin) + 1)
    tokens: list[float] = np.diff(_by(counts, seconds)).tolist()
    return tokens


def per_phase(
    phases: Sequence[Phase],
    seen: Sequence[tuple[float, int]],
    counts: Counts,
    streams: Sequence[Stream],
    begin: float,
) -> list[dict[str, Any]]:
    """Of the phases that came to their end. `seen`: when there were how many drafters.

    `tokens_per_s` is from `reached_s` to `ended_s`, `changing_tokens_per_s` before, from `asked_s` on; counts and `still_s`, the
    longest time that a stream got nothing, are of both. `held`: the number of drafters stayed.
    """
    out = []
    for phase in phases:
        if phase.reached is None or phase.ended is None:
            continue
        others = [number for at, number in seen if phase.reached < at < phase.ended and number != phase.drafters]
        out.append(
            {
                "drafters": phase.drafters,
                "asked_s": phase.asked - begin,
                "reached_s": phase.reached - begin,
                "ended_s": phase.ended - begin,
                "held": not others,
                "tokens_per_s": _rate(counts, phase.reached, phase.ended),
                "changing_tokens_per_s": _rate(counts, phase.asked, phase.reached),
                "still_s": max((stream.gap(phase.asked, phase.ended) for stream in streams), default=0.0),
                **{name: phase.after[name] - phase.before[name] for name in COUNTS},
            }
        )
    return out


def answers(streams: Sequence[Stream], expected: Mapping[Ask, Stream], exact: bool) -> dict[str, Any]:
    """What became of the answers; `identical` is the share of those that ended. `exact`: they do not depend on what they were
    computed beside. Else near-ties part them, and `changed` is None."""
    found = compare(streams, expected)
    ended = sum(stream.finish_reason is not None for stream in streams)
    identical = 1 - len(found["changed"]) / ended if ended else None
    return found | {"ended": ended, "identical": identical, "changed": found["changed"] if exact else None}


def passed(result: Mapping[str, Any]) -> bool:
    """Every phase was reached and held, and no client noticed."""
    load, phases = result["load"], result["phases"]
    whole = [phase["drafters"] for phase in phases if phase["held"]] == result["settings"]["drafters"]
    return whole and bool(load) and not (load["failed"] or load["changed"] or result["remarks"])


def _rate(counts: Counts, begin: float, end: float) -> float | None:
    """Tokens a second; None where that says nothing."""
    before, after = _by(counts, [begin, end])
    return float(after - before) / (end - begin) if end - begin >= LEAST_S else None


def _by(counts: Counts, times: Any) -> Any:
    """Tokens at these times; between two readings they are taken to come evenly."""
    moments, tokens = zip(*counts, strict=True)
    return np.interp(times, moments, tokens)
