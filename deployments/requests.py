"""What travels between ingress and router: token ids in, token deltas out. Knows no text, no HTTP and no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Budget = int | Literal["auto"]  # draft nodes per round; auto: as many as pay
STAGES = ("draft", "build", "verify", "accept", "commit")
MAX_LOGIT_BIAS = 1024  # tokens; all of them travel in every round
MAX_LOGPROBS = 20  # most probable tokens beside each


@dataclass(frozen=True)
class EditParams:
    """What changes the target's logits before anything else, by what the request has so far. As in vLLM."""

    presence_penalty: float = 0.0  # 0 is off
    frequency_penalty: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, none of them twice, and what is added
    min_tokens: int = 0  # no stop token before so many
    ignored_stops: tuple[int, ...] = ()  # nor any of these, although they stop nothing: EOS with `ignore_eos`

    @property
    def penalizes(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True)
class SamplingParams:
    """How the target draws. Written by the ingress, read by the verifier through the router."""

    temperature: float = 0.0  # below 1e-5 is greedy
    top_p: float = 1.0  # 1 is off, 0 is greedy
    top_k: int = 0  # 0 is off
    seed: int = 0  # 64 bit; the ingress draws one where the client gives none
    min_p: float = 0.0  # 0 is off
    edits: EditParams | None = None  # None: none

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn (verifier/sampling.py)."""
        return self.temperature < 1e-5 or self.top_p <= 0 or self.top_k == 1


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate. Written by the ingress."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one token
    max_tokens: int  # at least 1; the ingress has checked prompt + max_tokens against the context
    stop_token_ids: tuple[int, ...] = ()  # generation ends with (and includes) the first of these
    sampling: SamplingParams = SamplingParams()
    budget: int = 0  # draft nodes per round; 0 is plain decoding
    adapts: bool = False  # `budget` is the most: how many pay is the router's to say (budgets.py)
    resumed: int = 0  # so many of the last prompt ids are answer, which another router has delivered
    prefix_cache: bool = True  # take over KV rows that other requests left
    logprobs: int | None = None  # log-probabilities of the answer's tokens, and of so many others at each; None: none
    prompt_logprobs: int | None = None  # likewise of the prompt's, but for its first
    target: str = ""  # what is to answer, as `TargetConfig.key` names it; a router of another target refuses
    every_round: bool = (
        True  # False: one delta at the end. A delta a round costs the machine a few ms; do not ask in vain
    )
    grammar: str | None = None  # what the answer must be, in llguidance's own form; None: anything
    tells_rounds: bool = False  # deltas have their round, which copies its tree to the host; with `every_round`

    @property
    def asked_budget(self) -> Budget:
        return "auto" if self.adapts else self.budget


@dataclass
class RequestStats:
    """Speculation figures of one request so far. Written by the router."""

    budget: Budget = 0
    rounds: int = 0  # verify steps that decoded (prefill is not one)
    drafted_tokens: int = 0  # nodes besides the root
    accepted_tokens: int = 0  # draft tokens committed
    acceptance_histogram: list[int] = field(default_factory=list)  # [i]: rounds that accepted i draft tokens
    fallback_rounds: int = 0  # rounds with budget > 0 that had no draft
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    cached_tokens: int = 0  # prompt tokens whose KV rows another request had left
    prefill_seconds: float = 0.0
    queue_seconds: float = 0.0

    def copy(self) -> RequestStats:
        """As they are now: the next round writes on."""
        histogram, seconds = list(self.acceptance_histogram), dict(self.stage_seconds)
        return replace(self, acceptance_histogram=histogram, stage_seconds=seconds)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the target's own logits say of one token: their log-softmax, before edits and temperature."""

    logprob: float  # of the token itself
    rank: int  # among all tokens, from 1
    top: tuple[tuple[int, float], ...]  # the most probable tokens and theirs, the best first


@dataclass(frozen=True)
class VerifiedRound:
    """One round of a sequence as it was verified. Written by the router.

    Nodes are those of `DraftTree`: the root first, parents before their children. A round without a draft has the root alone,
    one that ends a prompt no node at all. Its tokens are those of the accepted nodes, then the bonus token.
    """

    budget: int  # nodes besides the root that it was given
    tokens: tuple[int, ...]  # by node
    parents: tuple[int, ...]  # by node; -1 for the root
    scores: tuple[float, ...]  # by node: sum of the path's log-probs, as the tree was ranked; 0 for the root
    accepted: tuple[int, ...]  # nodes below the root, in order, as far as the answer has them
    bonus: int | None  # the target's own token after these; None where the answer ends before it
    seconds: dict[str, float]  # by stage, of the whole batch

    def within(self, tokens: int) -> VerifiedRound:
        """Where the answer has so many of its tokens."""
        if tokens > len(self.accepted):
            return self
        return replace(self, accepted=self.accepted[:tokens], bonus=None)


@dataclass(frozen=True)
class Delta:
    """New tokens, of one round or more. The last one of a request has a `finish_reason`."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop" (a stop token) or "length"
    stats: RequestStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of every token, where the request asks for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # beside the first token: of every prompt token but the first
    round: VerifiedRound | None = None  # where the request asks for it

    def then(self, later: Delta) -> Delta:
        """Both as one."""
        return Delta(
            self.token_ids + later.token_ids,
            later.finish_reason,
            later.stats or self.stats,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            self.round or later.round,  # one of both at most has one
        )


class Cancelled(Exception):
    """The request was ended from outside; nobody waits for its tokens."""
