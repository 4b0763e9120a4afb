"""Where a target model lies and what its JSON files say of it. Imports no torch and reads no weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.verifier import embedded

RANDOM_KEY = "ddtree_random_weights"  # true in a config.json: there is no weights file, make some
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")  # of any backend; `backends` knows which
_LATENT_TYPES = ("deepseek_v3",)
_SECOND_NAMES = {"kimi_k2": "deepseek_v3"}  # the same model under a name of its own
_MULTIMODAL = {"kimi_k25": "language_model."}  # type → what the names of its language model's tensors begin with
_SHARED_KEYS = ("quantization_config", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not follow the longest sequence of a batch
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Keys of config.json that do not change what the model computes.
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}


@dataclass(frozen=True)
class TargetInfo:
    """A target as its directory describes it."""

    name: str
    model_dir: Path
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int  # longest prompt + answer in tokens
    eos_token_ids: tuple[int, ...]  # ascending; generation ends with any of them
    model_type: str
    fingerprint: str  # hex; equal for two directories that describe the same model
    # Multi-head latent attention: width of the one KV row that all heads share, latent and rotary part; num_kv_heads
    # and head_dim then say nothing of the KV pool. None: K and V per head.
    latent_width: int | None = None
    quantization: str | None = None  # the method's name in config.json; None: plain floating point

    def check_layers(self, layers: Iterable[int]) -> None:
        """Raise ValueError where the model lacks one of these layers."""
        if bad := [i for i in layers if not 0 <= i < self.num_layers]:
            raise ValueError(f"feature layers {bad} do not exist; {self.name} has layers 0 to {self.num_layers - 1}")

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of KV that one token takes over all layers (and ranks), for `float32`, `bfloat16` or `float16`."""
        if dtype not in _DTYPE_BYTES:
            raise ValueError(f"unknown KV dtype '{dtype}'; valid are {', '.join(_DTYPE_BYTES)}")
        width = self.latent_width or 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * width * _DTYPE_BYTES[dtype]

    @classmethod
    def read(cls, model_dir: Path) -> TargetInfo:
        """Read config.json and, where present, generation_config.json and the embedded model's manifest.

        Of a multimodal model it is the language model alone. Raises ValueError where the directory or its config.json
        is missing, is not JSON, lacks a size, or describes a model type this project cannot run.
        """
        model_dir = Path(model_dir)
        config, _ = language_config(model_dir)
        model_type = config["model_type"]
        if model_type not in MODEL_TYPES:
            known = (*MODEL_TYPES, *_SECOND_NAMES, *_MULTIMODAL)
            raise ValueError(f"{model_dir} is a '{model_type}' model; supported types are {', '.join(known)}")
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError(f"{model_dir} uses sliding-window attention, which the verifier does not support")

        def size(key: str) -> int:
            if not isinstance(config.get(key), int):
                raise ValueError(f"{model_dir}/config.json lacks the number '{key}'")
            return int(config[key])

        heads = size("num_attention_heads")
        manifest = _read_json(model_dir / embedded.MANIFEST) or {}
        quantization = config.get("quantization_config") or {}
        return cls(
            name=str(manifest.get("name") or model_dir.resolve().name),
            model_dir=model_dir,
            vocab_size=size("vocab_size"),
            hidden_size=size("hidden_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or size("hidden_size") // heads),
            max_positions=_max_positions(config, size("max_position_embeddings"), model_dir),
            eos_token_ids=_eos_ids(config, _read_json(model_dir / "generation_config.json") or {}),
            model_type=model_type,
            fingerprint=_fingerprint(config, manifest),
            latent_width=size("kv_lora_rank") + size("qk_rope_head_dim") if model_type in _LATENT_TYPES else None,
            quantization=str(quantization.get("quant_method", "unnamed")) if quantization else None,
        )


def language_config(model_dir: Path) -> tuple[dict[str, Any], str]:
    """The configuration of a directory's language model, and what the names of that model's tensors begin with.

    Of a multimodal model it is the `text_config`, with what the whole says for all its parts. A type that is another
    one under a second name gets the first; code that the directory brings along is left out, for nobody runs it.

    Raises ValueError where the directory or its config.json is missing or is not JSON.
    """
    if not model_dir.is_dir():
        raise ValueError(f"no model directory at {model_dir}; give a directory in Hugging Face form")
    whole = _read_json(model_dir / "config.json")
    if whole is None:
        raise ValueError(f"{model_dir} has no config.json; give a model directory in Hugging Face form")
    prefix = _MULTIMODAL.get(str(whole.get("model_type")), "")
    config = whole
    if prefix:
        text = whole.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(f"{model_dir}/config.json lacks the object 'text_config', the language model's part of it")
        config = {key: whole[key] for key in _SHARED_KEYS if key in whole} | text
    model_type = str(config.get("model_type"))
    config = config | {"model_type": _SECOND_NAMES.get(model_type, model_type)}
    config.pop("auto_map", None)
    return config, prefix


def resolve(model: str | Path, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """The directory of `model`: an embedded model's name (prepared on first use) or a local Hugging Face directory.

    Raises ValueError where it is neither. `progress` is what `embedded.prepare` takes.
    """
    if str(model) in embedded.MODELS:
        return embedded.prepare(str(model), progress)
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    why = "has no config.json" if path.is_dir() else "is no directory"
    raise ValueError(f"model '{model}' {why}; give a Hugging Face directory or one of: {', '.join(embedded.MODELS)}")


def random_weights(model_dir: Path) -> bool:
    """Whether there is no weights file, and whoever loads the model is to make its own."""
    return bool((_read_json(Path(model_dir) / "config.json") or {}).get(RANDOM_KEY))


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _max_positions(config: dict[str, Any], trained: int, model_dir: Path) -> int:
    """Positions that the rotary embedding covers: with YaRN, all that it stretches the original ones to."""
    rope = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise ValueError(
            f"{model_dir} has '{rope_type}' rotary scaling, under which requests may change each other; "
            f"supported are {', '.join(_ROPE_TYPES)}"
        )
    if rope_type != "yarn":
        return trained
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int):
        raise ValueError(
            f"{model_dir}/config.json: YaRN needs the numbers 'factor' and 'original_max_position_embeddings'"
        )
    return int(factor * original)


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _fingerprint(config: dict[str, Any], manifest: dict[str, Any]) -> str:
    essentials = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    canonical = json.dumps([essentials, manifest.get("source_sha256")], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
