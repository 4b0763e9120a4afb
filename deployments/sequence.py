"""One running request as the router sees it. Owned by the scheduler and the round loop. Knows token ids, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ddtree.deployments.grammar import GrammarState
from ddtree.deployments.requests import GenerationRequest, RequestStats, TokenLogprobs

PATIENCE = 4.0  # tokens that count for a forecast when it is held against what was accepted


class Accepted(NamedTuple):  # a tuple: made for every sequence of every round
    """Where the KV rows of an accepted path lie: node i of the tree at slot `base` + i."""

    base: int  # committed KV rows before the path
    path: list[int]  # node indices, 0 first


@dataclass
class Record:
    """How the drafts of a sequence do. Kept by `Budgets`."""

    expected: float = 0.0  # tokens accepted by the forecast, and really; early rounds count less and less
    accepted: float = 0.0
    pays: float = 2.0  # seconds that its drafts save by those that they take, averaged; begins in its favour
    failures: int = 0  # so many times they did not pay
    rest: int = 0  # rounds until they are tried again
    planned: int | None = None  # nodes of its next tree, where that is said before the draft

    @property
    def luck(self) -> float:
        """Times the forecast that is accepted."""
        return (self.accepted + PATIENCE) / (self.expected + PATIENCE)


@dataclass(eq=False)
class Sequence:
    """`tokens[:computed]` have their KV rows in the pool; the rest is pending. A sequence with one pending token decodes:
    that token is the root of its tree. One with more is in prefill."""

    request: GenerationRequest
    arrival: float  # seconds, monotonic
    tokens: list[int] = field(default_factory=list)  # prompt + committed
    computed: int = 0
    stored: int = (
        0  # rows below this are in the pool for good: where they are computed again they are not written again
    )
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of its full pages, as far as they were needed
    awaited: bytes | None = None  # the last page that it wants of those that another sequence is about to compute
    kept: int = 0  # so many of its pages are complete and offered to others
    nodes: int = 0  # of its next draft tree besides the root, at most
    levels: int | None = None  # depths that its drafts are to have; None: all
    wants_drafter: bool = False
    record: Record | None = None  # of a request whose budget adapts
    drafter: str | None = None  # who holds its context
    context: int = 0  # positions below this are in the drafter's context, or with `features` on their way
    restart: bool = True  # the drafter must drop what it holds of this sequence first
    accepted: Accepted | None = None  # last round's path, to be compacted before the next step
    started: float | None = None  # when its first step began
    delivered: float | None = None  # when a round last brought tokens of it
    stats: RequestStats = field(default_factory=RequestStats)
    unsent: list[int] = field(default_factory=list)  # generated, in no delta yet
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of these
    scored: int = 0  # so many prompt tokens after the first have their log-probabilities, where they are wanted
    unsent_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of these, until the first delta
    cancelled: bool = False
    flying: bool = False  # its rows are in a step whose result is awaited: neither they nor its pages may change
    planned: int = 0  # number of the last step that it was planned for
    grammar: GrammarState | None = None  # after its answer so far; whoever makes the sequence starts it
    counts: dict[int, int] | None = None  # of its tokens: how often the answer has them; None: no penalty asks

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        if self.request.sampling.edits and self.request.sampling.edits.penalizes:
            self.counts = dict.fromkeys(self.tokens[: self.answer_begin], 0)
            self._count(self.answer)
        self.stats.budget, self.nodes = self.request.asked_budget, self.request.budget
        self.wants_drafter = self.request.budget > 0

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        tokens = len(self.tokens)  # asked several times a round: no other property
        return tokens - self.computed == 1 and tokens > len(self.request.prompt_ids)

    @property
    def accepts(self) -> float:
        """Draft tokens of it that a round accepted so far, on average."""
        return self.stats.accepted_tokens / max(1, self.stats.rounds)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def answer_begin(self) -> int:
        """Position of the answer's first token, whichever router has made it."""
        return len(self.request.prompt_ids) - self.request.resumed

    @property
    def answer(self) -> list[int]:
        """Its tokens so far, whichever router has made them."""
        return self.tokens[self.answer_begin :]

    @property
    def final(self) -> int:
        """Rows that no later step moves: an accepted path is compacted in the step after its own."""
        return self.accepted.base if self.accepted else self.computed

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - self.generated

    def unscored(self, rows: int) -> range:
        """Positions of the next `rows` that a prompt token follows whose log-probabilities are not there yet."""
        end = min(self.computed + rows, len(self.request.prompt_ids) - 1)
        return range(max(self.computed, self.scored), end)

    def take_prompt_logprobs(self, found: list[TokenLogprobs]) -> None:
        """Those of the prompt tokens that follow the positions of `unscored`."""
        self.scored += len(found)
        self.unsent_prompt_logprobs += found

    @property
    def shareable(self) -> int:
        """So many of its first rows may be others' that were kept: below them nothing is to be learned but KV."""
        return len(self.tokens) - 1 if self.request.prompt_logprobs is None else self.scored

    def restart_prefill(self) -> None:
        """Its KV rows are gone: compute everything again from the tokens, and feed its drafter anew."""
        self.computed, self.stored, self.kept, self.accepted = 0, 0, 0, None
        self.context, self.restart = 0, True

    def forget_drafter(self) -> None:
        """Go on without a draft; the next drafter starts from nothing."""
        self.drafter, self.context, self.restart = None, 0, True

    def append(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs] = ()) -> tuple[list[int], str | None]:
        """Take the tokens of one round up to where the request ends. Returns those taken and why it ends, if it does."""
        left, stops = self.remaining, self.request.stop_token_ids
        taken = token_ids[:left]
        reason = "length" if len(taken) == left else None
        for token in taken:
            if token in stops:
                taken, reason = taken[: taken.index(token) + 1], "stop"
                break
        self._count(taken)
        self.tokens += taken
        self.unsent += taken
        self.unsent_logprobs += islice(logprobs, len(taken))
        return taken, reason

    def _count(self, answer: list[int]) -> None:
        if self.counts is not None:
            for token in answer:
                self.counts[token] = self.counts.get(token, 0) + 1
