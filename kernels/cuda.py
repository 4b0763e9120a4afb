"""Every operation on CUDA tensors: shapes and strides turned into calls of the C library. Knows no algorithm.

Arguments were checked by the public entry points. What the kernels do not serve (float32 attention, head sizes outside
the support matrix of docs/kernels.md, trees above 1023 nodes) runs on the reference, which accepts CUDA tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ddtree.kernels import build, native, reference
from ddtree.kernels.native import Library
from ddtree.kernels.rows import Rows
from ddtree.kernels.selection import MEMORY, PRIOR, AcceptanceTable, Prices, Selection
from ddtree.kernels.tree import AcceptedPath, DraftTree

_DTYPES = {
    torch.float32: native.FLOAT32,
    torch.bfloat16: native.BFLOAT16,
    torch.float16: native.FLOAT16,
}
_GQA_DIMS = (64, 96, 128, 256)
_MLA_DIMS = (576, 512)
_MAX_SEQUENCES = 1024


@cache
def library() -> Library:
    """The C library for this machine's GPUs, compiled on first use. Raises BuildError where that is impossible."""
    majors = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    names = {(9, 0): "90a-real", (10, 0): "100-real", (12, 0): "120-real"}
    return Library(build.build(";".join(sorted({names.get(major, "80-virtual") for major in majors}))))


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _int32(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.int32, device=device)


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)  # torch aligns every allocation to 512 bytes


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if k > native.MAX_K:
        return reference.topk_logprobs(logits, k)
    logprobs, ids = torch.empty(logits.shape[0], k, device=logits.device), _int32((logits.shape[0], k), logits.device)
    _topk("topk_logprobs", logits, k, 0, logprobs, ids)
    return logprobs, ids


def topk_partial(logits: Tensor, k: int, first_id: int) -> tuple[Tensor, Tensor, Tensor]:
    if k > native.MAX_K:
        return reference.topk_partial(logits, k, first_id)
    rows, device = logits.shape[0], logits.device
    values, ids, lse = torch.empty(rows, k, device=device), _int32((rows, k), device), torch.empty(rows, device=device)
    _topk("topk_partial", logits, k, first_id, values, ids, lse)
    return values, ids, lse


def _topk(function: str, logits: Tensor, k: int, first_id: int, *outputs: Tensor) -> None:
    logits = logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()
    sizes = (logits.stride(0), _DTYPES[logits.dtype], *logits.shape, k, first_id)
    with torch.cuda.device(logits.device):
        given = native.TopkInput(logits.data_ptr(), *sizes)
        space = _bytes(library().size("topk_logprobs_workspace", given), logits.device)
        pointers = (x.data_ptr() for x in outputs)
        library().call(function, given, *pointers, space.data_ptr(), len(space), _stream(logits))


def topk_merge(values: Tensor, ids: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    parts, rows, k = values.shape
    if k > native.MAX_K:
        return reference.topk_merge(values, ids, lse)
    given = [x.contiguous() for x in (values, ids, lse)]
    logprobs, merged_ids = torch.empty(rows, k, device=values.device), _int32((rows, k), values.device)
    with torch.cuda.device(values.device):
        pointers = (x.data_ptr() for x in given)
        outputs = (logprobs.data_ptr(), merged_ids.data_ptr())
        library().call("topk_merge", *pointers, parts, rows, k, *outputs, _stream(values))
    return logprobs, merged_ids


def share_noise(logprobs: Tensor, ids: Tensor, seed: Tensor, seq_len: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if logprobs.shape[2] > native.MAX_K:
        return reference.share_noise(logprobs, ids, seed, seq_len, scale)
    inputs = [x.contiguous() for x in (logprobs, ids, seed, seq_len, scale)]
    shared, named = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    with torch.cuda.device(logprobs.device):
        pointers = (x.data_ptr() for x in inputs)
        outputs = (shared.data_ptr(), named.data_ptr())
        library().call("share_noise", *pointers, *logprobs.shape, *outputs, _stream(logprobs))
    return shared, named


def share_noise_path(
    first: Tensor, conditional: Tensor, ids: Tensor, seed: Tensor, seq_len: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    if ids.shape[2] > native.MAX_PATH_K:
        return reference.share_noise_path(first, conditional, ids, seed, seq_len, scale)
    inputs = [x.contiguous() for x in (first, conditional, ids, seed, seq_len, scale)]
    shared, below = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    with torch.cuda.device(ids.device):
        pointers = (x.data_ptr() for x in inputs)
        outputs = (shared.data_ptr(), below.data_ptr())
        library().call("share_noise_path", *pointers, *ids.shape, *outputs, _stream(ids))
    return shared, below


def tree_build(
    logprobs: Tensor,
    ids: Tensor,
    root: Tensor,
    seq_len: Tensor,
    budget: Tensor,
    *,
    max_budget: int,
    out: DraftTree | None = None,
) -> DraftTree:
    (batch, levels, k), device = logprobs.shape, logprobs.device
    tree = out or DraftTree.allocate(batch, levels, max_budget, partial(_int32, device=device))
    return tree_builder((batch, levels, k), root, seq_len, budget, max_budget=max_budget, out=tree)(logprobs, ids)


def tree_builder(
    shape: tuple[int, int, int], root: Tensor, seq_len: Tensor, budget: Tensor, *, max_budget: int, out: DraftTree
) -> Callable[[Tensor, Tensor], DraftTree]:
    if max_budget > native.MAX_BUDGET or shape[1] > native.MAX_LEVELS:
        return reference.tree_builder(shape, root, seq_len, budget, max_budget=max_budget, out=out)
    return _TreeBuilder(shape, (root, seq_len, budget), max_budget, out)


class _TreeBuilder:
    def __init__(self, shape: tuple[int, int, int], numbers: Sequence[Tensor], max_budget: int, out: DraftTree) -> None:
        self._device, self._out = out.tokens.device, out
        self._held = [x.contiguous() for x in numbers], _fields(out)  # to which the structures have pointers
        self._given = native.BuildInput(0, 0, *(x.data_ptr() for x in self._held[0]), *shape, max_budget)
        made = native.Tree(*(x.data_ptr() for x in self._held[1]))
        with torch.cuda.device(self._device):
            self._space = _bytes(library().size("tree_build_workspace", self._given), self._device)
        space = (self._space.data_ptr(), len(self._space))
        self._enqueue = library().bound("tree_build", self._given, made, *space, _stream(out.tokens))

    def __call__(self, logprobs: Tensor, ids: Tensor) -> DraftTree:
        logprobs, ids = logprobs.contiguous(), ids.contiguous()
        self._given.logprobs, self._given.ids = logprobs.data_ptr(), ids.data_ptr()
        with torch.cuda.device(self._device):
            self._enqueue()
        return self._out


def tree_build_path(
    first: Tensor,
    conditional: Tensor,
    ids: Tensor,
    root: Tensor,
    seq_len: Tensor,
    budget: Tensor,
    *,
    max_budget: int,
    out: DraftTree | None = None,
) -> DraftTree:
    (batch, levels, k), device = ids.shape, ids.device
    given = [x.contiguous() for x in (first, conditional, ids, root, seq_len, budget)]
    if max_budget > native.MAX_BUDGET or levels > native.MAX_LEVELS or k > native.MAX_PATH_K:
        return reference.tree_build_path(*given, max_budget=max_budget, out=out)
    tree = out or DraftTree.allocate(batch, levels, max_budget, partial(_int32, device=device))
    made = native.Tree(*(x.data_ptr() for x in _fields(tree)))
    call = native.PathInput(*(x.data_ptr() for x in given), batch, levels, k, max_budget)
    with torch.cuda.device(device):
        space = _bytes(library().size("tree_build_path_workspace", call), device)
        library().call("tree_build_path", call, made, space.data_ptr(), len(space), _stream(ids))
    return tree


def _fields(tree: DraftTree) -> list[Tensor]:
    return [getattr(tree, field[0]).contiguous() for field in native.Tree._fields_]


def tree_accept(y: Tensor, tree: DraftTree, *, out: AcceptedPath | None = None) -> AcceptedPath:
    batch, nodes = tree.tokens.shape
    if nodes > native.MAX_BUDGET + 1:
        return reference.tree_accept(y, tree, out=out)
    out = out or AcceptedPath.allocate(batch, tree.max_depth, partial(_int32, device=y.device))
    y, fields = y.contiguous(), _fields(tree)
    given = native.Tree(*(x.data_ptr() for x in fields))
    outputs = (out.path.data_ptr(), out.n_accepted.data_ptr(), out.bonus.data_ptr())
    with torch.cuda.device(y.device):
        library().call("tree_accept", y.data_ptr(), given, batch, nodes, tree.max_depth, *outputs, _stream(y))
    return out


def tree_select(tree: DraftTree, table: AcceptanceTable, prices: Prices) -> Selection:
    (batch, nodes), device = tree.tokens.shape, tree.tokens.device
    costs = [getattr(prices, field[0]).contiguous() for field in native.Prices._fields_[:-1]]
    gains = torch.empty(batch, nodes - 1, device=device)
    found = Selection(gains, _int32(gains.shape, device), _int32((batch,), device), torch.empty(batch, device=device))
    outputs = (x.data_ptr() for x in (found.gains, found.cells, found.nodes, found.expected))
    given = native.Tree(*(getattr(tree, field[0]).data_ptr() for field in native.Tree._fields_))
    with torch.cuda.device(device):
        space = _bytes(library().size("tree_select_workspace", batch, nodes), device)
        known = (_acceptance(table), native.Prices(*(x.data_ptr() for x in costs), len(costs[-1])))
        last = (*outputs, space.data_ptr(), len(space), _stream(tree.tokens))
        try:
            library().call("tree_select", given, batch, nodes, tree.max_depth, *known, *last)
        except native.KernelError as error:
            if error.status != native.UNSUPPORTED_SHAPE:
                raise
            return reference.tree_select(tree, table, prices)
    return found


def tree_learn(table: AcceptanceTable, tree: DraftTree, selection: Selection, accepted: AcceptedPath) -> None:
    if tree.tokens.shape[1] > native.MAX_BUDGET + 1 or tree.tokens.shape[0] > _MAX_SEQUENCES:
        return reference.tree_learn(table, tree, selection, accepted)
    cells, parent, kept, path, lengths = (
        x.contiguous() for x in (selection.cells, tree.parent, selection.nodes, accepted.path, accepted.n_accepted)
    )
    last = (lengths.data_ptr(), *tree.tokens.shape, MEMORY, _stream(parent))
    with torch.cuda.device(parent.device):
        pointers = (x.data_ptr() for x in (cells, parent, kept, path))
        library().call("tree_learn", _acceptance(table), *pointers, tree.max_depth, *last)


def _acceptance(table: AcceptanceTable) -> native.Acceptance:
    kinds, levels, _, bins = table.cases.shape
    pointers = (x.data_ptr() for x in (table.cases, table.hits, table.edges))
    return native.Acceptance(*pointers, kinds, levels - 1, bins - 1, PRIOR)


def kv_compact(
    caches: Sequence[Tensor], page_table: Tensor, page_size: int, seq_len: Tensor, path: Tensor, n_accepted: Tensor
) -> None:
    moved = [_cache(cache) for cache in caches if cache.numel()]
    table, lengths, nodes, counts = (x.contiguous() for x in (page_table, seq_len, path, n_accepted))
    pages = (table.data_ptr(), table.shape[1], page_size)
    paths = (lengths.data_ptr(), nodes.data_ptr(), nodes.shape[1], counts.data_ptr(), table.shape[0])
    with torch.cuda.device(table.device):
        for first in range(0, len(moved), native.MAX_CACHES):
            part = moved[first : first + native.MAX_CACHES]
            array = (native.Cache * len(part))(*part)
            library().call("kv_compact", array, len(part), *pages, *paths, _stream(table))


def _cache(cache: Tensor) -> native.Cache:
    """One tensor [layers, pages, page_size, …] whose rows are contiguous."""
    size = cache.element_size()
    row = cache[0, 0, 0]
    if not row.is_contiguous():
        raise ValueError(f"caches of shape {list(cache.shape)} need contiguous rows; got strides {cache.stride()}.")
    strides = (cache.stride(0) * size, cache.stride(2) * size)
    return native.Cache(cache.data_ptr(), *strides, cache.shape[0], row.numel() * size)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What `kdtree_verify_attn_plan` made of some rows, and the workspace that calls with it share."""

    rows: native.Rows
    attn: native.Attn
    plan: Tensor
    workspace: Tensor
    held: tuple[Tensor, ...]  # the rows' tensors, to which `rows` has pointers


def verify_attn(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, *, scale: float) -> tuple[Tensor, Tensor]:
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] not in _GQA_DIMS or not _served(rows):
        return reference.verify_attn(q, k_cache, v_cache, rows, scale=scale)
    k_cache, v_cache = (_row_contiguous(cache) for cache in (k_cache, v_cache))
    dim = q.shape[2]
    return _attend(q, k_cache, v_cache, rows, (q.shape[1], k_cache.shape[2], dim, dim), scale, native.KERNEL_AUTO)


def verify_attn_mla(
    q: Tensor, kv_cache: Tensor, rows: Rows, *, scale: float, v_dim: int, kernel: int = native.KERNEL_AUTO
) -> tuple[Tensor, Tensor]:
    """`kernel` is for tests and benchmarks: one of native.KERNEL_…"""
    if q.dtype not in (torch.bfloat16, torch.float16) or (q.shape[2], v_dim) != _MLA_DIMS or not _served(rows):
        return reference.verify_attn_mla(q, kv_cache, rows, scale=scale, v_dim=v_dim)
    kv_cache = _row_contiguous(kv_cache)
    return _attend(q, kv_cache, kv_cache, rows, (q.shape[1], 1, q.shape[2], v_dim), scale, kernel)


def _served(rows: Rows) -> bool:
    return rows.q_len.shape[0] <= _MAX_SEQUENCES


def _row_contiguous(cache: Tensor) -> Tensor:
    """The cache itself where the kernels can read it in place: a slot's values in one piece, slots 16 bytes apart."""
    inner = cache[0, 0].is_contiguous() if cache.numel() else True
    return cache if inner and cache.stride(1) % 8 == 0 and cache.data_ptr() % 16 == 0 else cache.contiguous()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, shape: tuple[int, int, int, int], scale: float, kernel: int
) -> tuple[Tensor, Tensor]:
    q = q.contiguous()
    total, heads, v_dim = q.shape[0], shape[0], shape[3]
    out, lse = q.new_empty(total, heads, v_dim), torch.empty(total, heads, device=q.device)
    with torch.cuda.device(q.device):
        plan = rows.keep(("cuda", *shape, q.dtype, kernel), lambda: _plan(q, rows, shape, kernel))
        plan.attn.scale = scale
        inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr(), k.stride(1), v.stride(1), k.shape[0] * k.shape[1])
        tensors = native.AttnTensors(*inputs, out.data_ptr(), lse.data_ptr())
        space = (plan.workspace.data_ptr(), len(plan.workspace))
        library().call("verify_attn", plan.rows, plan.attn, tensors, plan.plan.data_ptr(), *space, _stream(q))
    return out, lse


def _plan(q: Tensor, rows: Rows, shape: tuple[int, int, int, int], kernel: int) -> _Plan:
    tensors = (rows.row_offsets, rows.q_len, rows.seq_len, rows.page_table, rows.causal, rows.ancestors)
    held = tuple(x.contiguous() for x in tensors)
    sizes = (rows.q_len.shape[0], q.shape[0], rows.page_table.shape[1], rows.page_size, rows.ancestors.shape[1])
    c_rows = native.Rows(*(x.data_ptr() for x in held), *sizes)
    attn = native.Attn(*shape, _DTYPES[q.dtype], 0, kernel, 0.0)
    plan = _bytes(library().size("verify_attn_plan_size", c_rows, attn), q.device)
    workspace = _bytes(library().size("verify_attn_workspace", c_rows, attn), q.device)
    library().call("verify_attn_plan", c_rows, attn, plan.data_ptr(), len(plan), _stream(q))
    return _Plan(c_rows, attn, plan, workspace, held)
