"""The CUDA library's C functions, called with ctypes. Knows kdtree.h, not torch.

Structures and signatures repeat kdtree.h field by field; `load` refuses a library of another ABI version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

ABI_VERSION = 2
MAX_K = 1024
MAX_BUDGET = 1023
MAX_LEVELS = 64
MAX_PATH_K = 128
MAX_CACHES = 128

UNSUPPORTED_SHAPE = 2  # a status

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KERNEL_AUTO, KERNEL_PORTABLE, KERNEL_HOPPER, KERNEL_PORTABLE_SMALL = range(4)


class TopkInput(Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("row_stride", c_int64),
        *((name, c_int32) for name in ("dtype", "rows", "vocab", "k", "first_id")),
    ]


class BuildInput(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logprobs", "ids", "root", "seq_len", "budget")),
        *((name, c_int32) for name in ("batch", "levels", "k", "max_budget")),
    ]


class PathInput(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("first", "conditional", "ids", "root", "seq_len", "budget")),
        *((name, c_int32) for name in ("batch", "levels", "k", "max_budget")),
    ]


class Tree(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "parent", "depth", "position", "first_child", "next_sibling")),
        *((name, c_void_p) for name in ("ancestors", "n_nodes", "score")),
    ]


class Acceptance(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cases", "hits", "edges")),
        *((name, c_int32) for name in ("kinds", "depths", "edges_count")),
        ("prior", c_float),
    ]


class Prices(Structure):
    _fields_ = [*((name, c_void_p) for name in ("kind", "luck", "most", "price", "at", "cost")), ("knots", c_int32)]


class Cache(Structure):
    _fields_ = [
        ("base", c_void_p),
        ("layer_stride", c_int64),
        ("slot_stride", c_int64),
        ("layers", c_int32),
        ("row_bytes", c_int32),
    ]


class Rows(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("row_offsets", "q_len", "seq_len", "page_table", "causal", "ancestors")),
        *((name, c_int32) for name in ("sequences", "total_rows", "pages", "page_size", "ancestor_words")),
    ]


class Attn(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "v_dim", "dtype", "split", "kernel")),
        ("scale", c_float),
    ]


class AttnTensors(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k_cache", "v_cache")),
        *((name, c_int64) for name in ("k_slot_stride", "v_slot_stride", "slots")),
        *((name, c_void_p) for name in ("out", "lse")),
    ]


_SPACE = (c_void_p, c_size_t)  # a workspace or plan and its bytes
_SIGNATURES: dict[str, tuple] = {
    "kdtree_topk_logprobs_workspace": (POINTER(TopkInput), POINTER(c_size_t)),
    "kdtree_topk_logprobs": (POINTER(TopkInput), c_void_p, c_void_p, *_SPACE, c_void_p),
    "kdtree_topk_partial": (POINTER(TopkInput), c_void_p, c_void_p, c_void_p, *_SPACE, c_void_p),
    "kdtree_topk_merge": (*[c_void_p] * 3, *[c_int32] * 3, c_void_p, c_void_p, c_void_p),
    "kdtree_share_noise": (*[c_void_p] * 5, *[c_int32] * 3, *[c_void_p] * 3),
    "kdtree_share_noise_path": (*[c_void_p] * 6, *[c_int32] * 3, *[c_void_p] * 3),
    "kdtree_tree_build_workspace": (POINTER(BuildInput), POINTER(c_size_t)),
    "kdtree_tree_build": (POINTER(BuildInput), POINTER(Tree), *_SPACE, c_void_p),
    "kdtree_tree_build_path_workspace": (POINTER(PathInput), POINTER(c_size_t)),
    "kdtree_tree_build_path": (POINTER(PathInput), POINTER(Tree), *_SPACE, c_void_p),
    "kdtree_tree_select_workspace": (c_int32, c_int32, POINTER(c_size_t)),
    "kdtree_tree_select": (
        *(POINTER(Tree), c_int32, c_int32, c_int32, POINTER(Acceptance), POINTER(Prices)),
        *(*[c_void_p] * 4, *_SPACE, c_void_p),
    ),
    "kdtree_tree_learn": (
        *(POINTER(Acceptance), *[c_void_p] * 4, c_int32, c_void_p, c_int32, c_int32, c_float, c_void_p),
    ),
    "kdtree_tree_accept": (c_void_p, POINTER(Tree), *[c_int32] * 3, *[c_void_p] * 4),
    "kdtree_kv_compact": (
        *(POINTER(Cache), c_int32, c_void_p, c_int32, c_int32),
        *(c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p),
    ),
    "kdtree_verify_attn_plan_size": (POINTER(Rows), POINTER(Attn), POINTER(c_size_t)),
    "kdtree_verify_attn_plan": (POINTER(Rows), POINTER(Attn), *_SPACE, c_void_p),
    "kdtree_verify_attn_workspace": (POINTER(Rows), POINTER(Attn), POINTER(c_size_t)),
    "kdtree_verify_attn": (POINTER(Rows), POINTER(Attn), POINTER(AttnTensors), c_void_p, *_SPACE, c_void_p),
}


class KernelError(RuntimeError):
    """A C function refused its arguments or a launch failed; `status` is what it returned (kdtree.h)."""

    def __init__(self, function: str, status: int, reason: str) -> None:
        super().__init__(f"{function} returned {status}: {reason}")
        self.status = status


class Library:
    """A loaded libkdtree_kernels_c.so."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be loaded, RuntimeError where it has another ABI version."""
        self._lib = ctypes.CDLL(str(path))
        self._lib.kdtree_abi_version.argtypes = ()
        self._lib.kdtree_status_string.argtypes, self._lib.kdtree_status_string.restype = (c_int32,), c_char_p
        if (version := self._lib.kdtree_abi_version()) != ABI_VERSION:
            raise RuntimeError(f"{path} has ABI version {version}; this program needs {ABI_VERSION}. Build it again.")
        for name, arguments in _SIGNATURES.items():
            getattr(self._lib, name).argtypes = arguments

    def call(self, function: str, *arguments: object) -> None:
        """Enqueues one operation; structures go by reference. Raises KernelError for any status but 0."""
        self.bound(function, *arguments)()

    def bound(self, function: str, *arguments: object) -> Callable[..., None]:
        """`call` for later, when the operation's first arguments are known, those that are missing here."""
        run, name = getattr(self._lib, f"kdtree_{function}"), f"kdtree_{function}"
        last = [byref(a) if isinstance(a, Structure) else a for a in arguments]

        def enqueue(*first: object) -> None:
            if status := run(*first, *last):
                raise KernelError(name, status, self._lib.kdtree_status_string(status).decode())

        return enqueue

    def size(self, function: str, *arguments: Structure | int) -> int:
        """What one of the functions gives that say how many bytes a workspace or plan needs."""
        bytes_needed = c_size_t()
        self.call(function, *arguments, byref(bytes_needed))
        return bytes_needed.value
