"""What a DFlash checkpoint says about itself: the published `config.json`, read and checked. Knows JSON, no torch.

Keys this file does not know are ignored, because published checkpoints carry many; a missing one is an error naming it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

ARCHITECTURE = "DFlashDraftModel"
QUANTIZATION_KEY = "ddtree_quantization"
RANDOM_KEY = "ddtree_random_weights"  # true: there is no weights file, make some
QUANTIZATIONS = ("int8_rows",)
SCALE = "_scale"  # after the name of a tensor of int8 rows: their scales (int8_rows.py)
PATH_HEAD = "path_head"  # folder of a checkpoint that has such a head (path_head.py)
PATH_KINDS = ("bilinear", "vanilla", "gated", "mlp")  # of it; the first is what is trained unless another is asked for
ROPE_TYPES = ("default", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` 0-based target layers spread over the target, as the DFlash authors choose them (paper, section 4)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head dimension, optionally stretched with YaRN (arXiv 2309.00071)."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0  # yarn: how far the trained positions are stretched
    original_max_positions: int = 0  # yarn: positions before stretching
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by: 1 without YaRN, else the given or derived attention factor."""
        if self.rope_type == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
        given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = given.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError("config.json lacks rope_theta: add it, or a rope_parameters object that has it")
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"config.json: rope_type {rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}")
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("config.json: partial_rotary_factor must be 1, a DFlash drafter rotates the whole head")
        if rope_type == "default":
            return cls(theta=float(theta))
        original = given.get("original_max_position_embeddings") or _required(config, "max_position_embeddings")
        factor = given.get("factor") or _required(config, "max_position_embeddings") / original
        return cls(
            theta=float(theta),
            rope_type=rope_type,
            factor=float(factor),
            original_max_positions=int(original),
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            mscale=given.get("mscale"),
            mscale_all_dim=given.get("mscale_all_dim"),
            attention_factor=given.get("attention_factor"),
            truncate=bool(given.get("truncate", True)),
        )

    def to_config(self) -> dict[str, Any]:
        """The `rope_parameters` object that `from_config` reads."""
        plain: dict[str, Any] = {"rope_type": self.rope_type, "rope_theta": self.theta}
        if self.rope_type == "default":
            return plain
        optional = ("mscale", "mscale_all_dim", "attention_factor")
        return {
            **plain,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_positions,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            **{key: getattr(self, key) for key in optional if getattr(self, key) is not None},
        }


@dataclass(frozen=True)
class Span:
    """Which keys a layer's query at position p sees: all by default."""

    causal: bool = False  # none after p
    window: int | None = None  # none at p - window or before (nor, where not causal, at p + window or after)

    @property
    def everything(self) -> bool:
        return not self.causal and self.window is None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The architecture of a DFlash drafter. Sizes are in elements, positions in tokens."""

    hidden_size: int  # also the target's
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based; feature i is the output of target layer target_layer_ids[i]
    block_size: int  # slots of one draft: the bonus token and block_size - 1 masks
    mask_token_id: int
    max_positions: int  # a position at or past it is never drafted
    rope: Rope
    spans: tuple[Span, ...] = ()  # one per layer; empty means every layer sees everything
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embedding_scale: float = 1.0  # the target's embedding is multiplied by it
    logit_scale: float = 1.0  # the lm_head's output is multiplied by it, then capped
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if not self.spans:
            object.__setattr__(self, "spans", (Span(),) * self.num_layers)
        layer_ids, last = list(self.target_layer_ids), self.num_target_layers - 1
        if not layer_ids or not all(0 <= i <= last for i in layer_ids):
            raise ValueError(f"target_layer_ids {layer_ids} must name target layers 0 to {last}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.block_size < 2:
            raise ValueError(
                f"block_size {self.block_size} drafts nothing: it counts the bonus token, so use 2 or more"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if len(self.spans) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.spans)} layers, num_hidden_layers is {self.num_layers}")

    @property
    def horizon(self) -> int:
        """Positions drafted after the bonus token (L)."""
        return self.block_size - 1

    def drafts_at(self, position: int) -> bool:
        """Whether a whole block fits whose bonus token is at `position`; past that, go on without a draft."""
        return 0 <= position <= self.max_positions - self.block_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the published form. Raises ValueError naming a key that is missing or has a value we cannot honour."""
        architectures = config.get("architectures") or [ARCHITECTURE]
        if ARCHITECTURE not in architectures:
            raise ValueError(f"config.json: architectures {architectures} is not supported; known: {ARCHITECTURE}")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; known: silu")
        num_layers, num_heads = _required(config, "num_hidden_layers"), _required(config, "num_attention_heads")
        hidden, num_target_layers = _required(config, "hidden_size"), _required(config, "num_target_layers")
        layer_ids = _drafting(config, "target_layer_ids") or default_target_layer_ids(num_target_layers, num_layers)
        return cls(
            hidden_size=hidden,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_required(config, "num_key_value_heads"),
            head_dim=config.get("head_dim") or hidden // num_heads,
            vocab_size=_required(config, "vocab_size"),
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(layer_ids),
            block_size=_required_drafting(config, "block_size"),
            mask_token_id=_required_drafting(config, "mask_token_id"),
            max_positions=_required(config, "max_position_embeddings"),
            rope=Rope.from_config(config),
            spans=_spans(config, num_layers),
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            attention_bias=bool(config.get("attention_bias", False)),
            embedding_scale=float(_drafting(config, "input_embedding_scale") or 1.0),
            logit_scale=float(_drafting(config, "output_multiplier") or 1.0),
            logit_softcap=_drafting(config, "final_logit_softcapping") or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The published form: `from_dict(to_dict())` is the same config."""
        windows = {span.window for span in self.spans if span.window is not None}
        sliding = [not span.everything for span in self.spans]
        causal = {span.causal for span, slides in zip(self.spans, sliding, strict=True) if slides}
        if len(windows) > 1 or len(causal) > 1 or any(s.window is None for s in self.spans if not s.everything):
            raise ValueError("the published config.json has one sliding_window, the same for every sliding layer")
        drafting: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.embedding_scale != 1.0:
            drafting["input_embedding_scale"] = self.embedding_scale
        if self.logit_scale != 1.0:
            drafting["output_multiplier"] = self.logit_scale
        if self.logit_softcap is not None:
            drafting["final_logit_softcapping"] = self.logit_softcap
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_config(),
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.num_layers,
            "sliding_window": next(iter(windows), None),
            "use_sliding_window": bool(windows),
            "layer_types": [LAYER_TYPES[slides] for slides in sliding],
            **({"is_causal": False} if causal == {False} else {}),
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
            "dflash_config": drafting,
        }


@dataclass(frozen=True, kw_only=True)
class DrafterInfo(DrafterConfig):
    """A drafter checkpoint as the deployments see it: architecture, place, and how its weights are stored."""

    checkpoint_dir: Path
    quantization: str | None = None  # one of QUANTIZATIONS, None for plain floating point
    random_weights: bool = False  # there is no weights file
    path_head: bool = False  # its candidates depend on the token before them
    path_rank: int = 0
    path_parameters: int = 0

    @classmethod
    def read(cls, checkpoint_dir: str | Path) -> DrafterInfo:
        """Reads `config.json` of a checkpoint directory. Raises ValueError, in one sentence, if it is no drafter."""
        path = Path(checkpoint_dir) / "config.json"
        if not path.is_file():
            raise ValueError(f"no drafter at {checkpoint_dir}: give a directory with config.json and *.safetensors")
        try:
            raw = json.loads(path.read_text())
            config = DrafterConfig.from_dict(raw)
            quantization = _quantization(raw)
        except ValueError as error:
            raise ValueError(f"drafter {checkpoint_dir}: {error}") from error
        known = {field.name: getattr(config, field.name) for field in fields(DrafterConfig)}
        known |= {"quantization": quantization, "random_weights": bool(raw.get(RANDOM_KEY))}
        rank, parameters = path_head_size(checkpoint_dir)
        known |= {"path_head": (path.parent / PATH_HEAD).is_dir(), "path_rank": rank, "path_parameters": parameters}
        return cls(**known, checkpoint_dir=Path(checkpoint_dir))

    def check_target(self, target_hidden: int, target_vocab: int, target_layers: int, target_name: str) -> None:
        """Raises ValueError with one sentence where this drafter was not made for that target."""
        pairs = (
            ("hidden size", self.hidden_size, target_hidden),
            ("vocabulary", self.vocab_size, target_vocab),
            ("number of layers", self.num_target_layers, target_layers),
        )
        wrong = [f"{what} {ours} (the target's is {theirs})" for what, ours, theirs in pairs if ours != theirs]
        if wrong:
            raise ValueError(
                f"drafter made for another target: {self.checkpoint_dir} expects {', '.join(wrong)}; "
                f"choose a drafter trained for {target_name}"
            )


def path_head_size(checkpoint_dir: str | Path) -> tuple[int, int]:
    """Rank and parameters of a checkpoint's path head, from its files' headers; zeros where it has none."""
    from safetensors import safe_open

    rank = parameters = 0
    for path in (Path(checkpoint_dir) / PATH_HEAD).glob("*.safetensors"):
        with safe_open(path, "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if not name.endswith(SCALE)}  # noqa: SIM118, it is no mapping
        parameters += sum(map(math.prod, shapes.values()))
        rank = max([rank, *(shape[-1] for name, shape in shapes.items() if name.endswith("markov_w1.weight"))])
    return rank, parameters


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json lacks {key}, which a DFlash drafter needs")
    return config[key]


def _drafting(config: Mapping[str, Any], key: str) -> Any:
    """A drafting key lives in `dflash_config`, in some checkpoints at the top level."""
    return (config.get("dflash_config") or {}).get(key, config.get(key))


def _required_drafting(config: Mapping[str, Any], key: str) -> Any:
    value = _drafting(config, key)
    if value is None:
        raise ValueError(f"config.json lacks {key}: add it to dflash_config or to the top level")
    return value


def _spans(config: Mapping[str, Any], num_layers: int) -> tuple[Span, ...]:
    """Sliding layers are causal as well unless `is_causal` says otherwise: so it is in the authors' module (0.1.0)."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", num_layers) if window is not None else num_layers
        types = [LAYER_TYPES[i >= first] for i in range(num_layers)]
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(f"config.json: layer_types {unknown} are not supported; known: {', '.join(LAYER_TYPES)}")
    causal = config.get("is_causal")
    slides = [kind == LAYER_TYPES[1] for kind in types]
    return tuple(Span(s if causal is None else bool(causal), window if s else None) for s in slides)


def _quantization(config: Mapping[str, Any]) -> str | None:
    foreign = config.get("quantization_config") or config.get("compression_config")
    if foreign:
        name = foreign.get("quant_method", "unnamed") if isinstance(foreign, Mapping) else foreign
        raise ValueError(f"quantization {name!r} is not supported; use plain weights or {', '.join(QUANTIZATIONS)}")
    ours = config.get(QUANTIZATION_KEY)
    if ours is None:
        return None
    if ours.get("format") not in QUANTIZATIONS:
        raise ValueError(f"quantization {ours.get('format')!r} is not supported; known: {', '.join(QUANTIZATIONS)}")
    return str(ours["format"])
