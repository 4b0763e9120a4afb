"""What a chaos run shows: streams beside their fault-free ones, what every kill cost, what is left behind. JSON values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddtree.deployments import shared_memory

from .monkey import Kill, Monkey
from .streams import Ask, Stream

SETTLE_S = 15.0  # for the last pages and processes to go


def compare(streams: Sequence[Stream], expected: Mapping[Ask, Stream]) -> dict[str, Any]:
    """`failed` streams with their errors; `changed` ones with the first token that is lost, doubled or another one; `cut` off."""
    ended = [stream for stream in streams if stream.finish_reason]
    changed = [stream for stream in ended if stream.answer != expected[stream.ask].answer]
    return {
        "failed": [stream.error for stream in streams if stream.error],
        "changed": [_difference(stream, expected[stream.ask]) for stream in changed],
        "cut": sum(not stream.finish_reason and not stream.error for stream in streams),
        "accepted_tokens": sum(stream.accepted_tokens for stream in ended),
    }


def _difference(got: Stream, wanted: Stream) -> dict[str, Any]:
    pairs = zip(got.token_ids, wanted.token_ids, strict=False)
    shorter = min(len(got.token_ids), len(wanted.token_ids))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return {
        "prompt": got.ask.prompt, "temperature": got.ask.temperature, "first_difference": first,
        "got": got.token_ids[first:], "wanted": wanted.token_ids[first:],
        "text_got": got.text, "text_wanted": wanted.text,
    }  # fmt: skip


def speed(streams: Sequence[Stream], begin: float) -> dict[str, Any]:
    """How many, how fast, and how long they stood still. `chunks` counts those of all streams in each second."""
    gaps = [b - a for stream in streams for a, b in zip(stream.times, stream.times[1:], strict=False)]
    last = max((stream.times[-1] for stream in streams), default=begin)
    chunks = [0] * (int(last - begin) + 1)
    for stream in streams:
        for at in stream.times[1:]:
            chunks[int(at - begin)] += 1
    return {
        "streams": len(streams),
        "tokens": sum(stream.completion_tokens for stream in streams),
        "seconds": last - begin,
        "gap_median_s": median(gaps or [0.0]),
        "gap_max_s": max(gaps, default=0.0),
        "chunks": chunks,
    }


def per_kill(kills: Sequence[Kill], streams: Sequence[Stream], begin: float) -> list[dict[str, Any]]:
    """`still_s`: the longest time that a stream got nothing, from the kill to the recovery or around a part of it."""
    out = []
    for kill in kills:
        took = None if kill.recovered is None else kill.recovered - kill.at
        still = max((stream.gap(kill.at, kill.recovered or kill.at) for stream in streams), default=0.0)
        out.append(
            {"kind": kill.kind, "at_s": kill.at - begin, "alone": kill.alone, "recovered_s": took, "still_s": still}
        )
    return out


def leaks(monkey: Monkey) -> list[str]:
    """What is left when all streams have ended and the service is whole: pages, sequences, processes, shared memory."""
    deadline = time.monotonic() + SETTLE_S
    while (found := _left_behind(monkey)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _left_behind(monkey: Monkey) -> list[str]:
    status, now = monkey.health(), monkey.find()
    pages = status["kv_pages"]
    found = [f"{status[what]} sequences are {what}" for what in ("running", "waiting") if status[what]]
    if pages["free"] != pages["total"]:
        found.append(f"{pages['total'] - pages['free']} of {pages['total']} pages are taken")
    found += [
        f"{len(pids)} processes of kind {kind}, {monkey.whole[kind]} before"
        for kind, pids in now.items()
        if len(pids) != monkey.whole[kind]
    ]
    alive = set[int]().union(*now.values())
    folders = [str(pid) for pid in monkey.seen - alive if (shared_memory.root() / str(pid)).exists()]
    if folders:
        found.append(f"shared memory of ended processes: {', '.join(folders)}")
    return found
