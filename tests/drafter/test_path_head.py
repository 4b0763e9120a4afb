"""The path head against its formula, token by token, and in drafters whose contexts grow or are paged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import PATH_KINDS, DrafterConfig, DrafterInfo
from ddtree.drafter.drafter import Drafter, DraftItem, FeatureSlice
from ddtree.drafter.items import Candidates
from ddtree.drafter.path_head import PathHead

VOCAB, WIDTH, RANK = 97, 32, 6


def random_tensors(kind: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (VOCAB, RANK)}
    if kind == "bilinear":
        shapes["gate.weight"] = RANK, WIDTH
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, WIDTH + RANK), "gate_proj.bias": (RANK,)}
    if kind == "mlp":
        shapes |= {"mlp.up.weight": (9, WIDTH + RANK), "mlp.up.bias": (9,), "mlp.down.weight": (RANK, 9)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def head_of(tensors: dict[str, Tensor]) -> PathHead:
    return PathHead(tensors, vocab_size=VOCAB, hidden_size=WIDTH)


def correction(tensors: dict[str, Tensor], hidden: Tensor, before: int) -> Tensor:
    """[V] what is added to the logits of a slot: `MarkovHead.block_bias` of speculators 0.9.0, and the forms that are our own."""
    own = tensors["markov_w1.weight"][before]
    if "gate.weight" in tensors:
        own = own * (tensors["gate.weight"] @ hidden)
    if "gate_proj.weight" in tensors:
        own = own * torch.sigmoid(tensors["gate_proj.weight"] @ torch.cat([hidden, own]) + tensors["gate_proj.bias"])
    if "mlp.up.weight" in tensors:
        inner = tensors["mlp.up.weight"] @ torch.cat([hidden, own]) + tensors["mlp.up.bias"]
        own = tensors["mlp.down.weight"] @ (inner * torch.sigmoid(inner))
    return tensors["markov_w2.weight"] @ own


@pytest.mark.parametrize("kind", PATH_KINDS)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 7, VOCAB]))
def test_every_candidate_is_scored_after_every_parent(kind: str, seed: int, batch: int, levels: int, k: int) -> None:
    torch.manual_seed(seed)
    tensors = random_tensors(kind, seed)
    hidden, logits = torch.randn(batch, levels, WIDTH), torch.randn(batch, levels, VOCAB)
    bonus = torch.randint(VOCAB, (batch,))
    logprobs, ids = logits.log_softmax(-1).topk(k)
    got = head_of(tensors).given_the_path(Candidates(logprobs.clone(), ids.int()), hidden, bonus)
    assert got.conditional is not None and got.conditional.shape == (batch, levels - 1, k, k)
    assert torch.equal(got.ids, ids.int()) and torch.equal(got.logprobs[:, 1:], logprobs[:, 1:])
    for b in range(batch):
        for level in range(levels):
            for i in range(k if level else 1):
                before = int(ids[b, level - 1, i]) if level else int(bonus[b])
                raw = (logits[b, level] + correction(tensors, hidden[b, level], before))[ids[b, level]]
                expected = raw.log_softmax(-1) + logprobs[b, level].logsumexp(-1)
                row = got.conditional[b, level - 1, i] if level else got.logprobs[b, 0]
                torch.testing.assert_close(row, expected.clamp(max=0), atol=2e-4, rtol=1e-4)
                assert (row <= 0).all()
                if i == 2:
                    break


def test_missing_candidates_stay_missing() -> None:
    torch.manual_seed(0)
    logprobs, ids = torch.randn(1, 3, VOCAB).log_softmax(-1).topk(5)
    logprobs[0, :, 3:], ids[0, :, 3:] = -torch.inf, -1
    got = head_of(random_tensors("bilinear")).given_the_path(
        Candidates(logprobs, ids.int()), torch.randn(1, 3, WIDTH), torch.tensor([5])
    )
    assert got.conditional is not None
    assert torch.isfinite(got.conditional[..., :3]).all() and torch.isfinite(got.logprobs[..., :3]).all()
    assert torch.isneginf(got.conditional[..., 3:]).all() and torch.isneginf(got.logprobs[..., 3:]).all()


@pytest.fixture(scope="module")
def checkpoint(config: DrafterConfig, drafter_dir: Callable[..., Path]) -> Path:
    directory = drafter_dir(config)
    head_of(random_tensors("bilinear")).save(directory, dtype=torch.float32)
    return directory


@pytest.fixture(scope="module")
def target(target_dir: Callable[..., Path]) -> Path:
    return target_dir()


def items(levels: int | None) -> list[DraftItem]:
    return [
        DraftItem("a", True, [FeatureSlice(0, list(range(9)), 0)], 3, 9, levels),
        DraftItem("b", True, [FeatureSlice(0, [4, 2], 0)], None, 2),
        DraftItem("c", True, [FeatureSlice(0, [1], 5)], 96, 6, levels),
    ]


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("paged", [False, True])
def test_drafters_use_the_head_of_their_checkpoint(
    checkpoint: Path, target: Path, device: str, paged: bool, levels: int | None
) -> None:
    features = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    usual = {"device": device, "dtype": torch.float32, "top_k": 7, "paged": paged, "context_tokens": 512}
    drafter, plain = Drafter(checkpoint, target, **usual), Drafter(checkpoint, target, **usual, path_head=False)
    assert drafter.info.path_head
    hidden: list[Tensor] = []
    head = drafter._contexts._stack._path_head
    assert head is not None
    given_the_path = head.given_the_path
    head.given_the_path = lambda candidates, h, bonus: hidden.append(h) or given_the_path(candidates, h, bonus)
    got, base = (each.draft(items(levels), [features]) for each in (drafter, plain))
    assert base.conditional is None
    rows = len(hidden[0])
    whole = Candidates(base.logprobs.clone(), base.ids)
    expected = given_the_path(whole, hidden[0][:2], torch.tensor([3, 96], device=device)[:rows])
    assert torch.equal(got.ids, base.ids)
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.conditional, expected.conditional, atol=1e-5, rtol=1e-5)
    assert not torch.equal(got.logprobs[:, 0], base.logprobs[:, 0])


def test_a_checkpoint_without_a_head_has_no_conditional_candidates(
    config: DrafterConfig, drafter_dir: Callable[..., Path], target: Path
) -> None:
    drafter = Drafter(drafter_dir(config), target, dtype=torch.float32, top_k=7)
    assert not drafter.info.path_head
    assert drafter.draft(items(None), [torch.zeros(9, 96)]).conditional is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_a_graph_equals_eager_bit_for_bit(
    config: DrafterConfig, drafter_dir: Callable[..., Path], target: Path
) -> None:
    wide = drafter_dir(dataclasses.replace(config, head_dim=64))
    head_of(random_tensors("gated")).save(wide)
    usual = {"device": "cuda", "dtype": torch.bfloat16, "top_k": 7, "context_tokens": 512}
    features = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)).cuda()
    graph, eager = (Drafter(wide, target, **usual, graphs=graphs) for graphs in (True, False))
    assert graph._contexts._passes[0]._graph
    a, b = (each.draft(items(None), [features]) for each in (graph, eager))
    assert torch.equal(a.logprobs, b.logprobs) and torch.equal(a.conditional, b.conditional)


@pytest.mark.parametrize("kind", PATH_KINDS)
def test_a_head_is_read_as_it_was_written(checkpoint: Path, kind: str, tmp_path: Path) -> None:
    """And with the names that speculators gives them; the model beside it is read as if there were none."""
    assert isinstance(load_published(checkpoint).config, DrafterConfig)
    tensors = random_tensors(kind)
    for prefix in ("", "markov_head."):
        head_of({prefix + name: tensor for name, tensor in tensors.items()}).save(tmp_path, dtype=torch.float32)
        (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
        info = DrafterInfo.read(tmp_path)
        read = PathHead.load(info, dtype=torch.float32, device="cpu")
        assert read is not None and read.tensors.keys() == tensors.keys() and read.kind == kind
        assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", PATH_KINDS)
def test_int8_rows_are_a_head_of_the_same_size(checkpoint: Path, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    tensors = random_tensors(kind)
    head_of(tensors).save(tmp_path, dtype=torch.int8)
    info = DrafterInfo.read(tmp_path)
    assert (info.path_rank, info.path_parameters) == (RANK, sum(tensor.numel() for tensor in tensors.values()))
    read = PathHead.load(info, dtype=torch.float32, device="cpu")
    assert read is not None and read.kind == kind
    for name, tensor in tensors.items():
        bound = tensor.abs().amax(-1, keepdim=True) / 253
        assert ((read.tensors[name] - tensor).abs() <= (bound if tensor.dim() == 2 else 0)).all()


@pytest.mark.parametrize(
    "changes",
    [{"markov_w2.weight": (VOCAB, RANK + 1)}, {"markov_w1.weight": (VOCAB - 1, RANK)}, {"joint_proj.weight": (3, 3)}],
)
def test_another_head_is_refused(checkpoint: Path, changes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    tensors = random_tensors("vanilla") | {name: torch.zeros(shape) for name, shape in changes.items()}
    with pytest.raises(ValueError, match="a path head of tensors"):
        head_of(tensors)
    with pytest.raises(ValueError, match="expected"):
        head_of({name: tensor for name, tensor in random_tensors("vanilla").items() if "w1" not in name})
