"""Messages through an arena: what is read is what was written, or an error says that it is gone."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.deployments import bounds, mailbox
from ddtree.deployments.batching import lay_out
from ddtree.deployments.config import AppConfig
from ddtree.deployments.mailbox import INLINE, Bound, Inbox, MessageTooLarge, Outbox, StaleMessage
from ddtree.deployments.models import Models
from ddtree.deployments.node_transport import NodeCommunicator, NodeTransport
from ddtree.deployments.requests import MAX_LOGPROBS
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Accepted, Sequence
from ddtree.deployments.sizing import step_rows
from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.items import Candidates
from ddtree.kernels import DraftTree, tree_build
from ddtree.verifier.batch import Logprobs, VerifyResult
from ddtree.verifier.model_dir import TargetInfo

from .tiny import HORIZON, make_drafter, make_target, request

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
MIB = Bound(1 << 20, "the test")


@dataclass(frozen=True)
class Message:
    name: str
    tensors: list[Tensor]


def peer(outbox: Outbox) -> Inbox:
    """A reader, which maps a CPU arena as another process does; a process cannot open its own IPC handles."""
    if outbox.arena.data.is_cuda:
        return Inbox(outbox.arena)
    transport = NodeTransport()
    meta = transport.extract_tensor_transport_metadata("arena", [outbox.arena.header, outbox.arena.data])
    header, data = transport.recv_multiple_tensors("arena", meta, NodeCommunicator())
    return Inbox(type(outbox.arena)(outbox.arena.owner, header, data))


@pytest.mark.parametrize("device", DEVICES)
@given(
    wanted=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3), st.booleans()), max_size=6
    )
)
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_was_written(device: str, wanted: list[tuple[torch.dtype, list[int], bool]]) -> None:
    outbox = Outbox(device, Bound(6 << 20, "six tensors of 1 MB"))
    inbox = peer(outbox)
    for i in range(3):
        tensors = [torch.randint(0, 2, [2, *shape]).to(device, dtype) for dtype, shape, _ in wanted]
        tensors = [t.transpose(0, -1) if swap else t for t, (*_, swap) in zip(tensors, wanted, strict=True)]
        read = inbox.read(outbox.write(Message(f"m{i}", tensors)))
        assert read.name == f"m{i}"
        for got, sent in zip(read.tensors, tensors, strict=True):
            assert got.dtype == sent.dtype and got.device == sent.device and torch.equal(got, sent)


@pytest.mark.parametrize("device", DEVICES)
def test_a_message_that_lies_where_one_before_did_is_opened_once(device: str) -> None:
    """Unless numbers travel in its letter."""
    outbox = Outbox(device, MIB)
    inbox = peer(outbox)

    def read(value: int, *inside: Tensor) -> Message:
        message = Message("m", [torch.full((2, INLINE), value, device=device), *inside])
        found: Message = inbox.read(outbox.write(message))
        assert all(torch.equal(got, sent) for got, sent in zip(found.tensors, message.tensors, strict=True))
        return found

    first, second, third = (read(value) for value in range(3))
    assert third is first and second is not first
    first, second, third = (read(value, torch.tensor([1])) for value in range(3))
    assert third is not first


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_message_stays_and_the_one_before_is_gone(device: str) -> None:
    outbox = Outbox(device, MIB)
    inbox = peer(outbox)
    letters = [outbox.write(torch.full((INLINE,), i, device=device)) for i in range(2)]
    assert [int(inbox.read(letter)[-1]) for letter in letters] == [0, 1]
    outbox.write(torch.full((INLINE,), 2, device=device))
    assert int(inbox.read(letters[1])[-1]) == 1
    with pytest.raises(StaleMessage, match=r"message 1 of outbox .* is gone: message 3 is in its place"):
        inbox.read(letters[0])


def test_one_that_is_overwritten_while_it_is_used_is_noticed() -> None:
    outbox = Outbox("cpu", MIB)
    inbox, letter = peer(outbox), outbox.write(torch.zeros(INLINE))
    inbox.read(letter)
    inbox.check(letter)
    outbox.write(None)
    with pytest.raises(TypeError):
        outbox.write([torch.zeros(INLINE), {}.keys()])  # fails half way: pickle does not take it
    with pytest.raises(StaleMessage, match="another is being written"):
        inbox.check(letter)


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_in_reserved_memory_is_not_copied(device: str) -> None:
    outbox = Outbox(device, MIB)
    inbox, last = peer(outbox), []
    for i in range(6):
        numbers = [outbox.empty((3, 5), torch.int32), outbox.empty((7,), torch.bfloat16)]
        assert len(last) < 2 or [id(x) for x in numbers] == last[-2], "the same views every other time"
        last.append([id(x) for x in numbers])
        numbers[0].fill_(i)
        numbers[1].fill_(i + 1)
        other = torch.full((INLINE,), i, dtype=torch.float64, device=device)
        letter = outbox.write([numbers[0].flatten(), other, numbers[0].T, numbers[1][2:], numbers[0][1:2]])
        numbers[1][2] = -1  # seen by the reader
        flat, copied, turned, tail, row = inbox.read(letter)
        assert flat.tolist() == [i] * 15 and turned.tolist() == [[i] * 3] * 5 and row.tolist() == [[i] * 5]
        assert tail.tolist() == [-1, *[i + 1] * 4] and torch.equal(copied, other)


@pytest.mark.parametrize("device", DEVICES)
def test_an_announced_message_is_read_when_its_tensors_are_written(device: str) -> None:
    outbox = Outbox(device, MIB)
    inbox = peer(outbox)
    for i in range(4):
        late = outbox.empty((INLINE,), torch.int32)
        message = Message(f"m{i}", [late, torch.tensor([i]), late.view(2, -1)[1]])
        announced = inbox.expect(outbox.announce(message))
        assert announced.name == f"m{i}" and announced.tensors[1].item() == i
        late.fill_(i)
        if i == 1:  # another one is sent instead
            outbox.discard()
            assert inbox.read(outbox.write(Message("other", []))).name == "other"
            continue
        letter = outbox.write(message)
        assert inbox.read(letter) is announced and letter.body is None
        assert announced.tensors[0].tolist() == [i] * INLINE and announced.tensors[2].tolist() == [i] * (INLINE // 2)


def test_what_was_not_announced_to_a_reader_is_not_read() -> None:
    outbox = Outbox("cpu", MIB)
    early, late = peer(outbox), peer(outbox)
    for _ in range(2):
        message = Message("m", [outbox.empty((4,), torch.int32)])
        early.expect(outbox.announce(message))
        letter = outbox.write(message)
        assert early.read(letter).name == "m"
        with pytest.raises(StaleMessage, match="was not announced here"):
            late.read(letter)


def test_what_is_announced_has_its_tensors_reserved() -> None:
    outbox = Outbox("cpu", MIB)
    inbox, reserved = peer(outbox), outbox.empty((INLINE,), torch.int32)
    with pytest.raises(ValueError, match="no tensors but reserved ones"):
        outbox.announce([reserved, torch.ones(INLINE)])
    assert inbox.read(outbox.write([reserved, torch.ones(INLINE)]))[1].sum() == INLINE


def test_reserving_ends_the_message_that_was_there() -> None:
    outbox = Outbox("cpu", MIB)
    inbox, letters = peer(outbox), [outbox.write(torch.full((INLINE,), i)) for i in range(2)]
    inbox.read(letters[0])
    outbox.empty((4,), torch.int32)
    with pytest.raises(StaleMessage, match="another is being written"):
        inbox.check(letters[0])
    inbox.check(letters[1])


def test_a_message_that_is_never_written_spoils_nothing() -> None:
    outbox = Outbox("cpu", Bound(10_000, "max_sequences 3"))
    inbox = peer(outbox)
    first = outbox.empty((2000,), torch.int32)
    with pytest.raises(MessageTooLarge, match="16384 bytes or more does not fit"):
        outbox.empty((2000,), torch.int32)
    assert outbox.empty((2000,), torch.int32) is first, "an error gives up what was reserved"
    with pytest.raises(MessageTooLarge):
        outbox.write(torch.zeros(2000))
    assert outbox.empty((2000,), torch.int32) is first
    outbox.discard()
    assert torch.equal(inbox.read(outbox.write(torch.ones(2000))), torch.ones(2000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_host_numbers_may_still_be_on_their_way() -> None:
    outbox = Outbox("cuda", MIB)
    inbox, host = peer(outbox), torch.zeros(8, dtype=torch.int32, pin_memory=True)
    for i in range(1, 5):
        torch.cuda._sleep(50_000_000)
        host.copy_(torch.full((8,), i, dtype=torch.int32, device="cuda"), non_blocking=True)
        assert inbox.read(outbox.write(host)).tolist() == [i] * 8


def test_views_that_inference_began_are_of_use_without_it() -> None:
    outbox = Outbox("cpu", MIB)
    inbox = peer(outbox)
    with torch.inference_mode():
        mine = outbox.empty((INLINE,), torch.float32)
        (theirs,) = inbox.read(outbox.write([mine]))
    mine.fill_(2)
    theirs += 1
    assert mine.sum() == 3 * INLINE


def test_a_reader_maps_an_arena_as_long_as_it_is_used() -> None:
    outbox = Outbox("cpu", MIB)
    inbox = peer(outbox)
    mapped = weakref.ref(inbox.read(outbox.write(torch.zeros(INLINE))))
    assert mapped() is not None, "kept to be had again"
    del inbox
    assert mapped() is None


def test_a_message_of_another_outbox_is_not_read() -> None:
    old, new = Outbox("cpu", MIB), Outbox("cpu", MIB)
    letter = old.write(torch.zeros(INLINE))
    new.write(torch.ones(INLINE))
    with pytest.raises(StaleMessage, match="was written by"):
        peer(new).read(letter)


def test_one_too_large_says_what_the_limit_is_and_spoils_nothing() -> None:
    outbox = Outbox("cpu", Bound(10_000, "max_sequences 3"))
    inbox, letter = peer(outbox), outbox.write(torch.arange(1000))
    with pytest.raises(
        MessageTooLarge, match=r"12032 bytes or more does not fit an outbox for 10240 \(max_sequences 3\)"
    ):
        outbox.write(torch.zeros(3000))
    assert torch.equal(inbox.read(letter), torch.arange(1000))
    assert torch.equal(inbox.read(outbox.write(torch.ones(2000))), torch.ones(2000))


def test_the_largest_messages_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "INLINE", 0)  # every tensor in the arena, as on a GPU
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter")
    config = AppConfig.parse(
        {
            "target": {"model": str(target)},
            "verifier": {"page_size": 4},
            "tree": {"max_budget": 40, "top_k": 8},
            "scheduler": {"max_sequences": 5, "prefill_rows": 70},
        }
    )
    models = Models(TargetInfo.read(target), "tiny", 512, DrafterInfo.read(drafter), drafter)
    asked = [replace(request(f"s{i}", [1] * 460, 40, 40), logprobs=20, prompt_logprobs=20) for i in range(5)]
    sequences = [Sequence(r, 0.0) for r in asked]
    entries = [Entry(sequence, 41, 40, finishes=True) for sequence in sequences]
    for sequence in sequences:
        sequence.computed, sequence.pages = 459, list(range(-(-(512 + 41) // 4)))
        sequence.accepted = Accepted(400, list(range(0, 41, 2)))
    logprobs = torch.zeros(4, HORIZON, 8).log_softmax(-1)
    ids = torch.arange(8, dtype=torch.int32).expand(4, HORIZON, 8).contiguous()
    numbers = torch.full((4,), 40, dtype=torch.int32)
    router = Outbox("cpu", bounds.of_router(config, models))
    room = DraftTree.allocate(4, HORIZON, 40, partial(router.empty, dtype=torch.int32))
    tree = tree_build(logprobs, ids, numbers, numbers, numbers, max_budget=40, out=room)
    sequences[4].computed = 0
    entries[4] = Entry(sequences[4], 70 + 41, 0, finishes=True)  # as many rows as there can be
    laid = lay_out(entries, [40] * 4, 41, 4, scratch_page=0).batch(tree, empty=partial(router.empty, dtype=torch.int32))
    laid.gather()
    batch = laid.batch
    rows = len(batch.tokens)
    assert rows == step_rows(config)[0]
    peer(router).read(router.write(batch))
    y, features = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, 2 * 32)
    wide = torch.zeros(rows, 1 + MAX_LOGPROBS)
    found = Logprobs(wide, wide.int(), y)
    whole = Candidates(logprobs.repeat(2, 1, 1)[:5], ids.repeat(2, 1, 1)[:5])
    with_head = replace(models, drafter=replace(models.drafter, path_head=True))
    for message, bound in (
        (VerifyResult(y, y, features, 0.0, found), bounds.of_verifier(config, models, 4)),
        (whole, bounds.of_drafter(config, models)),
        (replace(whole, conditional=torch.zeros(5, HORIZON - 1, 8, 8)), bounds.of_drafter(config, with_head)),
    ):
        outbox = Outbox("cpu", bound)
        peer(outbox).read(outbox.write(message))
        assert "scheduler.max_sequences 5" in bound.limit
