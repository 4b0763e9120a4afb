"""The answers of the HTTP API, as OpenAI shapes them, and our figures. Knows no engine and no HTTP.

Models are dumped with `exclude_unset`: a field appears exactly where this package sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from ddtree.deployments.requests import Budget, RequestStats


class PromptDetails(BaseModel):
    cached_tokens: int  # whose KV rows were there already


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        details = PromptDetails(cached_tokens=cached)
        total = prompt + completion
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, prompt_tokens_details=details
        )


class Choice(BaseModel):
    """One choice of any of the four answers: `text` for completions, `message` or `delta` for chat."""

    index: int
    text: str | None = None
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # of completions
    ddtree: dict[str, Any] | None = None  # here when the request has several prompts, else at the top


class Tokens(BaseModel):
    """The answer to /tokenize."""

    count: int
    max_model_len: int  # prompt + answer
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The answer to /detokenize."""

    prompt: str


class SpeculativeDecoding(BaseModel):
    """Figures of one sequence under vLLM's names. Every decoding round counts, also one that had no draft."""

    mean_acceptance_length: float  # tokens gained a round, the bonus token included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [j]: rounds that accepted j draft tokens; one entry more than num_spec_tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the most that a round can accept

    @classmethod
    def of(cls, stats: RequestStats, horizon: int) -> SpeculativeDecoding:
        """`horizon`: deepest node of a tree."""
        counts, accepted = stats.acceptance_histogram, stats.accepted_tokens
        return cls(
            mean_acceptance_length=1 + (accepted / stats.rounds if stats.rounds else 0),
            draft_acceptance_rate=accepted / stats.drafted_tokens if stats.drafted_tokens else 0,
            acceptance_histogram=counts + [0] * (horizon + 1 - len(counts)),
            num_spec_steps=stats.rounds,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=stats.drafted_tokens,
            num_spec_tokens=horizon,
        )


class RequestMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class Answer(BaseModel):
    """A completion, a chat completion, or one chunk of either."""

    id: str
    object: str
    created: int  # Unix seconds
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # of chats
    metrics: RequestMetrics | None = (
        None  # as vLLM has them: where the server is set to give them, of a single sequence
    )
    ddtree: dict[str, Any] | None = None


def figures(stats: RequestStats | None, budget: Budget, token_ids: Sequence[int] | None) -> dict[str, Any]:
    """Return the `ddtree` object of an answer.

    Args:
        stats: of the engine; None when a stop string ended the request before the engine gave any.
        budget: of the request, in draft nodes per round, or "auto".
        token_ids: the delivered tokens, or None where the request did not ask for them.

    Returns:
        The fields of `RequestStats` (null without stats) and `acceptance_length`: tokens gained per round, the bonus
        token included; null without a round.
    """
    out: dict[str, Any] = dict.fromkeys(RequestStats.__dataclass_fields__) if stats is None else asdict(stats)
    out["budget"] = budget
    gained = stats.accepted_tokens + stats.rounds if stats else 0
    out["acceptance_length"] = gained / stats.rounds if stats and stats.rounds else None
    if token_ids is not None:
        out["token_ids"] = list(token_ids)
    return out
