"""Triton kernels of training against their references. Run as a script: `python kernel_checks.py cuda`, or with
TRITON_INTERPRET=1 `python kernel_checks.py cpu`. Exits non-zero at the first difference.
"""

from __future__ import annotations

import sys

import torch

from ddtree.drafter.training import ops, triton_ops


def close(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert torch.equal(got.isfinite(), wanted.isfinite()), f"{name}: non-finite values differ"
    error = float((got.float() - wanted.float()).abs().max())
    assert error <= tolerance, f"{name}: {error:.2e} is more than {tolerance:.0e}"
    print(f"ok {name}: {error:.1e}", flush=True)


def decode_attention(device: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for heads, kv_heads, dim, size in ((9, 3, 64, 200), (4, 4, 32, 65), (16, 1, 128, 64)):
        pos = torch.tensor([0, 1, 63, size - 1], device=device)
        q = torch.randn(4, heads, dim, device=device, dtype=dtype)
        k, v = (torch.randn(4, kv_heads, size, dim, device=device, dtype=dtype) for _ in range(2))
        k[0, :, 1:] = float("nan")  # keys past the position are never read
        v[0, :, 1:] = float("nan")
        scale = dim**-0.5
        got = triton_ops.decode_attention(q, k, v, pos, scale)
        wanted = ops.decode_attention_reference(q.float(), k.float().nan_to_num(), v.float().nan_to_num(), pos, scale)
        close(f"decode_attention {heads}/{kv_heads}×{dim}", got, wanted, tolerance)


def gumbel_argmax(device: str) -> None:
    rows = 4000 if device == "cuda" else 600  # the interpreter is slow
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], device=device).log().repeat(rows, 1)
    step = torch.tensor([7], device=device)
    for temperature in (1.0, 0.5):
        heat = torch.full((rows,), temperature, device=device)
        drawn = triton_ops.gumbel_argmax(logits, heat, step)
        wanted = (logits[0] / temperature).softmax(-1)
        close(f"gumbel_argmax frequencies at {temperature}", drawn.bincount(minlength=4) / rows, wanted, 2 / rows**0.5)
    other = triton_ops.gumbel_argmax(logits, heat, step + 1)
    assert not torch.equal(drawn, other), "another step must draw other noise"
    wide = torch.randn(8, 5000, device=device)
    greedy = triton_ops.gumbel_argmax(wide, torch.zeros(8, device=device), step)
    close("gumbel_argmax greedy", greedy, wide.argmax(-1), 0)


def cross_entropy(device: str, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    logits = (torch.randn(6, 5000, device=device) * 2).to(dtype)
    teacher = (torch.randn(4, 5000, device=device) * 2).to(dtype)
    lse = triton_ops.row_logsumexp(teacher)
    close("row_logsumexp", lse, teacher.float().logsumexp(-1), 1e-4)
    row = torch.tensor([0, 1, 2, 3, 1, 2], device=device, dtype=torch.int32)
    label = torch.randint(0, 5000, (6,), device=device)
    logits[0, label[0]] = 20.0  # a hit beyond doubt
    weight, soft = torch.rand(6, device=device), torch.tensor([0, 1, 0.5, 0, 1, 0.3], device=device)
    weight[5] = 0.0
    loss, hit, grad = ops.cross_entropy_reference(logits, teacher, lse, row, label, weight, soft)
    got_loss, got_hit = triton_ops.cross_entropy_(logits, teacher, lse, row, label, weight, soft)
    close("cross_entropy_ loss", got_loss, loss, 1e-3)
    close("cross_entropy_ hit", got_hit, hit, 0)
    close("cross_entropy_ gradient", logits, grad, tolerance)


def main(device: str) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        if not (device == "cuda" and dtype == torch.float32):  # tl.dot rounds fp32 to tf32 there
            decode_attention(device, dtype)
        cross_entropy(device, dtype)
    gumbel_argmax(device)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
