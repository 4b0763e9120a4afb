"""Draft-tree operations on tensors. Knows nothing of models, Ray or HTTP."""

from ddtree.kernels.kv_compact import kv_compact
from ddtree.kernels.rows import Rows
from ddtree.kernels.share_noise import share_noise
from ddtree.kernels.topk_logprobs import topk_logprobs, topk_merge, topk_partial
from ddtree.kernels.tree import AcceptedPath, DraftTree
from ddtree.kernels.tree_accept import tree_accept, tree_walker
from ddtree.kernels.tree_build import tree_build, tree_builder
from ddtree.kernels.verify_attn import verify_attn, verify_attn_mla

__all__ = [
    "AcceptedPath",
    "DraftTree",
    "Rows",
    "kv_compact",
    "share_noise",
    "topk_logprobs",
    "topk_merge",
    "topk_partial",
    "tree_accept",
    "tree_build",
    "tree_builder",
    "tree_walker",
    "verify_attn",
    "verify_attn_mla",
]
