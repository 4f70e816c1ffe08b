"""How soon a thread that wakes up gets a core that another thread computes on. Linux.

The kernel lets a computing thread finish its slice, some milliseconds, before one that has just
woken: a message that takes microseconds to handle waits behind it. A thread with a shorter slice
may interrupt (EEVDF, from Linux 6.12 on); its share of the machine stays the same. No privilege is
needed; where the kernel does not know this, nothing changes.
"""

import ctypes
import functools
import platform
import sys

#: Of threads that wait most of the time; the shortest that the kernel takes.
PROMPT_SLICE_NS = 100_000
COPY_SLICE_NS = 500_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_PR_SET_TIMERSLACK = 29


class _SchedAttr(ctypes.Structure):
    """``struct sched_attr`` in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def serve_promptly() -> None:
    """For a thread that waits and answers, and all threads it starts from here on."""
    _set_slice(PROMPT_SLICE_NS)


def copy_promptly() -> None:
    """For a thread that waits, and at times copies for a while: between the two others."""
    _set_slice(COPY_SLICE_NS)


def compute_patiently() -> None:
    """For a thread that computes, started by one that serves: the kernel's usual slice."""
    _set_slice(0)


def sleep_exactly() -> None:
    """For a thread that polls: short waits are not drawn out by the kernel's 50 µs of slack."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def yield_core() -> None:
    """Lets a thread that the caller has just woken begin on this core, where the kernel often puts
    it: it would wait there for the next tick, milliseconds, while this one computes.
    """
    libc = _libc()
    if libc is not None:
        libc.sched_yield()  # ctypes lets go of the GIL meanwhile; os.sched_yield does not


def _set_slice(slice_ns: int) -> None:
    libc, number = _libc(), _SCHED_SETATTR.get(platform.machine())
    if libc is not None and number is not None:
        attributes = _SchedAttr(size=ctypes.sizeof(_SchedAttr), runtime=slice_ns)
        libc.syscall(ctypes.c_long(number), 0, ctypes.byref(attributes), 0)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
