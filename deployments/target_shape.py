"""What a target's config.json says of its size: every weight matrix, how tensor parallelism splits it, and its KV row.

Knows arithmetic and JSON; reads no weights, imports no torch and knows neither GPUs nor deployments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DENSE_TYPES = ("llama", "qwen2", "qwen3")
LATENT_TYPES = ("deepseek_v3", "kimi_k2")
MODEL_TYPES = (*DENSE_TYPES, *LATENT_TYPES, "kimi_k25")


@dataclass(frozen=True)
class Tensor:
    """A weight `[rows, columns]`, or so many equal ones.

    `units` is how many indivisible pieces tensor parallelism deals out (heads, channels); 1 is a copy on every rank.
    Ranks get equal numbers of pieces, rounded up: fewer KV heads than ranks are repeated.
    """

    part: str  # what a report calls it
    name: str  # as the checkpoint calls the first of them
    rows: int
    columns: int = 1
    units: int = 1
    copies: int = 1
    linear: bool = True  # a torch Linear: what a quantised checkpoint may quantise, and what a row is multiplied with

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.copies

    def on_rank(self, ranks: int) -> int:
        """Parameters that one of `ranks` holds."""
        return self.parameters // self.units * -(-self.units // ranks)


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention: KV heads are split like query heads."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # of q, k and v, as in Qwen2
    head_norms: bool = False  # of q and k, as in Qwen3

    def kv_width(self, ranks: int) -> int:
        """Elements of one token's row in one layer's cache, on one rank."""
        return 2 * -(-self.kv_heads // ranks) * self.head_dim

    def flop(self, ranks: int) -> int:
        """Per query row, token it sees and layer, on one rank."""
        return 4 * -(-self.heads // ranks) * self.head_dim

    def width(self, ranks: int) -> int:
        """Elements of one row's queries, or of what attention returns, on one rank; the wider of both."""
        return -(-self.heads // ranks) * self.head_dim

    def tensors(self, layer: str, layers: int) -> Iterator[Tensor]:
        projections = (("q_proj", self.heads), ("k_proj", self.kv_heads), ("v_proj", self.kv_heads))
        for name, heads in projections:
            rows, path = heads * self.head_dim, f"{layer}.self_attn.{name}"
            yield Tensor("attention", path, rows, self.hidden, heads, layers)
            if self.bias:
                yield Tensor("norms", f"{path}.bias", rows, 1, heads, layers, linear=False)
        yield Tensor("attention", f"{layer}.self_attn.o_proj", self.hidden, self.width(1), self.heads, layers)
        if self.head_norms:
            yield Tensor("norms", f"{layer}.self_attn.q_norm", 2 * self.head_dim, copies=layers, linear=False)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one latent row for all heads, which every rank keeps whole."""

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    def kv_width(self, ranks: int) -> int:
        """Elements of one token's row in one layer's cache, on one rank: the latent is not split."""
        return self.kv_rank + self.rope

    def flop(self, ranks: int) -> int:
        """Per query row, token it sees and layer, on one rank: queries meet the latent itself (absorbed)."""
        return 2 * -(-self.heads // ranks) * (2 * self.kv_rank + self.rope)

    def width(self, ranks: int) -> int:
        """Elements of one row's absorbed queries on one rank."""
        return -(-self.heads // ranks) * (self.kv_rank + self.rope)

    def tensors(self, layer: str, layers: int) -> Iterator[Tensor]:
        path, heads, query = f"{layer}.self_attn", self.heads, self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            yield Tensor("attention", f"{path}.q_proj", query, self.hidden, heads, layers)
        else:
            yield Tensor("attention", f"{path}.q_a_proj", self.q_rank, self.hidden, copies=layers)
            yield Tensor("norms", f"{path}.q_a_layernorm", self.q_rank, copies=layers, linear=False)
            yield Tensor("attention", f"{path}.q_b_proj", query, self.q_rank, heads, layers)
        yield Tensor("attention", f"{path}.kv_a_proj_with_mqa", self.kv_rank + self.rope, self.hidden, copies=layers)
        yield Tensor("norms", f"{path}.kv_a_layernorm", self.kv_rank, copies=layers, linear=False)
        expand = heads * (self.nope + self.value)
        yield Tensor("attention", f"{path}.kv_b_proj", expand, self.kv_rank, heads, layers)
        yield Tensor("attention", f"{path}.o_proj", self.hidden, heads * self.value, heads, layers)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the layers after the first dense ones."""

    count: int
    per_token: int
    intermediate: int
    shared: int
    layers: int

    def expected_distinct(self, rows: int) -> float:
        """Experts of a layer that at least one of `rows` chooses, were all choices even and independent."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True)
class Quantisation:
    """compressed-tensors: so many bits a weight and one 16-bit scale a group of columns, except where ignored."""

    bits: int
    group: int
    ignore: tuple[str, ...]

    def covers(self, tensor: Tensor) -> bool:
        """Patterns are `re:` and a regular expression, matched from the start, or a whole name."""
        hit = (re.match(p[3:], tensor.name) if p.startswith("re:") else p == tensor.name for p in self.ignore)
        return tensor.linear and not any(hit)

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + 2 / self.group


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target's language model. A vision tower is not counted: it is not loaded."""

    hidden: int
    layers: int
    vocab: int
    intermediate: int  # of a dense layer's MLP
    max_positions: int
    tied: bool  # lm_head and embedding are one tensor
    attention: Gqa | Mla
    experts: Experts | None
    quantisation: Quantisation | None
    vision: bool

    @classmethod
    def from_config(cls, whole: Mapping[str, Any], source: str) -> TargetShape:
        """Read a config.json. Raises ValueError naming what is missing or not supported."""
        config = {**whole, **(whole.get("text_config") or {})}
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"{source}: a '{kind}' model cannot be sized; known types are {', '.join(MODEL_TYPES)}")

        def size(key: str) -> int:
            if not isinstance(config.get(key), int):
                raise ValueError(f"{source} lacks the number '{key}'; give the model's own config.json")
            return int(config[key])

        hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
        attention: Gqa | Mla
        if kind in DENSE_TYPES:
            attention = Gqa(
                hidden,
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or hidden // heads),
                bias=kind == "qwen2" or bool(config.get("attention_bias")),
                head_norms=kind == "qwen3",
            )
        else:
            sizes = (size(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            attention = Mla(hidden, heads, config.get("q_lora_rank"), *sizes)
        experts = None
        if config.get("n_routed_experts"):
            experts = Experts(
                count=size("n_routed_experts"),
                per_token=size("num_experts_per_tok"),
                intermediate=size("moe_intermediate_size"),
                shared=int(config.get("n_shared_experts") or 0),
                layers=layers - int(config.get("first_k_dense_replace") or 0),
            )
        return cls(
            hidden=hidden,
            layers=layers,
            vocab=size("vocab_size"),
            intermediate=size("intermediate_size"),
            max_positions=size("max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings")),
            attention=attention,
            experts=experts,
            quantisation=_quantisation(config, source),
            vision="vision_config" in whole or whole.get("model_type") == "kimi_k25",
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every weight of the model."""
        layer, hidden = "model.layers.{}", self.hidden
        ends = ("embedding", "model.embed_tokens"), ("lm_head", "lm_head")
        for part, name in ends[: 1 if self.tied else 2]:
            yield Tensor(part, name, self.vocab, hidden, self.vocab, linear=part == "lm_head")
        yield from self.attention.tensors(layer.format(0), self.layers)
        yield Tensor("norms", "model.norm", (2 * self.layers + 1) * hidden, linear=False)
        dense = self.layers - (self.experts.layers if self.experts else 0)
        yield from _mlp("mlp", f"{layer.format(0)}.mlp", hidden, self.intermediate, dense)
        if moe := self.experts:
            path = f"{layer.format(dense)}.mlp"
            yield Tensor("router", f"{path}.gate", moe.count, hidden, copies=moe.layers, linear=False)
            yield Tensor("router", f"{path}.gate.e_score_correction_bias", moe.count, copies=moe.layers, linear=False)
            yield from _mlp("experts", f"{path}.experts.0", hidden, moe.intermediate, moe.count * moe.layers)
            shared = moe.shared * moe.intermediate
            yield from _mlp("shared experts", f"{path}.shared_experts", hidden, shared, moe.layers if shared else 0)

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors())

    def bytes_per_weight(self, tensor: Tensor, dtype_bytes: int) -> float:
        """Quantised weights with their scales, others in the dtype."""
        quantisation = self.quantisation
        return quantisation.bytes_per_weight if quantisation and quantisation.covers(tensor) else dtype_bytes

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError where `ranks` do not split heads, MLPs or groups of quantised weights evenly."""
        moe, heads = self.experts, self.attention.heads
        numbers = {"attention heads": heads, "MLP channels": self.intermediate}
        if moe:
            numbers["channels of an expert"] = moe.intermediate
        if isinstance(self.attention, Gqa) and ranks <= self.attention.kv_heads:
            numbers["KV heads"] = self.attention.kv_heads
        if moe and self.quantisation:
            numbers["groups of an expert's channels"] = moe.intermediate // self.quantisation.group
        for what, number in numbers.items():
            if number % ranks:
                fits = [str(n) for n in range(1, heads + 1) if all(count % n == 0 for count in numbers.values())]
                raise ValueError(
                    f"verifier.tensor_parallel_size {ranks} does not divide the target's {number} {what}; "
                    f"these do: {', '.join(fits)}"
                )


def _mlp(part: str, path: str, hidden: int, width: int, copies: int) -> Iterator[Tensor]:
    """SwiGLU: gate and up split by rows, down by columns."""
    for name in ("gate_proj", "up_proj"):
        yield Tensor(part, f"{path}.{name}", width, hidden, width, copies)
    yield Tensor(part, f"{path}.down_proj", hidden, width, width, copies)


def _quantisation(config: Mapping[str, Any], source: str) -> Quantisation | None:
    given = config.get("quantization_config")
    if not given:
        return None
    method, groups = given.get("quant_method"), list((given.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    integer = weights.get("type") == "int" and weights.get("symmetric") and weights.get("group_size")
    if method != "compressed-tensors" or not integer:
        raise ValueError(
            f"{source}: quantisation '{method}' cannot be sized; known is compressed-tensors with one group of "
            "symmetric integer weights that has a group_size"
        )
    return Quantisation(int(weights["num_bits"]), int(weights["group_size"]), tuple(given.get("ignore") or ()))
