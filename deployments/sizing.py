"""The memory of a deployment on paper: weights, KV and drafter on every GPU, and the KV tokens that fit. Prints nothing.

Per GPU:  gpu_memory_fraction × memory = weights + activations + fixed + tokens × bytes a token,
summed over what the GPU holds: a rank of the verifier, the drafter, or both. Every rank has the same number of pages, so
the fullest GPU says how many tokens fit. The drafter keeps a context row for every token the verifier keeps, so a GPU that
it shares pays both for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.deployments.config import AUTO, AppConfig
from ddtree.deployments.target_shape import Mla, TargetShape
from ddtree.drafter.config import DrafterConfig, DrafterInfo

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4}  # auto is bfloat16 wherever this is worth planning
FIXED = 2 << 30  # CUDA context, communication buffers, workspaces and graphs of one process. Assumed, to be measured
KV_CHUNKS = 8  # into which attention cuts a sequence's KV at most, each with its own float32 result
CONTEXT_SLACK = 2  # a sequence's context rows grow by doubling: up to twice what is in use


@dataclass(frozen=True)
class WeightPart:
    """Weights of one kind over the whole model."""

    name: str
    parameters: int
    bytes: int  # all of them, once
    bytes_per_gpu: int  # what a rank holds


@dataclass(frozen=True)
class Drafter:
    """What the drafter holds. Its ends are copies of the target's embedding and lm_head."""

    parameters: int
    layer_parameters: int  # of `parameters`, those that every block row is multiplied with: all but the fusion
    weights: int  # bytes
    path_head: int  # bytes
    ends: int  # bytes
    lm_head: int  # bytes, of `ends`, those read every round
    context_per_token: int  # bytes of keys and values over all layers
    activations: int  # bytes


@dataclass(frozen=True)
class Load:
    """What one GPU, or the one CPU machine, holds."""

    place: str
    fixed: dict[str, int]  # bytes by what they are for, whatever is served
    per_token: int  # bytes for every token that is kept

    def tokens(self, budget: int) -> int:
        """Tokens that fit beside the rest; negative where the rest alone is too much."""
        return (budget - sum(self.fixed.values())) // self.per_token


@dataclass(frozen=True)
class Memory:
    """The memory plan of a deployment."""

    parameters: int
    active_parameters: int  # that one token meets
    weights: tuple[WeightPart, ...]
    kv_bytes_per_token: int  # on one rank
    drafter: Drafter | None
    loads: tuple[Load, ...]  # different ones only: ranks without a drafter are alike
    max_context: int
    one_sequence: int  # tokens that the longest sequence and its tree take
    kv_tokens_asked: int  # 0: as many as fit

    @property
    def weight_bytes_per_gpu(self) -> int:
        return sum(part.bytes_per_gpu for part in self.weights)

    @property
    def smallest_budget(self) -> int:
        """Bytes that the fullest GPU needs for the tokens asked for, or for one sequence of full length."""
        tokens = self.kv_tokens_asked or self.one_sequence
        return max(sum(load.fixed.values()) + tokens * load.per_token for load in self.loads)

    def kv_tokens(self, budget: int, page_size: int) -> int:
        """Tokens in whole pages that fit where every GPU may fill `budget` bytes; 0 where nothing does."""
        fit = min(load.tokens(budget) for load in self.loads)
        return max(0, min(fit, self.kv_tokens_asked or fit)) // page_size * page_size


def size(config: AppConfig, target: TargetShape, drafter: DrafterInfo | None) -> Memory:
    """Size a deployment. Raises ValueError where the target cannot be split as configured."""
    ranks, width = config.verifier.tensor_parallel_size, DTYPE_BYTES[config.target.dtype]
    target.check_ranks(ranks)
    weights = _weights(target, ranks, width, config.verifier.backend == "vllm")
    kv = target.attention.kv_width(ranks) * target.layers * width
    held = _drafter(config, target, drafter) if drafter else None
    max_context = min(config.target.max_context or target.max_positions, target.max_positions)
    return Memory(
        parameters=target.parameters,
        active_parameters=_active(target),
        weights=weights,
        kv_bytes_per_token=kv,
        drafter=held,
        loads=_loads(
            config, sum(part.bytes_per_gpu for part in weights), activations(config, target, drafter), kv, held
        ),
        max_context=max_context,
        one_sequence=max_context + config.tree.max_budget + 1,
        kv_tokens_asked=config.verifier.kv_tokens if config.verifier.kv_tokens != AUTO else 0,
    )


def step_rows(config: AppConfig) -> tuple[int, int]:
    """Rows of the largest step, and those of them that get a token: all trees, and a prompt chunk beside them."""
    trees = config.scheduler.max_sequences * (config.tree.max_budget + 1)
    return trees + config.scheduler.prefill_rows, trees + 1


def activations(config: AppConfig, target: TargetShape, drafter: DrafterConfig | None) -> int:
    """Bytes that the largest step of a rank needs beside weights and KV, R rows of which S get a token.

    R × (4 hidden + widest layer) × dtype            residual, normed, attention's and the MLP's result; and inside a layer
    + R × heads' values × KV_CHUNKS × 4              attention's parts before they are joined
    + S × vocabulary × 4 × 2                         logits in float32 of the whole vocabulary, and the sampler's copy
    + R × features × dtype × 2                       target features: this step's, and the last one's on their way
    """
    ranks, width = config.verifier.tensor_parallel_size, DTYPE_BYTES[config.target.dtype]
    rows, sampled = step_rows(config)
    attention, moe = target.attention, target.experts
    inside = [2 * attention.width(ranks) + attention.kv_width(ranks), 3 * target.intermediate // ranks]
    if moe:
        inside.append(moe.per_token * (3 * moe.intermediate // ranks + target.hidden))
    value = attention.kv_rank if isinstance(attention, Mla) else attention.head_dim
    parts = -(-attention.heads // ranks) * (value + 2) * KV_CHUNKS * 4
    features = 2 * width * len(drafter.target_layer_ids) * target.hidden if drafter else 0
    stream = (4 * target.hidden + max(inside)) * width
    return rows * (stream + parts + features) + sampled * target.vocab * 4 * 2


def _weights(target: TargetShape, ranks: int, width: int, absorbs: bool) -> tuple[WeightPart, ...]:
    parts: dict[str, list[float]] = {}
    for tensor in target.tensors():
        each, sums = target.bytes_per_weight(tensor, width), parts.setdefault(tensor.part, [0, 0, 0])
        numbers = (tensor.parameters, tensor.parameters * each, tensor.on_rank(ranks) * each)
        parts[tensor.part] = [total + number for total, number in zip(sums, numbers, strict=True)]
        if absorbs and tensor.name.endswith("kv_b_proj"):  # vLLM keeps W_UK and W_UV beside the matrix they come from
            parts["absorbed copies"] = [0, 0, tensor.on_rank(ranks) * width]
    return tuple(WeightPart(name, *(round(number) for number in sums)) for name, sums in parts.items())


def _active(target: TargetShape) -> int:
    """Parameters that one token meets: all, but of the routed experts only the chosen ones."""
    idle = 1 - target.experts.per_token / target.experts.count if target.experts else 0.0
    return round(sum(t.parameters * (1 - idle if t.part == "experts" else 1) for t in target.tensors()))


def _drafter(config: AppConfig, target: TargetShape, drafter: DrafterInfo) -> Drafter:
    d, head, width = drafter.hidden_size, drafter.head_dim, DTYPE_BYTES[config.drafter.dtype]
    q, kv = drafter.num_heads * head, drafter.num_kv_heads * head
    bias = q + 2 * kv + d if drafter.attention_bias else 0
    layer = 2 * d * (q + kv) + bias + 3 * d * drafter.intermediate_size + 2 * d + 2 * head
    layers = drafter.num_layers * layer + d
    fusion = len(drafter.target_layer_ids) * d * d + d
    end = drafter.vocab_size * d * width
    rows = config.scheduler.max_sequences * drafter.block_size
    inside = 4 * d + 2 * (q + kv) + 3 * drafter.intermediate_size
    activations = rows * (inside * width + 2 * drafter.vocab_size * 4)
    path_head = drafter.path_parameters * width if config.drafter.path_head else 0
    if path_head:  # each candidate's two factors; its log-prob after every one before it, and a copy
        top_k, slots = config.tree.top_k, config.scheduler.max_sequences * drafter.horizon
        activations += slots * top_k * 2 * (drafter.path_rank + top_k) * 4
    return Drafter(
        parameters=layers + fusion,
        layer_parameters=layers,
        weights=(layers + fusion) * width,
        path_head=path_head,
        ends=end if target.tied else 2 * end,
        lm_head=end,
        context_per_token=2 * drafter.num_layers * kv * width,
        activations=activations,
    )


def _loads(config: AppConfig, weights: int, step: int, kv: int, drafter: Drafter | None) -> tuple[Load, ...]:
    """A CPU machine holds every rank and the drafter; GPUs hold a rank each, and the drafter's is shared or its own."""
    ranks, on_gpu = config.verifier.tensor_parallel_size, config.verifier.device == "cuda"
    process = FIXED if on_gpu else 0
    verifier = {"target weights": weights, "target activations": step, "fixed": process}
    drafts: dict[str, int] = {}
    context = 0
    if drafter:
        drafts = {"drafter weights": drafter.weights, "drafter ends": drafter.ends}
        drafts |= {"drafter path head": drafter.path_head} if drafter.path_head else {}
        drafts |= {"drafter activations": drafter.activations, "drafter fixed": process}
        context = CONTEXT_SLACK * drafter.context_per_token
    if not on_gpu:
        whole = {name: ranks * amount for name, amount in verifier.items()} | drafts
        return (Load("this machine", {k: v for k, v in whole.items() if v}, ranks * kv + context),)
    rank = Load(f"{ranks} verifier GPUs" if ranks > 1 else "verifier GPU", verifier, kv)
    if not drafter or config.drafter.device == "cpu":
        return (rank,)
    if config.drafter.num_gpus == 1:
        return rank, Load("drafter GPU", drafts, context)
    shared = Load("verifier + drafter GPU", verifier | drafts, kv + context)
    return (shared,) if ranks == 1 else (shared, Load(f"{ranks - 1} verifier GPUs", verifier, kv))
