"""Notices and seals are read whole or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import DataLossError, TransferFailedError
from epd.handover.notice import Notice, NoticeKind
from epd.handover.seal import SEAL_BYTES, SealRecord, SealSlots

WORDS = st.integers(0, 2**32 - 1)
LONGS = st.integers(0, 2**63 - 1)


@given(st.sampled_from(NoticeKind), st.text(max_size=64), LONGS, WORDS, WORDS)
def test_notice_round_trip(kind, transfer_id, generation, ordinal, layer):
    notice = Notice(kind, transfer_id, generation, ordinal, layer)
    assert Notice.decode(notice.encode()) == notice


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read_back_the_same(message):
    try:
        notice = Notice.decode(message)
    except ValueError:
        return
    assert notice.encode() == message


def test_no_prefix_or_extension_of_a_notice_is_a_notice():
    whole = Notice(NoticeKind.KV, "1", 1, 0).encode()
    for wrong in [whole[:n] for n in range(len(whole))] + [whole + b"1"]:
        with pytest.raises(ValueError, match="notice"):
            Notice.decode(wrong)


RECORD = SealRecord("t", 3, 128_000, -1.25, 112, 1 << 40)


def test_seal_round_trip():
    data = RECORD.encode()
    assert len(data) == SEAL_BYTES
    assert SealRecord.decode(data, "t", 3) == RECORD


@pytest.mark.parametrize(("transfer_id", "generation"), [("t", 4), ("t1", 3), ("", 3)])
def test_seal_of_another_transfer_is_refused(transfer_id, generation):
    with pytest.raises(TransferFailedError, match="found the seal of t generation 3"):
        SealRecord.decode(RECORD.encode(), transfer_id, generation)


@pytest.mark.parametrize("position", range(0, 106, 5))
def test_any_damaged_byte_is_noticed(position):
    data = bytearray(RECORD.encode())
    data[position] ^= 0x10
    with pytest.raises(DataLossError):
        SealRecord.decode(bytes(data), "t", 3)


def test_an_unwritten_slot_holds_no_seal():
    slots = SealSlots(2)
    slot = slots.take()
    assert slot is not None
    with pytest.raises(DataLossError):
        SealRecord.decode(slots.read(slot), "t", 3)


def test_a_slot_is_zeroed_before_it_is_used_again():
    slots = SealSlots(1)
    slot = slots.take()
    assert slot is not None
    slots.write(slot, RECORD.encode())
    slots.give_back(slot)
    assert slots.take() == slot
    assert slots.read(slot) == bytes(SEAL_BYTES)
    assert slots.take() is None
