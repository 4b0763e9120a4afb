"""One request over the routers that serve it in turn: what it has delivered, and the request for the rest.

The rest is the prompt with the tokens so far behind it. What the target draws depends on the seed, on a token's position and
on which tokens are answer, so it is what the first router would have sent. Knows no Ray, no clock and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest

from ddtree.deployments.requests import Delta, GenerationRequest, RequestStats


@dataclass
class Delivery:
    """`rest` and `take` in turn: a request for each router, and the deltas that come of it."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)  # so far
    _attempts: int = 0
    _before: RequestStats = field(default_factory=RequestStats)  # of routers that are gone
    _latest: RequestStats = field(default_factory=RequestStats)

    def rest(self) -> GenerationRequest:
        """What is not delivered yet, for another router. No two have the same id: one that is given up may still run."""
        request = self.request
        request_id = f"{request.request_id}~{self._attempts}" if self._attempts else request.request_id
        self._attempts += 1
        self._before = self._latest
        return replace(
            request,
            request_id=request_id,
            prompt_ids=request.prompt_ids + tuple(self.token_ids),
            max_tokens=request.max_tokens - len(self.token_ids),
            resumed=request.resumed + len(self.token_ids),
            prompt_logprobs=None if self.token_ids else request.prompt_logprobs,  # they come with the first token
        )

    def take(self, delta: Delta) -> Delta:
        """The delta as one router would have sent it that served the whole request."""
        self.token_ids += delta.token_ids
        if delta.stats is None:
            return delta
        self._latest = _together(self._before, delta.stats, len(self.request.prompt_ids))
        return replace(delta, stats=self._latest)


def _together(before: RequestStats, after: RequestStats, prompt_tokens: int) -> RequestStats:
    """Figures of one request at two routers. What the second found kept may be more than the prompt."""
    rounds = zip_longest(before.acceptance_histogram, after.acceptance_histogram, fillvalue=0)
    return RequestStats(
        budget=after.budget,
        rounds=before.rounds + after.rounds,
        drafted_tokens=before.drafted_tokens + after.drafted_tokens,
        accepted_tokens=before.accepted_tokens + after.accepted_tokens,
        acceptance_histogram=[a + b for a, b in rounds],
        fallback_rounds=before.fallback_rounds + after.fallback_rounds,
        stage_seconds={
            stage: before.stage_seconds[stage] + after.stage_seconds[stage] for stage in after.stage_seconds
        },
        cached_tokens=min(max(before.cached_tokens, after.cached_tokens), prompt_tokens),
        prefill_seconds=before.prefill_seconds + after.prefill_seconds,
        queue_seconds=before.queue_seconds + after.queue_seconds,
    )
