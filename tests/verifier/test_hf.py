"""The transformers backend against plain causal forwards of the same model: one row, one truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ddtree.kernels import AcceptedPath
from ddtree.kernels.packed_linear import can_pack
from ddtree.verifier.hf import HFTarget

from .conftest import PAGE, Harness, Piece, harness

needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="oneDNN does not compute in bfloat16 on this CPU"
)
PROMPT = [11, 45, 3, 60, 22, 9, 17, 33, 41]


def prompted(h: Harness, prompt: list[int], capacity: int = 64) -> Piece:
    piece = Piece(h.sequence(capacity), prompt)
    h.step(piece)
    return piece


@pytest.mark.parametrize("seed", range(4))
def test_tree_nodes_equal_causal_forwards_over_their_paths(tiny: Harness, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequence = prompted(tiny, PROMPT).sequence
    tree = tiny.random_tree(sequence, root=50 + seed, budget=(1, 7, 16, 40)[seed], generator=generator)
    [output] = tiny.step(tree)
    tiny.check_rows(tree, PROMPT, output, atol=5e-5)
    tiny.release(sequence)


def test_tree_nodes_equal_causal_forwards_on_the_embedded_model(smollm: Harness) -> None:
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365]
    sequence = prompted(smollm, prompt).sequence
    tree = smollm.random_tree(sequence, root=3891, budget=9, generator=torch.Generator().manual_seed(1))
    [output] = smollm.step(tree)
    smollm.check_rows(tree, prompt, output, atol=5e-4)  # hidden states of this model reach into the thousands
    smollm.release(sequence)


def test_a_mixed_batch_gives_each_piece_what_it_gets_alone(tiny: Harness) -> None:
    generator = torch.Generator().manual_seed(3)

    def pieces() -> list[Piece]:
        generator.manual_seed(3)
        a, b, c = prompted(tiny, PROMPT), prompted(tiny, PROMPT[:3]), prompted(tiny, PROMPT[4:])
        return [
            tiny.random_tree(a.sequence, 5, 12, generator),
            Piece(tiny.sequence(32), PROMPT[::-1]),
            tiny.random_tree(b.sequence, 6, 3, generator),
            Piece(c.sequence, [8, 9, 10, 11]),
        ]

    together = pieces()
    outputs = tiny.step(*together, padding=3)
    tiny.release(*(piece.sequence for piece in together))
    alone = pieces()
    for piece, output in zip(alone, outputs, strict=True):
        [expected] = tiny.step(piece)
        torch.testing.assert_close(output.features, expected.features, atol=5e-5, rtol=0)
        assert output.y == expected.y
    tiny.release(*(piece.sequence for piece in alone))


@needs_bfloat16
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "smollm2"])
def test_batch_invariant_bfloat16_has_the_same_bits_in_trees_chunks_and_alone(
    kind: str, tiny_dir: Callable[[str], Path], smollm_dir: Path
) -> None:
    model_dir = smollm_dir if kind == "smollm2" else tiny_dir(kind)
    target = HFTarget(
        model_dir, dtype="bfloat16", page_size=PAGE, pages=256, feature_layers=(1, 2), batch_invariant=True
    )
    h, prompt = Harness(target, None), PROMPT * 6
    generator = torch.Generator().manual_seed(2)
    tree = h.random_tree(prompted(h, prompt, 100).sequence, root=50, budget=19, generator=generator)
    [output] = h.step(tree, Piece(h.sequence(16), PROMPT))[:1]
    for node in range(len(tree.tokens)):
        sequence = prompted(h, prompt[:-node], 100).sequence if node else h.sequence(100)
        tokens = [*prompt[len(sequence.tokens) :], *tree.path(node)]
        rows = (
            [h.step(Piece(sequence, [token]))[0] for token in tokens] if node % 2 else h.step(Piece(sequence, tokens))
        )
        assert torch.equal(rows[-1].features[-1], output.features[node]) and rows[-1].y[-1] == output.y[node]
        h.release(sequence)


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9, [3, 1, 5]])
def test_a_prompt_in_chunks_equals_the_whole_prompt(tiny: Harness, chunks: list[int]) -> None:
    sequence, begin = tiny.sequence(16), 0
    for n in chunks:
        piece = Piece(sequence, PROMPT[begin : begin + n])
        [output] = tiny.step(piece)
        tiny.check_rows(piece, PROMPT[:begin], output, atol=5e-5)
        begin += n
    tiny.release(sequence)


@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_accepted_paths_leave_the_cache_of_a_causal_forward(tiny: Harness, seed: int) -> None:
    """Two sequences, six rounds: random trees, random accepted paths, each committed by the step after."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [prompted(tiny, PROMPT).sequence, prompted(tiny, PROMPT[2:]).sequence]
    commit = None
    for _ in range(6):
        before = [list(s.tokens) for s in sequences]
        trees = [tiny.random_tree(s, int(torch.randint(97, (), generator=generator)), 10, generator) for s in sequences]
        outputs = tiny.step(*trees, commit=commit)
        for tree, tokens, output in zip(trees, before, outputs, strict=True):
            tiny.check_rows(tree, tokens, output, atol=5e-5)
        commit = tiny.commit(trees, random_paths(trees, generator))
    tiny.release(*sequences)


def random_paths(trees: list[Piece], generator: torch.Generator) -> AcceptedPath:
    """From the root of each tree down to a random node."""
    paths = torch.full((len(trees), 6), -1, dtype=torch.int32)
    for i, tree in enumerate(trees):
        node = int(torch.randint(len(tree.tokens), (), generator=generator))
        path = [node]
        while (node := tree.parents[node]) >= 0:
            path.append(node)
        paths[i, : len(path)] = torch.tensor(path[::-1])
    length = (paths >= 0).sum(-1).int()
    return AcceptedPath(paths, length, torch.zeros(len(trees), dtype=torch.int32))


def test_what_lies_in_slots_of_nobody_does_not_matter(tiny: Harness) -> None:
    sequence = prompted(tiny, PROMPT, capacity=24).sequence
    tree = tiny.random_tree(sequence, 5, 8, torch.Generator().manual_seed(9))
    [clean] = tiny.step(tree)
    nobodys = torch.ones(tiny.target.pool.pages * PAGE, dtype=torch.bool)
    for i in range(len(sequence.tokens)):
        nobodys[sequence.pages[i // PAGE] * PAGE + i % PAGE] = False
    for cache, garbage in ((tiny.target.pool.k, 1e30), (tiny.target.pool.v, float("nan"))):
        cache.flatten(1, 2)[:, nobodys] = garbage
    [output] = tiny.step(tree)
    for cache in (tiny.target.pool.k, tiny.target.pool.v):
        cache.zero_()
    assert torch.equal(output.features, clean.features) and output.y == clean.y
    tiny.release(sequence)


def test_a_step_writes_its_own_slots_only(tiny: Harness) -> None:
    sequence = tiny.sequence(3 * PAGE)
    for cache in (tiny.target.pool.k, tiny.target.pool.v):
        cache.zero_()
    tiny.step(Piece(sequence, PROMPT[:5]))
    for cache in (tiny.target.pool.k, tiny.target.pool.v):
        changed = cache.flatten(3).any(-1).any(0)  # [pages, page]
        assert changed.nonzero().tolist() == sorted([sequence.pages[i // PAGE], i % PAGE] for i in range(5))
    tiny.release(sequence)


def test_a_step_with_no_wanted_rows_draws_nothing_and_times_both_stages(tiny: Harness) -> None:
    sequence = tiny.sequence(16)
    batch = tiny.batch(Piece(sequence, PROMPT))
    none = type(batch.sampling)(**{k: v if v is None else v[:0] for k, v in vars(batch.sampling).items()})
    result = tiny.target.step(type(batch)(**{**vars(batch), "sampling": none}))
    assert result.y.shape == (0,) and result.y.dtype == torch.int32
    assert result.features.shape == (len(PROMPT), tiny.target.feature_size)
    assert result.commit_seconds >= 0
    tiny.release(sequence)


def test_a_row_that_is_not_finite_is_marked_and_spoils_no_other_sequence(tiny_dir: Callable[[str], Path]) -> None:
    h = harness(tiny_dir("llama"), feature_layers=(2,), pages=16)
    weight = h.target._model.get_input_embeddings().weight
    with torch.no_grad():
        weight[5] = float("nan")
    a, b = Piece(h.sequence(16), [7, 8, 5, 9]), Piece(h.sequence(16), [7, 8, 9])
    bad, good = h.step(a, b)
    assert bad.y[2:] == [-1, -1]
    h.check_rows(b, [], good, atol=5e-5)


def test_bfloat16_stays_near_float32(tiny_dir: Callable[[str], Path]) -> None:
    h, half = (harness(tiny_dir("llama"), feature_layers=(0, 2), pages=16, dtype=d) for d in ("float32", "bfloat16"))
    exact, rounded = (x.step(Piece(x.sequence(16), PROMPT))[0].features for x in (h, half))
    assert half.target.pool.k.dtype == torch.bfloat16
    assert (exact - rounded).norm() < 0.02 * exact.norm()


def test_errors_name_what_is_wrong(tiny_dir: Callable[[str], Path], tiny: Harness) -> None:
    with pytest.raises(ValueError, match=r"feature layers \[3, 9\] do not exist; .* layers 0 to 2"):
        harness(tiny_dir("llama"), feature_layers=(0, 3, 9), pages=4)
    sequence = tiny.sequence(16)
    batch = tiny.batch(Piece(sequence, PROMPT))
    with pytest.raises(ValueError, match="differ in length"):
        tiny.target.step(type(batch)(**{**vars(batch), "positions": batch.positions[1:]}))
    tiny.release(sequence)


CHATS = ["What is the capital of France?", "Write a haiku about rain.", "Count from one to ten."]


@pytest.mark.parametrize("text", CHATS)
def test_plain_generation_equals_transformers(smollm: Harness, smollm_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
    expected = smollm.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=32)[0, len(prompt) :]
    sequence = smollm.sequence(len(prompt) + 33)
    [output] = smollm.step(Piece(sequence, prompt))
    tokens = [output.y[-1]]
    while len(tokens) < 32 and tokens[-1] not in smollm.target.info.eos_token_ids:
        [output] = smollm.step(Piece(sequence, tokens[-1:]))
        tokens += output.y
    assert tokens == expected.tolist()
    smollm.release(sequence)
