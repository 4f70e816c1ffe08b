"""Scattered registered memory to and from one contiguous tensor."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from epd.transfer.base import Segment
from epd.transfer.registered_memory import RegisteredMemory
from epd.transfer.segments import SegmentArray


class _DeviceBytes:
    """Device memory as the CUDA array interface describes it."""

    def __init__(self, segment: Segment) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (segment.length,),
            "typestr": "|u1",
            "data": (segment.address, False),
            "version": 3,
        }


def new_staging(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Room for all segments, one after the other, as bytes."""
    return torch.empty(SegmentArray.of(segments).byte_count, dtype=torch.uint8, device=device)


def gather(
    segments: Sequence[Segment], memory: RegisteredMemory, device: torch.device
) -> torch.Tensor:
    """Copies segments into a new tensor. Raises TransferFailedError for unregistered memory."""
    memory.check(segments)
    staging = new_staging(segments, device)
    _copy(staging, segments, memory, into_memory=False)
    return staging


def scatter(staging: torch.Tensor, segments: Sequence[Segment], memory: RegisteredMemory) -> None:
    """Copies a tensor into segments; all of it is there on return. Raises as :func:`gather`."""
    memory.check(segments)
    _copy(staging, segments, memory, into_memory=True)


def _copy(
    staging: torch.Tensor,
    segments: Sequence[Segment],
    memory: RegisteredMemory,
    *,
    into_memory: bool,
) -> None:
    offset = 0
    devices: set[torch.device] = {staging.device}
    for segment in segments:
        part = staging[offset : offset + segment.length]
        offset += segment.length
        if memory.kind_of(segment) == "DRAM" and staging.device.type == "cpu":
            here, there = segment.address, part.data_ptr()
            if into_memory:
                ctypes.memmove(here, there, segment.length)
            else:
                ctypes.memmove(there, here, segment.length)
            continue
        view = _view(segment, memory.kind_of(segment))
        devices.add(view.device)
        (view if into_memory else part).copy_(part if into_memory else view)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _view(segment: Segment, kind: str) -> torch.Tensor:
    if kind == "VRAM":
        device = torch.device("cuda", segment.device_id)
        return torch.as_tensor(_DeviceBytes(segment), device=device)
    raw = (ctypes.c_uint8 * segment.length).from_address(segment.address)
    return torch.frombuffer(raw, dtype=torch.uint8)
