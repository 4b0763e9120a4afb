"""The vLLM backend as a GPU serves it: bfloat16, attention by the CUDA kernels, CUDA graphs, INT4 experts.

Rows of different steps may differ by rounding here. So two tokens are the same where they are equal, or where the
target's own scores for both differ by less than rounding does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.kernels.noise import KeyedNoise
from ddtree.verifier.backends import load_target
from ddtree.verifier.graphs import StepSizes

from . import published_forms, tiny_models
from .conftest import Harness, Output, Piece
from .loops import plain, speculative
from .test_graphs import check_replay
from .test_hf import PROMPT, prompted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or not torch.cuda.is_available(),
    reason="needs a CUDA device and vLLM there: pip install vllm==0.26.0",
)
PAGE = 64
GRAPHS = StepSizes(sequences=4, rows=64, pages=8, words=2, path=6)
OPTIONS = {"dtype": "bfloat16", "device": "cuda", "page_size": PAGE, "feature_layers": (1, 0, 2), "threads": None}
RELATIVE = 0.05  # of a row's features or logits, by which bfloat16 may differ from float32
# Sizes that the kernels serve: heads of 64; latents of real size, experts of two blocks of INT4 weights. Every row takes
# all experts: a choice that rounding turned would make another row of it.
WIDE: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 128, "head_dim": 64},
    "deepseek_v3": {
        "hidden_size": 256, "moe_intermediate_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 48, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 1,
        "num_experts_per_tok": 8, "initializer_range": 0.1,
    },
}  # fmt: skip
WIDE["deepseek_v3_yarn"] = WIDE["deepseek_v3"]
KINDS = ("qwen3", "deepseek_v3", "int4", "kimi_k25")  # the last with INT4 experts and YaRN


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Directories of a kind's checkpoint and of the plain one that it stands for."""

    def make(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        if kind in WIDE:
            written = tiny_models.write(kind, folder, **WIDE[kind])
            return written, written
        source = "deepseek_v3_yarn" if kind == "kimi_k25" else "deepseek_v3"
        plain_dir = tiny_models.write(source, folder / "plain", **WIDE[source])
        published_forms.int4(plain_dir, folder / "int4", folder / "rounded")
        if kind == "kimi_k25":
            return published_forms.kimi_k25(folder / "int4", folder / "kimi"), folder / "rounded"
        return folder / "int4", folder / "rounded"

    return make


@pytest.fixture(scope="module", params=KINDS)
def h(request: pytest.FixtureRequest, checkpoint: Callable[[str], tuple[Path, Path]]) -> Harness:
    served, exact = checkpoint(request.param)
    target = load_target("vllm", str(served), pages=64, graphs=GRAPHS, **OPTIONS)
    return Harness(target, AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32).eval())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def same(h: Harness, before: list[int], a: int, b: int, sampling: dict[str, Any]) -> bool:
    """Whether both could be the token after `before`, as far as rounding goes."""
    if a == b:
        return True
    _, logits = h.oracle(before)
    scores, rounding = logits, RELATIVE * logits.norm() / len(logits) ** 0.5
    if temperature := sampling.get("temperature"):
        scores = logits / temperature + KeyedNoise(len(logits)).row(sampling["seed"], len(before))
        rounding = rounding / temperature
    return bool((scores[a] - scores[b]).abs() < 4 * rounding)


def check_rows(h: Harness, piece: Piece, before: list[int], output: Output) -> None:
    for node in range(len(piece.tokens)):
        features, logits = h.oracle(before + piece.path(node))
        for ours, theirs in zip(output.features[node].chunk(3), features.chunk(3), strict=True):
            assert distance(ours, theirs) < RELATIVE
        assert same(h, before + piece.path(node), output.y[node], int(logits.argmax()), {})


def test_rows_equal_those_of_transformers(h: Harness) -> None:
    sequence = h.sequence(64)
    prompt = Piece(sequence, PROMPT)
    [output] = h.step(prompt)
    check_rows(h, prompt, [], output)
    tree = h.random_tree(sequence, 50, 40, torch.Generator().manual_seed(1))
    [output] = h.step(tree)
    check_rows(h, tree, PROMPT, output)
    h.release(sequence)


def test_tree_nodes_equal_causal_steps_over_their_paths(h: Harness) -> None:
    sequence = prompted(h, PROMPT).sequence
    tree = h.random_tree(sequence, 50, 12, torch.Generator().manual_seed(3))
    [output] = h.step(tree)
    for node in range(len(tree.tokens)):
        path = Piece(h.sequence(64), PROMPT + tree.path(node))
        [alone] = h.step(path)
        assert distance(output.features[node], alone.features[-1]) < RELATIVE
        assert same(h, path.tokens, output.y[node], alone.y[-1], {})
        h.release(path.sequence)
    wrong = Piece(sequence, tree.tokens)
    ignoring = h.step(wrong)[0].features[-1]
    assert distance(ignoring, output.features[-1]) > 4 * RELATIVE, "who ignores the tree must show"
    h.release(sequence)


@torch.inference_mode()
def test_a_replayed_graph_equals_the_forward(h: Harness) -> None:
    check_replay(h)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
def test_speculative_decoding_equals_plain_decoding(h: Harness, sampling: dict[str, Any]) -> None:
    expected = plain(h, PROMPT, 32, **sampling)
    tokens, rounds = speculative(h, PROMPT, 32, expected, torch.Generator().manual_seed(2), **sampling)
    differing = [i for i in range(32) if tokens[i] != expected[i]]
    if differing:  # what comes after the first is another text
        i = differing[0]
        assert same(h, PROMPT + expected[:i], tokens[i], expected[i], sampling)
    assert differing or rounds < 24


def test_tokens_are_those_of_the_hf_backend(checkpoint: Callable[[str], tuple[Path, Path]]) -> None:
    folder, _ = checkpoint("qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, theirs = (
        Harness(load_target(backend, str(folder), pages=64, graphs=GRAPHS, **OPTIONS), model)
        for backend in ("vllm", "hf")
    )
    for sampling in ({}, {"temperature": 0.9, "seed": 11}):
        a, b = (plain(x, PROMPT, 32, **sampling) for x in (ours, theirs))
        differing = [i for i in range(32) if a[i] != b[i]]
        assert not differing or same(ours, PROMPT + a[: differing[0]], a[differing[0]], b[differing[0]], sampling)
