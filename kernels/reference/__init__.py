"""The definition of each operation, readable, in torch and Python. It is also what serves on the CPU."""

from ddtree.kernels.reference.kv_compact import kv_compact
from ddtree.kernels.reference.share_noise import share_noise, share_noise_path
from ddtree.kernels.reference.topk_logprobs import topk_logprobs, topk_merge, topk_partial
from ddtree.kernels.reference.tree_accept import tree_accept
from ddtree.kernels.reference.tree_build import tree_build, tree_builder
from ddtree.kernels.reference.tree_build_path import tree_build_path
from ddtree.kernels.reference.tree_select import tree_learn, tree_select
from ddtree.kernels.reference.verify_attn import verify_attn, verify_attn_mla

__all__ = [
    "kv_compact",
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
    "verify_attn",
    "verify_attn_mla",
]
