"""verify_attn and verify_attn_mla against float64, and the two properties that make drafting lossless."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels import cuda, native, verify_attn, verify_attn_mla
from ddtree.kernels.reference.verify_attn import dense_attention, flash_attention

from .cases import Case, Inputs, make
from .devices import on_devices
from .ref import compare

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
on_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def check(case: Case) -> None:
    inputs = make(case)
    (out, lse), (wanted, wanted_lse) = inputs.run(), inputs.expected()
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    compare(out, wanted, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype], cosine=1e-4)
    compare(lse, wanted_lse, atol=1e-5 if case.exact else 3e-4, rtol=1e-5)  # the exponential for 16 bits is coarser


@st.composite
def cases(draw):
    sequences = draw(st.integers(1, 4))
    group = draw(st.sampled_from([1, 2, 4]))

    def each(values):
        return tuple(draw(st.lists(values, min_size=sequences, max_size=sequences)))

    return Case(
        kv=each(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65])),
        q=each(st.sampled_from([0, 1, 2, 5, 17, 33])),
        chunk=each(st.booleans()),
        heads=2 * group,
        kv_heads=draw(st.sampled_from([1, 2])),
        dim=draw(st.sampled_from([4, 8, 20])),
        v_dim=draw(st.sampled_from([None, None, 3])),
        page_size=draw(st.sampled_from([1, 5, 16])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        padded_rows=draw(st.sampled_from([0, 3])),
        garbage_pages=draw(st.sampled_from([0, 2])),
        seed=draw(st.integers(0, 2**31)),
    )


@on_devices
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_equals_float64(device, case):
    check(case.on(device))


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [1, 8, 16, 64])
@pytest.mark.parametrize("v_dim", [None, 16])
def test_heads(dtype, heads, v_dim, device):
    case = Case((65,), (9,), (False,), heads=heads, kv_heads=1, dim=24, v_dim=v_dim, dtype=dtype, garbage_pages=1)
    check(case.on(device))


@on_devices
@pytest.mark.parametrize(
    "case",
    [
        Case((300, 0), (17, 40), (False, True), heads=9, kv_heads=3, dim=64, dtype=torch.bfloat16),
        Case((130, 1), (64, 70), (False, True), heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, page_size=64),
        Case((4095, 7), (9, 130), (False, True), heads=4, kv_heads=1, dim=64, dtype=torch.float16, page_size=64),
        Case((600,), (65,), (False,), heads=2, kv_heads=1, dim=16, padded_rows=4),  # keys beyond one block of 512
        Case((500,), (40,), (True,), heads=2, kv_heads=1, dim=16),
        Case((70,), (5,), (False,), heads=2, dim=576, v_dim=512),  # the DeepSeek-V3 widths
    ],
    ids=["smollm2", "qwen3", "many-chunks", "long-tree", "long-chunk", "mla"],
)
def test_model_shapes(case, device):
    check(case.on(device))


@on_devices
@on_dtypes
def test_rows_past_q_len_and_empty_sequences(dtype, device):
    case = Case((4, 9, 0), (3, 0, 2), (False, False, True), padded_rows=2, dtype=dtype)
    out, lse = make(case.on(device)).run()
    unused = torch.tensor([3, 4, 5, 6, 9, 10])
    assert out[unused].eq(0).all()
    assert lse[unused].eq(-torch.inf).all()
    assert torch.isfinite(out).all()


@on_devices
@on_dtypes
@pytest.mark.parametrize("padded_rows", [0, 3])
def test_no_sequence_has_a_row(padded_rows, dtype, device):
    """Tensors without elements have no address: with padding the page table, without it all that counts rows."""
    check(Case((0, 0), (0, 0), (False, True), padded_rows=padded_rows, dtype=dtype).on(device))


def path_alone(inputs: Inputs, node: int) -> Inputs:
    """The node's path as a chain of its own, moved to the slots right after the prefix."""
    path, start = inputs.visible[0][node], inputs.case.kv[0]
    caches = [cache.clone() for cache in inputs.caches]
    for i, j in enumerate(path):
        for new, old in zip(caches, inputs.caches, strict=True):
            new[inputs.place(0, start + i)] = old[inputs.place(0, start + j)]
    rows = replace(
        inputs.rows,
        row_offsets=torch.tensor([0, len(path)], dtype=torch.int32),
        q_len=torch.tensor([len(path)], dtype=torch.int32),
        causal=torch.ones(1, dtype=torch.bool),
        ancestors=torch.zeros(len(path), 1, dtype=torch.int32),
    )
    return Inputs(replace(inputs.case, q=(len(path),)), inputs.q[path], caches, rows, [])


@on_devices
@on_dtypes
@pytest.mark.parametrize("v_dim", [None, 8])
@pytest.mark.parametrize("kv", [0, 64, 510])
def test_a_node_equals_its_path_alone_as_a_chain(kv, v_dim, dtype, device):
    case = Case((kv,), (33,), (False,), kv_heads=2, dim=16, v_dim=v_dim, dtype=dtype, seed=kv)
    inputs = make(case.on(device))
    out, lse = inputs.run()
    tolerance, lse_tolerance = (2e-6, 2e-6) if case.exact else (TOLERANCE[dtype], 3e-4)
    for node in range(33):
        chain_out, chain_lse = path_alone(inputs, node).run()
        compare(chain_out[-1], out[node], atol=tolerance, rtol=tolerance)
        compare(chain_lse[-1], lse[node], atol=lse_tolerance, rtol=lse_tolerance)


@on_devices
@on_dtypes
@pytest.mark.parametrize("v_dim", [None, 8])
@pytest.mark.parametrize("kv", [0, 65, 500])
def test_a_non_ancestor_changes_no_bit(kv, v_dim, dtype, device):
    case = Case((kv,), (33,), (False,), kv_heads=1, dim=16, v_dim=v_dim, dtype=dtype, seed=kv + 1)
    inputs = make(case.on(device))
    out, lse = inputs.run()
    for changed in (1, 7, 32):
        caches = [cache.clone() for cache in inputs.caches]
        for cache in caches:
            cache[inputs.place(0, kv + changed)] *= -1e3
        new_out, new_lse = replace(inputs, caches=caches).run()
        blind = torch.tensor([changed not in seen for seen in inputs.visible[0]])
        assert torch.equal(new_out[blind], out[blind])
        assert torch.equal(new_lse[blind], lse[blind])
        assert not torch.equal(new_out[~blind], out[~blind])


@on_dtypes
def test_other_sequences_change_no_bit(dtype):  # on CUDA the others have a say in where a sequence's KV is cut
    case = Case((65, 3, 128), (17, 30, 9), (False, True, False), dtype=dtype)
    inputs = make(case)
    out, lse = inputs.run()
    for s in range(3):
        begin, end = inputs.rows.row_offsets[s : s + 2].tolist()
        rows = replace(
            inputs.rows,
            row_offsets=torch.tensor([0, end - begin], dtype=torch.int32),
            ancestors=inputs.rows.ancestors[begin:end],
            **{name: getattr(inputs.rows, name)[s : s + 1] for name in ("q_len", "seq_len", "page_table", "causal")},
        )
        alone_out, alone_lse = replace(inputs, q=inputs.q[begin:end], rows=rows).run()
        assert torch.equal(alone_out, out[begin:end])
        assert torch.equal(alone_lse, lse[begin:end])


@on_devices
@on_dtypes
def test_a_chain_tree_equals_causal(dtype, device):
    chunk = make(Case((20,), (40,), (True,), dtype=dtype).on(device))
    bits = [[min(2 ** (i + 1) - 1, 2**32 - 1), max(2 ** (i - 31) - 1, 0)] for i in range(40)]
    words = torch.tensor(bits).sub_(torch.tensor(bits).ge(2**31) * 2**32).to(torch.int32)
    rows = replace(chunk.rows, causal=torch.zeros(1, dtype=torch.bool), ancestors=words)
    for causal, tree in zip(chunk.run(), replace(chunk, rows=rows).run(), strict=True):
        assert torch.equal(causal, tree)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masked", [False, True])
def test_cpu_kernel_equals_the_written_out_definition(dtype, masked):
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, n, 16, generator=random).to(dtype) for n in (51, 700, 700))
    bias = torch.zeros(51, 700, dtype=dtype)
    bias[:, 1:].masked_fill_(torch.rand(51, 699, generator=random) < 0.5, -torch.inf)
    dense, flash = (f(query, key, value, bias if masked else None, 0.25) for f in (dense_attention, flash_attention))
    for a, b in zip(flash, dense, strict=True):
        compare(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kv", [5, 130, 700])
@pytest.mark.parametrize("count", [2, 17, 64])
def test_batch_invariant_rows_have_the_bits_that_they_get_alone(kv, count):
    inputs = make(Case((kv,), (count,), (False,), heads=6, dim=64, dtype=torch.bfloat16, poison=False))
    out, lse = verify_attn(inputs.q, *inputs.caches, inputs.rows, scale=0.125, batch_invariant=True)
    wanted, wanted_lse = inputs.expected()
    compare(out, wanted, atol=1e-2, rtol=1e-2)
    compare(lse, wanted_lse, atol=1e-5, rtol=1e-5)
    slots = [cache.flatten(0, 1) for cache in inputs.caches]
    for i, own in enumerate(inputs.visible[0]):
        places = [inputs.place(0, j) for j in [*range(kv), *(kv + j for j in own)]]
        seen = torch.tensor([page * 16 + offset for page, offset in places])
        caches = [x[seen][None] for x in slots]  # one page
        alone = make(Case((len(seen) - 1,), (1,), (True,), page_size=len(seen))).rows
        alone = replace(alone, page_table=torch.zeros_like(alone.page_table))
        [row], _ = verify_attn(inputs.q[i : i + 1], *caches, alone, scale=0.125, batch_invariant=True)
        assert torch.equal(row, out[i])


@on_devices
@on_dtypes
def test_no_rows(dtype, device):
    case = Case((), (), (), dtype=dtype).on(device)
    out, lse = make(case).run()
    assert (out.shape, lse.shape) == ((0, 4, case.dim), (0, 4))


def test_arguments():
    inputs = make(Case((4,), (3,), (False,)))
    q, (k, v), rows = inputs.q, inputs.caches, inputs.rows
    with pytest.raises(ValueError, match=r"q has shape \[2, 4, 8\]; pass \[3, any, any\]"):
        verify_attn(q[:2], k, v, rows, scale=1)
    with pytest.raises(ValueError, match=r"k_cache is torch.float64; pass torch.float32"):
        verify_attn(q, k.double(), v, rows, scale=1)
    with pytest.raises(ValueError, match=r"q has 3 heads; pass a multiple of the 2 heads of k_cache"):
        verify_attn(q[:, :3], k, v, rows, scale=1)
    with pytest.raises(ValueError, match="v_cache is not contiguous over pages and slots"):
        verify_attn(q, k.repeat(2, 1, 1, 1), v.repeat(1, 2, 1, 1)[:, :16].repeat(4, 1, 1, 1)[::2], rows, scale=1)
    with pytest.raises(ValueError, match=r"v_dim is 9; pass 1 … 8"):
        verify_attn_mla(q, k[:, :, 0], rows, scale=1, v_dim=9)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q_len", [4], r"q_len\[0\] is 4; the sequence has 3 rows"),
        ("seq_len", [14], r"Sequence 0 needs 17 slots; its page table has 1 pages of 16"),
        ("row_offsets", [0, 2], r"row_offsets must run from 0 to T = 3"),
    ],
)
def test_rows_that_contradict_each_other(field, value, message):
    inputs = make(Case((4,), (3,), (False,)))
    rows = replace(inputs.rows, **{field: torch.tensor(value, dtype=torch.int32)})
    with pytest.raises(ValueError, match=message):
        replace(inputs, rows=rows).run()


def test_rows_are_checked_when_made():
    rows = make(Case((4,), (3,), (False,))).rows
    with pytest.raises(ValueError, match=r"seq_len is torch.int64; pass torch.int32"):
        replace(rows, seq_len=rows.seq_len.long())
    with pytest.raises(ValueError, match="page_size is 0; pass 1 or more"):
        replace(rows, page_size=0)


@on_devices
@pytest.mark.parametrize("kernel", ["PORTABLE", "PORTABLE_SMALL"])  # by name, because AUTO chooses only one
def test_portable_mla_kernels(kernel, device, monkeypatch):
    case = Case((0, 1, 63, 65, 200), (5, 3, 17, 33, 0), (True, False, False, False, True), kv_heads=1, page_size=5)
    chosen = partial(cuda.verify_attn_mla, kernel=getattr(native, f"KERNEL_{kernel}"))
    monkeypatch.setattr(cuda, "verify_attn_mla", chosen)
    for dtype in (torch.bfloat16, torch.float16):
        check(replace(case, dim=576, v_dim=512, dtype=dtype, padded_rows=2, garbage_pages=2).on(device))


if torch.cuda.is_available():

    @pytest.mark.parametrize("kernel", ["PORTABLE", "PORTABLE_SMALL", "HOPPER"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
    def test_every_mla_kernel(kernel, dtype, heads, monkeypatch):
        kv, q = (0, 1, 63, 64, 65, 200), (5, 3, 17, 1, 33, 7)
        chunk = (True, False, False, True, False, True)
        case = Case(
            kv, q, chunk, heads=heads, kv_heads=1, dim=576, v_dim=512, dtype=dtype, padded_rows=2, garbage_pages=2
        )
        chosen = partial(cuda.verify_attn_mla, kernel=getattr(native, f"KERNEL_{kernel}"))
        monkeypatch.setattr(cuda, "verify_attn_mla", chosen)
        for page_size in (16, 64):
            check(replace(case, page_size=page_size).on("cuda"))
