"""`ddtree plan`: size a configuration on paper. Reads JSON files, computes values; the printing is plan_view's.

Sizes come from the model's own config.json where it is on this machine, else from the facts in configs/shapes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddtree.deployments.config import AppConfig, load, read_document
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.gpus import GPUS, Gpu
from ddtree.deployments.pods import count
from ddtree.deployments.roofline import ALL_REDUCE_S, BATCHES, CONTEXTS, MESSAGES_S, Point, Roofline
from ddtree.deployments.shapes import facts
from ddtree.deployments.sizing import Memory, size
from ddtree.deployments.target_shape import TargetShape
from ddtree.drafter.config import DrafterConfig, DrafterInfo, path_head_size

GIB = 2**30
REMEDY = "give its config.json with --{}-config FILE"
ACCEPTANCE_LENGTH = (
    4.0  # assumed; SmolLM2 with its drafter at budget 16 gained 3.8 tokens a round (benchmarks/README.md)
)
AUTO_BUDGET = 16  # assumed where the server chooses


@dataclass(frozen=True)
class PlanOptions:
    """What the command line may say besides the file."""

    gpu: str | None = None  # instead of hardware.gpu
    gpu_memory_gib: float | None = None  # instead of what the kind has
    acceptance_length: float = ACCEPTANCE_LENGTH
    target_config: Path | None = None  # a config.json
    drafter_config: Path | None = None
    messages_s: float = MESSAGES_S


@dataclass(frozen=True)
class Plan:
    """Everything the report says."""

    config: str
    target: str
    target_facts: str  # where its sizes were read
    drafter: str | None
    drafter_facts: str | None
    memory: Memory
    gpu: Gpu | None
    gpus: int  # of a pod
    pods: int
    budget: int  # tree nodes
    memory_fraction: float  # of each GPU, that may be filled
    memory_per_gpu: int  # bytes of it; 0 on a CPU
    kv_tokens: int
    kv_tokens_by_gpu: dict[str, int]
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.memory.one_sequence

    @property
    def hardware(self) -> str:
        """One sentence: what it needs."""
        need = self.memory.smallest_budget / GIB
        needs = f"is {self.pods} pods, each of which needs" if self.pods > 1 else "needs"
        if self.gpu is None:
            return f"{needs} a machine with {need:.1f} GiB for the models and their caches, Ray's processes aside, and no GPU"
        tokens = self.memory.kv_tokens_asked or self.memory.one_sequence
        why = "as configured" if self.memory.kv_tokens_asked else "the longest sequence and its tree"
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs of one host"
        return (
            f"{needs} {gpus} with at least {need / self.memory_fraction:.1f} GiB{' each' if self.gpus > 1 else ''}: "
            f"{need:.1f} GiB to hold {tokens:,} tokens ({why}) at gpu_memory_fraction {self.memory_fraction:g}; "
            f"{self.gpu.name} has {self.gpu.memory / GIB:.1f} GiB"
        )


def make_plan(path: Path, options: PlanOptions | None = None) -> Plan:
    """Plan the deployment of a Serve config file. Raises ValueError in one sentence that says what to do."""
    options, config = options or PlanOptions(), load(path)
    pods = count(read_document(path), str(path), config.drafter.checkpoint is not None)
    sizes, source = facts(config.target.model, "target", REMEDY.format("target"), options.target_config)
    target = TargetShape.from_config(sizes, source)
    drafter, drafter_source = _drafter(config, target, options)
    memory = size(config, target, drafter)
    gpu = _gpu(config, options)
    fraction, page = config.verifier.gpu_memory_fraction, config.verifier.page_size
    budget = int(fraction * gpu.memory) if gpu else 0
    tokens = memory.kv_tokens(budget, page) if gpu else memory.kv_tokens_asked // page * page
    by_gpu = {name: memory.kv_tokens(int(fraction * kind.memory), page) for name, kind in GPUS.items()} if gpu else {}
    return Plan(
        config=str(path),
        target=config.target.model,
        target_facts=source,
        drafter=config.drafter.checkpoint,
        drafter_facts=drafter_source,
        memory=memory,
        gpu=gpu,
        gpus=config.gpus_needed,
        pods=pods,
        budget=_budget(config),
        memory_fraction=fraction,
        memory_per_gpu=budget,
        kv_tokens=tokens,
        kv_tokens_by_gpu=by_gpu,
        points=_points(config, target, drafter, memory, gpu, tokens, options) if gpu else (),
        notes=tuple(_notes(config, target, memory, gpu, tokens, options, pods)),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, derived figures included."""
    content = asdict(plan) | {"fits": plan.fits, "hardware": plan.hardware}
    content["memory"]["weight_bytes_per_gpu"] = plan.memory.weight_bytes_per_gpu
    content["memory"]["smallest_budget"] = plan.memory.smallest_budget
    for given, point in zip(content["points"], plan.points, strict=True):
        given["plain"]["seconds"], given["speculative"]["seconds"] = point.plain.seconds, point.speculative.seconds
        given |= {"break_even": point.break_even, "speedup": point.speedup, "tokens_per_s": point.tokens_per_s}
    return content


def _drafter(
    config: AppConfig, target: TargetShape, options: PlanOptions
) -> tuple[DrafterInfo, str] | tuple[None, None]:
    name = config.drafter.checkpoint
    if name is None:
        return None, None
    if config.verifier.device == "cuda" and config.drafter.device == "cpu":
        raise ConfigError("a drafter on a cpu beside a target on GPUs cannot be planned: set drafter.device cuda")
    sizes, source = facts(name, "drafter", REMEDY.format("drafter"), options.drafter_config)
    try:
        known = DrafterConfig.from_dict(sizes)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    rank, parameters = path_head_size(Path(source).parent)
    drafter = DrafterInfo(
        **vars(known),
        checkpoint_dir=Path(name),
        path_head=bool(parameters),
        path_rank=rank,
        path_parameters=parameters,
    )
    drafter.check_target(target.hidden, target.vocab, target.layers, config.target.model)
    return drafter, source


def _gpu(config: AppConfig, options: PlanOptions) -> Gpu | None:
    if config.verifier.device == "cpu":
        if options.gpu or options.gpu_memory_gib:
            raise ConfigError("this deployment runs on a cpu: --gpu and --gpu-memory-gib need verifier.device cuda")
        return None
    name = options.gpu or config.hardware.gpu
    if name not in GPUS:
        given = f"unknown GPU '{name}'" if name else "no GPU is named"
        raise ConfigError(f"{given}: give --gpu or hardware.gpu as one of {', '.join(GPUS)}")
    memory = int(options.gpu_memory_gib * GIB) if options.gpu_memory_gib else GPUS[name].memory
    return replace(GPUS[name], memory=memory)


def _budget(config: AppConfig) -> int:
    return AUTO_BUDGET if config.tree.budget == "auto" else config.tree.budget


def _points(
    config: AppConfig,
    target: TargetShape,
    drafter: DrafterInfo | None,
    memory: Memory,
    gpu: Gpu,
    tokens: int,
    options: PlanOptions,
) -> tuple[Point, ...]:
    """Rounds at every load. Without a drafter both kinds are plain."""
    accepted, budget = (options.acceptance_length, _budget(config)) if drafter else (1.0, 0)
    if not 1 <= accepted <= (drafter.block_size if drafter else 1):
        most = drafter.block_size if drafter else 1
        raise ConfigError(
            f"--acceptance-length {accepted:g} is impossible: a round gains 1 to {most} tokens with this drafter"
        )
    roofline = Roofline(
        gpu=gpu,
        target=target,
        ranks=config.verifier.tensor_parallel_size,
        dtype=config.target.dtype,
        drafter=memory.drafter,
        block=drafter.block_size if drafter else 0,
        windows=tuple(span.window for span in drafter.spans) if drafter else (),
        messages=options.messages_s,
    )
    loads = ((batch, context) for batch in BATCHES for context in CONTEXTS if context <= memory.max_context)
    return tuple(roofline.point(batch, context, budget, accepted, tokens) for batch, context in loads)


def _notes(
    config: AppConfig,
    target: TargetShape,
    memory: Memory,
    gpu: Gpu | None,
    tokens: int,
    options: PlanOptions,
    pods: int,
) -> list[str]:
    """What the figures rest on, and what in the file does not go with them."""
    notes = []
    if pods > 1:
        notes.append(f"all figures are of one pod; {pods} share nothing and serve {pods} times the requests")
    if target.vision:
        notes.append("the language model alone: the vision tower is not loaded and not counted")
    if "auto" in (config.target.dtype, config.drafter.dtype):
        notes.append("dtype auto is taken as bfloat16")
    if gpu is None:
        return [*notes, "no round times: there is no roofline for a CPU, measure it with `ddtree bench`"]
    if target.experts:
        notes.append(
            "experts are taken to be chosen evenly and independently; the rows of one text choose more alike and read less"
        )
    if not gpu.measured:
        notes.append(f"{gpu.name}: datasheet rates times what an H200 reaches of its own; not measured")
    notes.append(
        f"round times are floors; {options.messages_s * 1e3:g} ms of control messages a round (measured on one machine) "
        + (
            f"and {ALL_REDUCE_S * 1e6:g} µs an all-reduce (assumed) "
            if config.verifier.tensor_parallel_size > 1
            else ""
        )
        + "are in them"
    )
    drafter, share = memory.drafter, config.drafter.num_gpus
    if drafter:
        if config.tree.budget == "auto":
            notes.append(f"budget auto is taken as {AUTO_BUDGET}; the server takes what pays under each load")
        notes.append(
            f"acceptance length {options.acceptance_length:g} is an assumption: measure it with `ddtree bench`"
        )
        held = next(load for load in memory.loads if "drafter weights" in load.fixed)
        mine = sum(size for name, size in held.fixed.items() if name.startswith("drafter"))
        mine += tokens * (held.per_token - (memory.kv_bytes_per_token if "target weights" in held.fixed else 0))
        if mine > share * gpu.memory:
            notes.append(
                f"with all tokens in use the drafter fills {mine / gpu.memory:.2f} of its GPU, and drafter.num_gpus says "
                f"{share:g}: raise it"
            )
    return notes
