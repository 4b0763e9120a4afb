"""A tiny Llama target with its own tokenizer and chat template, and a source folder: enough for the whole pipeline on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddtree.drafter.training import TrainOptions

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", "<empty_output>"]
VOCAB = 400
FUNCTIONS = '''"""Small helpers for numbers and for text, written only so that prompts can be made from their signatures.

A second paragraph of prose, long enough to be taken as a passage, says in plain words what this module is about.
"""


def double(x: int) -> int:
    """Return twice the given number, whatever its sign may be."""
    return 2 * x


def shout(text: str, mark: str = "!") -> str:
    """Return the text in capital letters with a mark at its end."""
    return text.upper() + mark


def total(values: list[int]) -> int:
    """Add up all values of the list and return the sum of them."""
    return sum(values)
'''


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers that ends its answers by chance."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("target")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([FUNCTIONS, TEMPLATE, "the quick brown fox " * 50], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    for i in range(4):
        (path / f"part{i}.py").write_text(FUNCTIONS.replace("def ", f"def part{i}_"))
    return path


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    rows = [{"question": f"Ann has {i} nuts. How many are {i} and two?"} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def held_out_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("held") / "chat.jsonl"
    rows = [{"turns": ["Tell me about tea.", "And coffee?"]}, {"prompt": "def two():\n    "}, {"question": "Why?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(target_dir: Path, source_dir: Path, prompt_file: Path, held_out_file: Path, tmp_path: Path) -> TrainOptions:
    """A run of a few seconds."""
    return TrainOptions(
        target_dir=target_dir,
        out_dir=tmp_path / "run",
        prompts=(prompt_file,),
        sources=(source_dir,),
        evaluate=(held_out_file,),
        generate_seconds=4.0,
        train_seconds=4.0,
        layers=2,
        block=8,
        device="cpu",
        slots=32,
        context=256,
        max_new=48,
        batch=2,
        anchors=16,
        validation_every=5,
        save_seconds=1.0,
        evaluate_tokens=24,
    )
