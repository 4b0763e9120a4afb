"""Stage costs on paper: those of `ddtree plan`'s roofline, for targets that no machine at hand can hold. Nothing is measured.

Times are floors. The acceptance is assumed: `ddtree plan`'s length at the configuration's budget, and at other budgets
in the proportions that SmolLM2's drafter showed.
"""

from __future__ import annotations

from pathlib import Path

from ddtree.deployments.commands.plan import ACCEPTANCE_LENGTH, AUTO_BUDGET
from ddtree.deployments.config import AppConfig, load
from ddtree.deployments.costs import knots
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.gpus import GPUS
from ddtree.deployments.roofline import Roofline
from ddtree.deployments.shapes import facts
from ddtree.deployments.sizing import size
from ddtree.deployments.target_shape import TargetShape
from ddtree.drafter.config import DrafterConfig, DrafterInfo

from .profile import Acceptance, Knots, Limits, Profile, StageCosts

CONTEXT = 4096  # tokens at which seconds per token of context are taken
# Tokens a round by budget, benchmarks/results/smollm2-135m-acceptance-offline.json (validation).
LENGTHS = {8: 3.712, 16: 4.181, 32: 4.533, 63: 4.877}


def profile(path: Path) -> Profile:
    """Of a Serve config file that names its GPUs and a drafter. Raises ConfigError."""
    config = load(path)
    sizes, source = facts(config.target.model, "target", "give a directory with its config.json")
    target = TargetShape.from_config(sizes, source)
    drafter = _drafter(config)
    memory = size(config, target, drafter)
    if config.hardware.gpu is None or memory.drafter is None:
        raise ConfigError(
            f"{path} has no GPUs in hardware.gpu, so there is no roofline: give measured costs, as `check` writes"
        )
    gpu, tree, scheduler = GPUS[config.hardware.gpu], config.tree, config.scheduler
    windows = tuple(span.window for span in drafter.spans)
    roofline = Roofline(
        gpu,
        target,
        config.verifier.tensor_parallel_size,
        config.target.dtype,
        memory.drafter,
        drafter.block_size,
        windows,
    )
    budget = AUTO_BUDGET if tree.budget == "auto" else tree.budget
    fit = memory.kv_tokens(int(config.verifier.gpu_memory_fraction * gpu.memory), config.verifier.page_size)
    depth = drafter.block_size - 1
    return Profile(
        name=path.stem,
        source=f"computed: the roofline of `ddtree plan` for {path.name}, floors on {config.hardware.gpu}; "
        f"acceptance length {ACCEPTANCE_LENGTH:g} at budget {budget} is assumed",
        costs=costs(
            roofline, scheduler.max_sequences, scheduler.max_sequences * (1 + tree.max_budget) + scheduler.prefill_rows
        ),
        acceptance=assumed(budget, depth),
        limits=Limits(
            max_sequences=scheduler.max_sequences,
            max_waiting=scheduler.max_waiting,
            prefill_rows=scheduler.prefill_rows,
            rebuild_window=config.drafter.rebuild_window,
            horizon=depth,
            max_budget=tree.max_budget,
            kv_tokens=memory.kv_tokens_asked or fit,
        ),
        budget=tree.budget,
    )


def costs(roofline: Roofline, sequences: int, rows: int) -> StageCosts:
    """`sequences` and `rows` of the largest step."""
    empty = [(n, roofline.step(batch=1, rows=n, context=0, accepted=0)) for n in knots(rows)]
    drafts: Knots = [(n, roofline.step(n, n, 0, ACCEPTANCE_LENGTH).draft) for n in knots(sequences)]
    return StageCosts(
        step=[(n, step.matrices + step.experts + step.all_reduce) for n, step in empty],
        draft=drafts,
        rest=[(1, roofline.messages)],
        per_read=roofline.step(batch=1, rows=0, context=CONTEXT, accepted=0).attention / CONTEXT,
        per_attended=roofline.step(batch=0, rows=1, context=CONTEXT, accepted=0).attention / CONTEXT,
        draft_per_read=roofline.step(1, 1, CONTEXT, ACCEPTANCE_LENGTH).draft_attention / CONTEXT,
    )


def assumed(budget: int, depth: int) -> Acceptance:
    """With `ddtree plan`'s acceptance length at this budget."""
    here = ACCEPTANCE_LENGTH / Acceptance.geometric(LENGTHS, max(depth, 15)).tokens(budget)
    return Acceptance.geometric({nodes: min(length * here, depth + 1) for nodes, length in LENGTHS.items()}, depth)


def _drafter(config: AppConfig) -> DrafterInfo:
    name = config.drafter.checkpoint
    if name is None:
        raise ConfigError("there is nothing to ask of drafters where drafter.checkpoint is null")
    sizes, _ = facts(name, "drafter", "give a directory with its config.json")
    return DrafterInfo(**vars(DrafterConfig.from_dict(sizes)), checkpoint_dir=Path(name))
