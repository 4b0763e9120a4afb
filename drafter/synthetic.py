"""FOR BENCHMARKS ONLY: a drafter that knows the answers. It measures what a system would do with a drafter that accepts so
and so much, where no trained one exists; its figures are no drafter's.

A real drafter runs, of any weights, for what it costs. Its candidates are then overwritten by the target's recorded
output: at each position the recorded token stands first, or nowhere, by a coin of the position's own. So runs repeat,
whatever is batched with what. Knows no target and no trees.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.drafter import Drafter
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.drafter.recordings import Recording, expected_length

log = logging.getLogger(__name__)
# Probability that the first candidate of each position claims, right or wrong. High enough for a tree of L nodes to be the
# chain of first candidates, so that what is asked for is what is accepted; the others share the rest as 1, 1/2, 1/3, …
CONFIDENCE = 0.9


@dataclass(frozen=True)
class _Replay:
    """A recording, padded by the horizon. Tensors [n + L]."""

    start: int  # position of its first token
    tokens: Tensor  # int32, -1 past the end
    coins: Tensor  # float32, uniform in [0, 1)


class SyntheticDrafter:
    """Has the methods of `Drafter`. A sequence is known by its id up to the last "/"; others get no right tokens."""

    def __init__(self, drafter: Drafter, recordings: Mapping[str, Recording], acceptance: Sequence[float]) -> None:
        """
        Args:
            drafter: runs for its cost.
            recordings: by request id.
            acceptance: probability, for each depth, that its token is right where all before it were.
        """
        self._drafter, self._horizon = drafter, drafter.info.horizon
        if len(acceptance) != self._horizon:
            raise ValueError(f"acceptance is given for {len(acceptance)} depths; this drafter has {self._horizon}")
        self._acceptance = torch.tensor(acceptance, dtype=torch.float32)
        self._replays = {name: self._replay(name, recording) for name, recording in recordings.items()}
        self._nothing = torch.full((self._horizon,), -1, dtype=torch.int32), torch.ones(self._horizon)
        log.warning(
            "SYNTHETIC DRAFTER, for benchmarks only: it replays %d recorded answers with an acceptance length of %.2f; "
            "no figure of this deployment is a real drafter's",
            len(recordings),
            expected_length(acceptance),
        )

    @property
    def info(self) -> DrafterInfo:
        return self._drafter.info

    @property
    def sequences(self) -> int:
        return self._drafter.sequences

    @property
    def compute_seconds(self) -> float:
        """See Drafter.compute_seconds."""
        return self._drafter.compute_seconds

    def release(self, sequences: Iterable[str] | None) -> None:
        self._drafter.release(sequences)

    @torch.inference_mode()
    def draft(self, items: Sequence[DraftItem], features: Sequence[Tensor]) -> Candidates:
        """See `Drafter.draft`."""
        real = self._drafter.draft(items, features)
        found = [self._look_up(item) for item in items if item.bonus is not None]
        if not found:
            return real
        device = real.ids.device
        tokens, coins = (torch.stack(part) for part in zip(*found, strict=True))
        levels = real.ids.shape[1]
        tokens, coins = tokens[:, :levels], coins[:, :levels]
        right = (tokens >= 0) & (coins < self._acceptance[:levels])
        message = torch.stack((tokens, right.int()))
        if device.type == "cuda":
            message = message.pin_memory()
        tokens, shown = message.to(device, non_blocking=True)
        return overwrite(real, tokens, shown.bool())

    def _replay(self, name: str, recording: Recording) -> _Replay:
        padding = [-1] * self._horizon
        tokens = torch.tensor([*recording.token_ids, *padding], dtype=torch.int32)
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        return _Replay(recording.prompt_tokens, tokens, torch.rand(len(tokens), generator=generator))

    def _look_up(self, item: DraftItem) -> tuple[Tensor, Tensor]:
        """Tokens and coins [L] of the positions after the bonus; no tokens where the bonus is not the recorded one."""
        replay = self._replays.get(item.sequence.rpartition("/")[0])
        at = item.position - replay.start if replay else -1
        if replay is None or not 0 <= at < len(replay.tokens) - self._horizon or int(replay.tokens[at]) != item.bonus:
            return self._nothing
        positions = slice(at + 1, at + 1 + self._horizon)
        return replay.tokens[positions], replay.coins[positions]


def overwrite(real: Candidates, tokens: Tensor, shown: Tensor) -> Candidates:
    """Candidates with `tokens` [B, L] int32 first where `shown` [B, L], and nowhere else.

    Where a token is not shown, the last candidate is left out instead, whether or not the real drafter had found it. The
    log-probs are made up.
    """
    ids, first, last = real.ids, real.ids[..., :1], real.ids[..., -1:]
    ids = torch.where(ids == tokens[..., None], torch.where(shown[..., None], first, last), ids)
    ids[..., 0] = torch.where(shown, tokens, ids[..., 0])
    ids[..., -1] = torch.where(shown, ids[..., -1], -1)
    logprobs = _profile(ids.shape[-1], ids.device).expand(ids.shape).clone()
    logprobs[..., -1] = torch.where(shown, logprobs[..., -1], -torch.inf)
    return Candidates(logprobs, ids)


@functools.cache
def _profile(ranks: int, device: torch.device) -> Tensor:
    """[K] float32 log-probs, best first."""
    rest = [1 / rank for rank in range(1, ranks)]
    others = [math.log((1 - CONFIDENCE) * weight / sum(rest)) for weight in rest]
    return torch.tensor([math.log(CONFIDENCE), *others], device=device)
