"""`weights: random`: models made from their sizes alone, the same every time, that load like any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ddtree.deployments import models, random_models
from ddtree.deployments.config import AppConfig
from ddtree.deployments.errors import ConfigError
from ddtree.drafter.drafter import Drafter
from ddtree.drafter.target_ends import TargetEnds
from ddtree.kernels import Rows
from ddtree.verifier.backends import load_target
from ddtree.verifier.batch import SamplingRows, VerifyBatch
from ddtree.verifier.byte_tokenizer import byte_tokenizer

TARGET = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
DRAFTER = {
    "model_type": "qwen3", "block_size": 4, "num_target_layers": 2, "num_hidden_layers": 1, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "dflash_config": {"mask_token_id": 299, "target_layer_ids": [0, 1]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))


def config(folder: Path, **sizes: Any) -> AppConfig:
    for name, content in (("target", {**TARGET, **sizes}), ("drafter", DRAFTER)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(content))
    args = {
        "target": {"model": str(folder / "target"), "weights": "random"},
        "drafter": {"checkpoint": str(folder / "drafter"), "weights": "random"},
    }
    return AppConfig.parse(args)


def first_step(directory: Path) -> torch.Tensor:
    """y of a prompt of three tokens."""
    options = {"dtype": "float32", "device": "cpu", "page_size": 4, "pages": 8, "feature_layers": (0, 1)}
    target = load_target("hf", str(directory), threads=1, **options)  # type: ignore[arg-type]
    at = torch.arange(3, dtype=torch.int32)
    rows = Rows(
        row_offsets=torch.tensor([0, 3]).int(), q_len=torch.tensor([3]).int(), seq_len=torch.tensor([0]).int(),
        page_table=torch.tensor([[1]]).int(), page_size=4, causal=torch.tensor([True]),
        ancestors=torch.zeros(3, 1).int(),
    )  # fmt: skip
    greedy = SamplingRows(at, torch.zeros(3), torch.ones(3), torch.zeros(3).int(), torch.zeros(3).long())
    return target.step(VerifyBatch(at + 40, at, at.long() + 4, rows, greedy)).y


def test_equal_sizes_give_equal_weights_and_others_a_directory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = models.find(config(tmp_path))
    assert models.find(config(tmp_path)) == found, "made once"
    assert found.served_name == "target"
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "second"))
    again = models.find(config(tmp_path))
    for one, other in ((found.target.model_dir, again.target.model_dir), (found.drafter_dir, again.drafter_dir)):
        assert one and other and one != other
        assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert models.find(config(tmp_path, hidden_act="gelu")).target.model_dir != again.target.model_dir


def test_a_drafter_has_the_ends_of_its_target(tmp_path: Path) -> None:
    found = models.find(config(tmp_path))
    assert found.drafter
    weights = load_file(found.target.model_dir / "model.safetensors")
    ends = TargetEnds.load(found.target.model_dir, found.drafter, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(ends.embedding, weights["model.embed_tokens.weight"], atol=0, rtol=0)
    torch.testing.assert_close(ends.lm_head, weights["lm_head.weight"], atol=0, rtol=0)


def test_what_is_too_large_to_write_is_made_by_who_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_models, "FILES_BELOW", 0)
    found = models.find(config(tmp_path))
    assert found.drafter and found.drafter_dir
    assert not [*tmp_path.rglob("*.safetensors")]
    assert first_step(found.target.model_dir).tolist() == [41, 42, 43], "decided by a wide margin"
    Drafter(found.drafter_dir, found.target.model_dir, dtype=torch.float32, top_k=4)


def test_the_embedded_and_the_shipped_sizes_serve_too(tmp_path: Path) -> None:
    sizes = {"model": "tiny-mla", "weights": "random"}
    with pytest.raises(ConfigError, match=r"backend 'hf' cannot serve 'deepseek_v3'|needs vLLM"):
        models.find(AppConfig.parse({"target": sizes, "drafter": {"checkpoint": None}}))
    with pytest.raises(ConfigError, match=r"its sizes are not shipped \(known: .*\); random weights are made"):
        models.find(AppConfig.parse({"target": {**sizes, "model": "nowhere"}, "drafter": {"checkpoint": None}}))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"vocab_size": 97}, "a vocabulary of 97 has no room for the 256 bytes"),
        ({"model_type": "mamba"}, "a 'mamba' model cannot be sized"),
        ({"hidden_size": None}, "lacks the number 'hidden_size'"),
    ],
)
def test_sizes_that_make_no_target(tmp_path: Path, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        models.find(config(tmp_path, **sizes))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_every_id_has_a_text(tmp_path: Path) -> None:
    byte_tokenizer(300).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([72, 105, 256, 299]) == "Hi<256><299>"
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == "user: Hi\nassistant:"


@given(st.text())
def test_text_is_its_bytes(text: str) -> None:
    tokenizer = byte_tokenizer(256)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
