"""The round loop of a configuration, which peers are to be given to. Knows neither peers nor who runs it."""

from __future__ import annotations

from ddtree.deployments.budgets import Budgets
from ddtree.deployments.config import AppConfig
from ddtree.deployments.costs import Costs
from ddtree.deployments.models import Models
from ddtree.deployments.round_loop import Emit, RoundLoop
from ddtree.deployments.scheduler import Limits, Scheduler
from ddtree.deployments.sizing import step_rows
from ddtree.verifier.pages import PageAllocator


def assemble(config: AppConfig, models: Models, emit: Emit) -> tuple[RoundLoop, Budgets | None]:
    """The loop, with a scheduler whose pool is still to be given (`take_pool`), and its budgets where there is a drafter."""
    max_positions = min([models.max_context] + ([models.drafter.max_positions] if models.drafter else []))
    limits = Limits(
        max_sequences=config.scheduler.max_sequences,
        max_waiting=config.scheduler.max_waiting,
        prefill_rows=config.scheduler.prefill_rows,
        max_positions=max_positions,
        horizon=models.horizon,
        rebuild_window=config.drafter.rebuild_window,
        prefix_cache=config.verifier.prefix_cache,
    )
    budgets = None
    if models.drafter:
        costs = Costs(step_rows(config)[0], limits.max_sequences)
        budgets = Budgets(costs, config.tree.max_budget, models.horizon, config.verifier.device)
    loop = RoundLoop(
        Scheduler(PageAllocator(1, config.verifier.page_size), limits),
        emit,
        config.verifier.device,
        shared_noise=config.tree.shared_noise,
        overlap=config.scheduler.overlap,
        budgets=budgets,
    )
    return loop, budgets
