"""A few small calls of every CUDA kernel, for compute-sanitizer, which makes them some hundred times slower.

    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python -m tests.kernels.sanitizer
    done

Results are compared with the reference too, so that a run that did nothing cannot look clean.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from ddtree.kernels import cuda, native, reference
from ddtree.kernels.tree import AcceptedPath, DraftTree

from .cases import Case, make
from .strategies import candidates, token_ids
from .test_tree_build_path import inputs as path_inputs
from .test_tree_build_path import random_rows
from .test_tree_select import check, moved, random_call

DEVICE = torch.device("cuda")


def same(actual: object, expected: object) -> None:
    for field in dataclasses.fields(expected):
        wanted = getattr(expected, field.name)
        if isinstance(wanted, Tensor):
            assert torch.equal(getattr(actual, field.name).cpu(), wanted), field.name


def topk() -> None:
    logits = torch.randn(3, 5001, generator=torch.Generator().manual_seed(0)).mul(4).round()
    for k in (1, 64, 300):
        assert torch.equal(cuda.topk_logprobs(logits.to(DEVICE), k)[1].cpu(), reference.topk_logprobs(logits, k)[1])


def trees() -> None:
    rng = np.random.default_rng(0)
    for levels, width, budget, kind in (
        (15, 64, 15, "peaky"),
        (15, 64, 63, "holes"),
        (7, 64, 255, "flat"),
        (15, 64, 1023, "rounded"),
    ):
        logprobs = torch.from_numpy(np.stack([candidates(rng, levels, width, kind) for _ in range(2)]))
        ids = torch.from_numpy(np.stack([token_ids(rng, levels, width) for _ in range(2)]))
        root, seq_len = torch.zeros(2, dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32)
        given = (logprobs, ids, root, seq_len, torch.tensor([budget, budget // 2], dtype=torch.int32))
        tree = cuda.tree_build(*(x.to(DEVICE) for x in given), max_budget=budget)
        expected = reference.tree_build(*given, max_budget=budget)
        same(tree, expected)
        accept(tree, expected)


def path_trees() -> None:
    rng = np.random.default_rng(0)
    for levels, width, budget, kind in ((15, 32, 63, "peaky"), (7, 64, 255, "holes"), (15, 100, 1023, "rounded")):
        given = path_inputs([random_rows(rng, levels, width, kind) for _ in range(2)], [budget, budget // 2])
        tree = cuda.tree_build_path(*(x.to(DEVICE) for x in given), max_budget=budget)
        same(tree, reference.tree_build_path(*given, max_budget=budget))


def accept(tree: DraftTree, expected: DraftTree) -> None:
    y = torch.zeros_like(expected.tokens)
    y.scatter_(1, expected.parent.clamp(min=0).long(), expected.tokens)  # every node wants one of its children
    same(cuda.tree_accept(y.to(DEVICE), tree), reference.tree_accept(y, expected))


def noise() -> None:
    rng = np.random.default_rng(0)
    for width in (7, 64, 700):
        logprobs = torch.from_numpy(np.stack([candidates(rng, 3, width, "holes") for _ in range(2)]))
        ids = torch.from_numpy(np.stack([token_ids(rng, 3, width) for _ in range(2)]))
        numbers = (torch.tensor([-5, 2**40]), torch.tensor([0, 99], dtype=torch.int32), torch.tensor([0.0, 0.65]))
        actual, names = cuda.share_noise(*(x.to(DEVICE) for x in (logprobs, ids, *numbers)))
        expected, named = reference.share_noise(logprobs, ids, *numbers)
        torch.testing.assert_close(actual.cpu(), expected, atol=2e-5, rtol=1e-5, equal_nan=True)
        assert (names.cpu() == named).float().mean() > 0.98  # neighbours an ulp apart may change places
    first, conditional, ids, *_ = path_inputs([random_rows(rng, 3, 70, "holes") for _ in range(2)], [0, 0])
    given = (first, conditional, ids, *numbers)
    for a, b in zip(
        cuda.share_noise_path(*(x.to(DEVICE) for x in given)), reference.share_noise_path(*given), strict=True
    ):
        torch.testing.assert_close(a.cpu(), b, atol=2e-5, rtol=1e-5, equal_nan=True)


def selection() -> None:
    for batch, size in ((1, 63), (70, 63), (3, 300)):
        call = random_call(np.random.default_rng(batch), batch, 15, 64, size, "flat")
        check(call, "cuda")
        tree, found = (moved(x, "cuda") for x in call.run("cuda"))
        table, lengths = moved(call.table, "cuda"), torch.ones(batch, dtype=torch.int32, device=DEVICE)
        path = torch.zeros(batch, tree.max_depth + 1, dtype=torch.int32, device=DEVICE)
        cuda.tree_learn(table, tree, found, AcceptedPath(path, lengths, lengths))
        expected = moved(call.table, "cpu")
        reference.tree_learn(expected, *(moved(x, "cpu") for x in (tree, found, AcceptedPath(path, lengths, lengths))))
        same(table, expected)


def compact() -> None:
    cache = torch.randn(5, 6, 16, 36, generator=torch.Generator().manual_seed(0))
    table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    path = torch.tensor([[0, 2, 5, -1], [0, 1, 4, 9]], dtype=torch.int32)
    small = (torch.tensor([3, 11], dtype=torch.int32), path, torch.tensor([3, 4], dtype=torch.int32))
    moved = cache.to(DEVICE)
    cuda.kv_compact([moved], table.to(DEVICE), 16, *(x.to(DEVICE) for x in small))
    reference.kv_compact([cache], table, 16, *small)
    assert torch.equal(moved.cpu(), cache)


def attention() -> None:
    base = Case((130, 5), (33, 70), (False, True), dtype=torch.bfloat16, padded_rows=2, garbage_pages=1)
    gqa = dataclasses.replace(base, heads=6, kv_heads=2, dim=64)
    mla = dataclasses.replace(base, heads=4, kv_heads=1, dim=576, v_dim=512)
    for case, kernels in ((gqa, (None,)), (mla, (native.KERNEL_PORTABLE, native.KERNEL_HOPPER))):
        inputs = make(case)
        expected, _ = inputs.expected()
        rows = dataclasses.replace(
            inputs.rows,
            **{
                f.name: getattr(inputs.rows, f.name).to(DEVICE)
                for f in dataclasses.fields(inputs.rows)
                if isinstance(getattr(inputs.rows, f.name), Tensor)
            },
        )
        q, *caches = (x.to(DEVICE) for x in (inputs.q, *inputs.caches))
        for kernel in kernels:
            if kernel is None:
                out, _ = cuda.verify_attn(q, *caches, rows, scale=case.dim**-0.5)
            else:
                out, _ = cuda.verify_attn_mla(q, *caches, rows, scale=case.dim**-0.5, v_dim=512, kernel=kernel)
            torch.testing.assert_close(
                out.cpu().double(),
                expected,
                atol=2e-2,
                rtol=2e-2,
                msg=lambda text, kernel=kernel: f"kernel {kernel}: {text}",
            )


if __name__ == "__main__":
    for run in (topk, noise, trees, path_trees, selection, compact, attention):
        run()
        torch.cuda.synchronize()
        print(f"{run.__name__}: as the reference", flush=True)
