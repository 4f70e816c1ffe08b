"""The host buffer is one page-aligned run of writable bytes."""

import ctypes
import mmap

import pytest

from epd.transfer.base import Segment
from epd.transfer.buffer import HostBuffer


def test_view_and_address_are_the_same_memory():
    buffer = HostBuffer(10_000)
    assert buffer.address % mmap.PAGESIZE == 0
    assert buffer.segment == Segment(buffer.address, 10_000)
    buffer.view(100, 4)[:] = list(b"kept")
    assert ctypes.string_at(buffer.part(100, 4).address, 4) == b"kept"
    assert len(buffer.view()) == 10_000


def test_memory_outlives_the_buffer_object_through_a_view():
    view = HostBuffer(4096).view()
    view[:] = 7
    assert int(view.sum()) == 7 * 4096


def test_empty_buffer_is_refused():
    with pytest.raises(ValueError, match="at least one byte"):
        HostBuffer(0)
