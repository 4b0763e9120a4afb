"""Fixtures of the verifier tests: small random targets, the embedded one, and a harness that keeps their sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from ddtree.kernels import AcceptedPath, DraftTree, Rows, tree_build
from ddtree.verifier.batch import Commit, SamplingRows, VerifyBatch
from ddtree.verifier.embedded import prepare
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.pages import PageAllocator

PAGE = 4
I32 = torch.int32


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Sequence:
    """One sequence in the pool: the tokens whose K/V are committed, and where they lie."""

    pages: list[int]
    tokens: list[int] = field(default_factory=list)


@dataclass
class Piece:
    """What one sequence puts into a step: a prompt chunk, or a tree whose root is its newest token."""

    sequence: Sequence
    tokens: list[int]
    tree: DraftTree | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def parents(self) -> list[int]:
        return list(range(-1, len(self.tokens) - 1)) if self.tree is None else self.tree.parent[0].tolist()

    def path(self, node: int) -> list[int]:
        """Tokens from the piece's first row down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


@dataclass
class Output:
    """What one piece got out of a step."""

    y: list[int]  # per row
    features: Tensor  # [rows, F]


class Harness:
    """Drives a target as a router would, with all the bookkeeping in plain Python."""

    def __init__(self, target: HFTarget, model: PreTrainedModel | None) -> None:
        self.target = target
        self.model = model  # the same weights in transformers' own hands: the oracle
        self.trash = target.pool.pages - 1  # as in a deployment, the last page belongs to no sequence
        self.pages = PageAllocator(self.trash, target.pool.page_size)

    def sequence(self, capacity: int) -> Sequence:
        return Sequence(self.pages.allocate(self.pages.pages_for(capacity)))

    def release(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.pages.free(sequence.pages)

    def step(self, *pieces: Piece, commit: Commit | None = None, padding: int = 0) -> list[Output]:
        """One step of all pieces, every row wanted. `padding` rows are added to each piece, with garbage in them."""
        result = self.target.step(self.batch(*pieces, commit=commit, padding=padding))
        assert torch.equal(result.y.cpu(), result.drawn)
        outputs, begin, drawn = [], 0, 0
        for piece in pieces:
            n = len(piece.tokens)
            outputs.append(
                Output(result.y[drawn : drawn + n].tolist(), result.features[begin : begin + n].float().cpu())
            )
            begin, drawn = begin + n + padding, drawn + n
            if piece.tree is None:
                piece.sequence.tokens += piece.tokens
        return outputs

    def batch(self, *pieces: Piece, commit: Commit | None = None, padding: int = 0) -> VerifyBatch:
        size, width = self.target.pool.page_size, max(-(-len(p.tokens) // 32) for p in pieces)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        offsets, wanted, ancestors = [0], [], []
        for piece in pieces:
            committed = len(piece.sequence.tokens)
            for i, token in enumerate(piece.tokens):
                slot = committed + i
                wanted.append(len(tokens))
                tokens.append(token)
                positions.append(committed + len(piece.path(i)) - 1)
                slots.append(piece.sequence.pages[slot // size] * size + slot % size)
            for i in range(padding):
                tokens.append(1)
                positions.append(3)
                slots.append(self.trash * size + i % size)
            words = torch.zeros(len(piece.tokens) + padding, width, dtype=I32)
            if piece.tree is not None:
                own = piece.tree.ancestors[0]
                words[: own.shape[0], : own.shape[1]] = own
            ancestors.append(words)
            offsets.append(len(tokens))
        rows = Rows(
            row_offsets=torch.tensor(offsets, dtype=I32),
            q_len=torch.tensor([len(p.tokens) for p in pieces], dtype=I32),
            seq_len=torch.tensor([len(p.sequence.tokens) for p in pieces], dtype=I32),
            page_table=self.page_table([p.sequence for p in pieces]),
            page_size=size,
            causal=torch.tensor([p.tree is None for p in pieces]),
            ancestors=torch.cat(ancestors),
        )
        each = [p for p in pieces for _ in p.tokens]
        sampling = SamplingRows(
            row=torch.tensor(wanted, dtype=I32),
            temperature=torch.tensor([p.temperature for p in each]),
            top_p=torch.tensor([p.top_p for p in each]),
            top_k=torch.tensor([p.top_k for p in each], dtype=I32),
            seed=torch.tensor([p.seed for p in each], dtype=torch.int64),
        )
        return VerifyBatch(
            torch.tensor(tokens, dtype=I32),
            torch.tensor(positions, dtype=I32),
            torch.tensor(slots, dtype=torch.int64),
            rows,
            sampling,
            commit,
        )

    def page_table(self, sequences: list[Sequence]) -> Tensor:
        """Rows padded with a page number that does not exist: nobody may follow it."""
        width = max(len(s.pages) for s in sequences) + 1
        return torch.tensor([s.pages + [2**31 - 1] * (width - len(s.pages)) for s in sequences], dtype=I32)

    def commit(self, pieces: list[Piece], accepted: AcceptedPath) -> Commit:
        """The commit of one path per piece, and the sequences' tokens with it."""
        sequences = [p.sequence for p in pieces]
        lengths = torch.tensor([len(s.tokens) for s in sequences], dtype=I32)
        for i, piece in enumerate(pieces):
            path = accepted.path[i, : int(accepted.n_accepted[i])].tolist()
            piece.sequence.tokens += [piece.tokens[node] for node in path]
        return Commit(self.page_table(sequences), lengths, accepted.path, accepted.n_accepted)

    def random_tree(self, sequence: Sequence, root: int, budget: int, generator: torch.Generator) -> Piece:
        """A tree over random marginals: 4 slots of 5 candidates."""
        vocab_size = self.target.info.vocab_size
        ids = torch.stack([torch.randperm(vocab_size, generator=generator)[:5] for _ in range(4)])[None]
        logprobs = torch.randn(1, 4, 8, generator=generator).log_softmax(-1)[..., :5].sort(descending=True).values
        tree = tree_build(
            logprobs,
            ids.int(),
            torch.tensor([root], dtype=I32),
            torch.tensor([len(sequence.tokens)], dtype=I32),
            torch.tensor([budget], dtype=I32),
            max_budget=budget,
        )
        return Piece(sequence, tree.tokens[0].tolist(), tree)

    @torch.inference_mode()
    def oracle(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Features [F] and logits [V] that a plain causal forward over `tokens` has at the last of them."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        wanted = [out.hidden_states[i + 1][0, -1] for i in self.target.feature_layers]
        return torch.cat(wanted), out.logits[0, -1]

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """[…, V] from features whose last layer is the target's last."""
        return self.model.get_output_embeddings()(features[..., -self.target.info.hidden_size :])

    def check_rows(self, piece: Piece, before: list[int], output: Output, atol: float) -> None:
        """Every row of a piece has the features, logits and greedy token of a causal forward over its path."""
        for node in range(len(piece.tokens)):
            features, logits = self.oracle(before + piece.path(node))
            torch.testing.assert_close(output.features[node], features, atol=atol, rtol=1e-5)
            torch.testing.assert_close(self.logits(output.features[node]), logits, atol=atol, rtol=1e-5)
            best = logits.topk(2).values
            assert output.y[node] == int(logits.argmax()) or best[0] - best[1] < 2 * atol


def harness(
    model_dir: Path, feature_layers: tuple[int, ...], pages: int, dtype: str = "float32", device: str = "cpu"
) -> Harness:
    target = HFTarget(model_dir, dtype=dtype, device=device, page_size=PAGE, pages=pages, feature_layers=feature_layers)
    return Harness(target, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2, "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny random model of the given type; initial weights large enough for its logits to differ."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(7)
            made[kind] = tmp_path_factory.mktemp(kind)
            AutoModelForCausalLM.from_config(TINY[kind]()).save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As `tiny_dir`, with heads of a size that the CUDA kernels serve."""

    def make(kind: str) -> Path:
        torch.manual_seed(7)
        config = TINY[kind]()
        config.head_dim = 64
        folder = tmp_path_factory.mktemp(f"wide-{kind}")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


ON_DEVICES = [(kind, device) for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()] for kind in TINY]


@pytest.fixture(scope="session", params=ON_DEVICES, ids="-".join)
def tiny(request: pytest.FixtureRequest, tiny_dir: Callable[[str], Path]) -> Harness:
    """In float32, on a CPU and where there is one on a GPU: attention is then the reference's."""
    kind, device = request.param
    return harness(tiny_dir(kind), feature_layers=(0, 2), pages=96, device=device)


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """The embedded model, in the cache where the program itself would put it."""
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm(smollm_dir: Path) -> Harness:
    return harness(smollm_dir, feature_layers=(1, 14, 29), pages=128)
