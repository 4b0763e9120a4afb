"""Draft-tree operations on tensors. Knows nothing of models, Ray or HTTP."""

from ddtree.kernels.kv_compact import kv_compact
from ddtree.kernels.reference.tree_select import select_nodes
from ddtree.kernels.rows import Rows
from ddtree.kernels.selection import AcceptanceTable, Prices, Selection
from ddtree.kernels.share_noise import share_noise, share_noise_path
from ddtree.kernels.topk_logprobs import topk_logprobs, topk_merge, topk_partial
from ddtree.kernels.tree import AcceptedPath, DraftTree
from ddtree.kernels.tree_accept import tree_accept, tree_walker
from ddtree.kernels.tree_build import tree_build, tree_builder
from ddtree.kernels.tree_build_path import tree_build_path
from ddtree.kernels.tree_select import tree_learn, tree_select
from ddtree.kernels.verify_attn import verify_attn, verify_attn_mla

__all__ = [
    "AcceptanceTable",
    "AcceptedPath",
    "DraftTree",
    "Prices",
    "Rows",
    "Selection",
    "kv_compact",
    "select_nodes",
    "share_noise",
    "share_noise_path",
    "topk_logprobs",
    "topk_merge",
    "topk_partial",
    "tree_accept",
    "tree_build",
    "tree_build_path",
    "tree_builder",
    "tree_learn",
    "tree_select",
    "tree_walker",
    "verify_attn",
    "verify_attn_mla",
]
