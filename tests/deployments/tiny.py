"""A tiny random target in fp32 and peers that run in this process, so that rounds can be tested by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from llguidance import LLTokenizer, TokenizerWrapper
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ddtree.deployments.budgets import Budgets
from ddtree.deployments.costs import Costs, StepCost
from ddtree.deployments.grammar import Grammars
from ddtree.deployments.overlap import Mode
from ddtree.deployments.requests import Budget, Delta, GenerationRequest, SamplingParams
from ddtree.deployments.round_loop import PeerLost, RoundLoop
from ddtree.deployments.scheduler import Limits, Scheduler
from ddtree.deployments.sequence import Sequence
from ddtree.drafter.checkpoint import save_published
from ddtree.drafter.config import DrafterConfig, Rope
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.kernels.tree import Allocate
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.pages import PageAllocator

VOCABULARY = 61
HORIZON = 5
TOP_K = 4
FEATURE_LAYERS = (0, 1)
MOST = 20  # nodes of a tree whose budget adapts


class Letters:
    """A vocabulary for grammars, in the form that llguidance takes. Ids that no text has are as padded embeddings leave them."""

    _pieces = (*'0123456789abcdef{}[]":, -trulsn', "ab", '"a', '": ', "tr", "ue", "12", "}}", "true", '{"')
    tokens = tuple(piece.encode() for piece in dict.fromkeys(_pieces))
    eos_token_id, bos_token_id = len(tokens), None
    special_token_ids = (eos_token_id,)
    tokens = (*tokens, b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        """The longest piece first, as llguidance asks where a grammar leaves no choice of letters."""
        ids = []
        while text:
            ids.append(max((t for t, piece in enumerate(self.tokens) if text.startswith(piece)), key=self._length))
            text = text[len(self.tokens[ids[-1]]) :]
        return ids

    def _length(self, token: int) -> int:
        return len(self.tokens[token])


EOS = Letters.eos_token_id
GRAMMARS = Grammars(lambda: LLTokenizer(TokenizerWrapper(Letters()), n_vocab=VOCABULARY, eos_token=[EOS]))


def make_target(folder: Path, hidden_size: int = 32, vocab_size: int = VOCABULARY) -> Path:
    """A Llama of three layers and four heads with random weights, spread enough for its output to vary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class LocalVerifier:
    """The real backend without Ray."""

    def __init__(self, target_dir: Path, pages: int = 64, page_size: int = 4) -> None:
        self.target = HFTarget(
            target_dir, dtype="float32", page_size=page_size, pages=pages, feature_layers=FEATURE_LAYERS, threads=1
        )
        self.page_size, self.pages = page_size, pages
        self.fail_next = False
        self.announced = 0  # batches

    def room(self) -> Allocate:
        """Batches are not copied: any memory will do, one of this process's as well as another."""
        return partial(torch.empty, dtype=torch.int32)

    def announce(self, batch: VerifyBatch) -> None:
        batch.tokens.fill_(-1)  # not written to yet
        self.target.prepare(batch)
        self.announced += 1

    def start(self, batch: VerifyBatch) -> None:
        self._batch = batch

    def result(self) -> tuple[VerifyResult, VerifyResult]:
        if self.fail_next:
            self.fail_next = False
            self.target.pool.k.fill_(torch.nan)  # a new group knows nothing of the old pool
            self.target.pool.v.fill_(torch.nan)
            raise PeerLost("killed by the test")
        result = self.target.step(self._batch)
        return result, result


class Guesser:
    """A drafter that is told the answers and errs at random; it also checks the context that it is fed.

    `answers` maps a sequence to its whole token list (prompt + answer).
    """

    def __init__(self, drafter_id: str, answers: dict[str, list[int]], seed: int, errs: float = 0.3) -> None:
        self.id = drafter_id
        self._answers, self._errs = answers, errs
        self._random = torch.Generator().manual_seed(seed)
        self.ends: dict[str, int] = {}  # sequence → position after its context
        self.features: dict[str, list[Tensor]] = {}
        self.ends_seen: list[int] = []
        self.dead = False

    def start(self, items: list[DraftItem], features: VerifyResult | None) -> None:
        if self.dead:
            raise PeerLost("dead")
        for item in items:
            if item.restart:
                self.ends.pop(item.sequence, None)
                self.features[item.sequence] = []
            for part in item.context:
                assert features is not None
                assert self.ends.get(item.sequence, part.position) == part.position, "a gap in the context"
                self.ends[item.sequence] = part.position + len(part.rows)
                self.ends_seen.append(self.ends[item.sequence])
                self.features[item.sequence].append(features.features[part.rows])
            if item.bonus is not None:
                assert self.ends[item.sequence] == item.position, "context must end before the bonus"
        self._items = [item for item in items if item.bonus is not None]

    def result(self) -> Candidates:
        if self.dead:
            raise PeerLost("dead")
        asked = [HORIZON if item.levels is None else item.levels for item in self._items]
        shape = (len(self._items), max(asked, default=HORIZON), TOP_K)
        ids = torch.empty(shape, dtype=torch.int32)
        for i, item in enumerate(self._items):
            truth = self._answers[item.sequence][item.position + 1 :]
            for depth in range(shape[1]):
                order = torch.randperm(VOCABULARY, generator=self._random)[:TOP_K]
                right = torch.rand((), generator=self._random) > self._errs
                if depth < len(truth) and right and truth[depth] not in order:
                    order[int(torch.randint(TOP_K, (), generator=self._random))] = truth[depth]
                ids[i, depth] = order
        logits = torch.randn(shape, generator=self._random)
        return Candidates(logits.log_softmax(-1).sort(-1, descending=True).values, ids)

    def release(self, sequences: list[str]) -> None:
        for sequence in sequences:
            self.ends.pop(sequence, None)


class Engine:
    """A round loop with its scheduler, and what it emitted."""

    def __init__(
        self,
        verifier: LocalVerifier,
        prefill_rows: int = 16,
        max_positions: int = 512,
        shared_noise: bool = True,
        overlap: Mode = "off",
        budgets: Budgets | None = None,
    ) -> None:
        pages = PageAllocator(verifier.pages - 1, verifier.page_size)
        limits = Limits(8, 100, prefill_rows, max_positions, HORIZON, rebuild_window=6)
        self.scheduler = Scheduler(pages, limits)
        self.loop = RoundLoop(self.scheduler, self._emit, shared_noise=shared_noise, overlap=overlap, budgets=budgets)
        self.loop.verifier = self._verifier = verifier
        self.output: dict[str, list[int]] = {}
        self.last: dict[str, Delta | Exception] = {}

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        for sequence, delta in outgoing:
            self.last[sequence.id] = delta
            if isinstance(delta, Delta):
                self.output.setdefault(sequence.id, []).extend(delta.token_ids)

    def add(self, request: GenerationRequest) -> Sequence:
        sequence = Sequence(request, 0.0)
        if request.grammar is not None:
            sequence.grammar = GRAMMARS.start(request.grammar, sequence.answer)
        self.scheduler.add(sequence)
        return sequence

    def run(self, between: Callable[[int], None] = lambda _: None, limit: int = 500) -> None:
        """Rounds until nothing is left; `between` is called before each."""
        for i in range(limit):
            between(i)
            try:
                if not self.loop.run() and not self.scheduler.waiting:
                    return
            except PeerLost:
                self.loop.verifier_lost()
        raise AssertionError("the requests do not end")

    def run_over_a_death(self, at: int) -> None:
        """The verifier dies before round `at`, unless nothing is left by then."""

        def between(i: int) -> None:
            self._verifier.fail_next = i == at

        self.run(between)
        self._verifier.fail_next = False

    def check_end(self, truth: dict[str, list[int]], cancelled: set[str]) -> None:
        """Every request got its own tokens, as far as it was not cancelled, and every page is free again."""
        for name, tokens in truth.items():
            got = self.output.get(name, [])
            if name in cancelled:
                assert got == tokens[: len(got)]
            else:
                assert got == tokens
                last = self.last[name]
                assert isinstance(last, Delta) and last.finish_reason == "length"
        assert self.scheduler.pages.free_pages == self.scheduler.pages.pages, "every page is free again"


class Whims(Costs):
    """Learns nothing and changes its mind: drafts cost next to nothing, then too much, rows whatever they like, and now it takes
    long to choose nodes after a draft, now before it."""

    def __init__(self, seed: int) -> None:
        super().__init__(rows=256, sequences=8)
        self._random, self._seconds, self._slow = np.random.default_rng(seed), 0.0, "before"

    def draft(self, sequences: int, levels: int) -> float:
        return self._seconds if sequences else 0.0

    def rest(self, kind: str, sequences: int) -> float:
        return 0.01 * (kind == self._slow)

    def observe(self, *_: object) -> None:
        self._slow = self._random.choice(["before", "after"])
        self.step, self._seconds = StepCost(256), self._random.choice([0.0, 0.001, 0.05])
        for rows in (1, 8, 64):
            self.step.rows.observe(rows, self._random.uniform(0.001, 0.03))
        self.step.per_attended = self._random.choice([0.0, 1e-4])


def plain(verifier: LocalVerifier, request: GenerationRequest) -> list[int]:
    """The request alone, without drafts."""
    engine = Engine(verifier)
    engine.add(GenerationRequest(**{**vars(request), "budget": 0, "adapts": False}))
    engine.run()
    return engine.output[request.request_id]


def request(
    name: str, prompt: list[int], max_tokens: int, budget: Budget, temperature: float = 0.0, **more: object
) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, seed=crc32(name.encode()), **more)  # type: ignore[arg-type]
    nodes, adapts = (MOST, True) if budget == "auto" else (budget, False)
    return GenerationRequest(name, tuple(prompt), max_tokens, (), sampling, nodes, adapts)


def make_drafter(folder: Path, hidden_size: int = 32) -> Path:
    """A DFlash drafter with random weights for `make_target`'s model."""
    torch.manual_seed(1)
    config = DrafterConfig(
        hidden_size=hidden_size, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=hidden_size // 4,
        vocab_size=VOCABULARY, num_target_layers=3, target_layer_ids=FEATURE_LAYERS, block_size=HORIZON + 1,
        mask_token_id=VOCABULARY - 1, max_positions=512, rope=Rope(theta=10000.0), rms_norm_eps=1e-5,
    )  # fmt: skip
    save_published(DFlashModel(config), folder, dtype=torch.float32)
    return folder
