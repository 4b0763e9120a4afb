"""How large the messages of a round can be, from the configuration: what the outboxes are made for. Knows numbers only."""

from __future__ import annotations

from ddtree.deployments.config import AppConfig
from ddtree.deployments.mailbox import ALIGNMENT, Bound
from ddtree.deployments.models import Models
from ddtree.deployments.requests import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ddtree.deployments.sizing import step_rows
from ddtree.kernels.tree import ancestor_words

TENSORS = 48  # in a message, at most; each is aligned
NODE = 6 * 4  # bytes of a tree's node besides its ancestors
ROW = (
    4 + 4 + 8 + (4 + 4 + 4 + 4 + 8 + 4) + (4 + 4 + 4)
)  # bytes of a batch's row: token, position, slot, sampling, edits
TOKEN = 4 + 4 + 4  # bytes of a token's count or bias
WANTED = 4 + 4 + 4  # bytes of a row whose log-probabilities are wanted
LOGPROBS = (1 + MAX_LOGPROBS) * (4 + 4) + 4  # bytes of what comes of it
MASK = 4 + 4  # bytes of a row whose tokens a grammar masks, besides the mask


def sequence_pages(config: AppConfig, models: Models) -> int:
    """Pages of the longest sequence with its tree."""
    return -(-(models.max_context + config.tree.max_budget + 1) // config.verifier.page_size)


def of_verifier(config: AppConfig, models: Models, itemsize: int) -> Bound:
    """y, the features and the log-probabilities of every row. `itemsize`: bytes of a feature."""
    width = len(models.feature_layers) * models.target.hidden_size
    return _bound(
        step_rows(config)[0] * (4 + width * itemsize + LOGPROBS),
        f"{_rows(config)}, {width} features of {itemsize} bytes in each",
    )


def of_drafter(config: AppConfig, models: Models) -> Bound:
    """Log-probabilities and ids of every candidate; with a path head a log-probability after each of the depth before, too."""
    sequences, horizon, top_k = config.scheduler.max_sequences, models.horizon, config.tree.top_k
    limit = f"scheduler.max_sequences {sequences} × depth {horizon} × tree.top_k {top_k} candidates"
    by_parent = 4 * top_k if models.drafter and models.drafter.path_head and config.drafter.path_head else 0
    return _bound(sequences * horizon * top_k * (4 + 4 + by_parent), limit)


def of_router(config: AppConfig, models: Models) -> Bound:
    """A batch: per row its numbers and ancestor bits, per sequence a page table for the step, one for its commit, and its
    tree where that is built in the outbox."""
    nodes = config.tree.max_budget + 1
    words = ancestor_words(nodes)
    pages = sequence_pages(config, models) + 1
    sequence = 2 * 4 * pages + nodes * (4 + NODE + 4 * words) + 64
    if config.verifier.device == "cpu":  # to a GPU they travel in the letter
        sequence += TOKEN * (models.max_context + MAX_LOGIT_BIAS)
        sequence += nodes * (MASK + 4 * -(-models.target.vocab_size // 32))
    limit = f"{_rows(config)}, {words} words of ancestors in each, and {pages} pages a sequence"
    return _bound(step_rows(config)[0] * (ROW + WANTED + 4 * words) + config.scheduler.max_sequences * sequence, limit)


def _bound(size: int, limit: str) -> Bound:
    return Bound(size + TENSORS * ALIGNMENT, limit)


def _rows(config: AppConfig) -> str:
    scheduler, tree = config.scheduler, config.tree
    return (
        f"scheduler.prefill_rows {scheduler.prefill_rows} + scheduler.max_sequences {scheduler.max_sequences} × "
        f"(tree.max_budget {tree.max_budget} + 1) rows"
    )
