"""Memory of the host that is allocated once, registered, and read and written by peers."""

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20
#: Addresses have 64 bits on the wire; memory of a process ends below this, and so do rows of
#: segments, which are signed.
MEMORY_END = 1 << 63


def host_memory(byte_count: int) -> npt.NDArray[np.uint8]:
    """Page-aligned zeroed bytes, all of whose pages exist. The memory lives as long as the array
    or a view of it.

    Touching every page up front keeps the first transfer from paying for page faults, which cost
    many times the copy itself. Where the kernel has huge pages for those who ask, large memory lies
    in them: what copies into another process looks every page up, so with usual ones the same bytes
    take half as long again. A child process does not inherit it: after a fork the first write to
    each page would copy it away from under the transfer library.

    Raises:
        ValueError: no bytes.
    """
    if byte_count < 1:
        raise ValueError(f"a buffer needs at least one byte, not {byte_count}")
    spare = HUGE_PAGE_BYTES if byte_count >= HUGE_PAGE_BYTES else 0  # to begin at a huge page
    pages = -(-(byte_count + spare) // mmap.PAGESIZE)
    mapping = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE" if spare else ""):
        if hasattr(mmap, advice):  # both are Linux's
            with contextlib.suppress(OSError):  # a kernel may be built without huge pages
                mapping.madvise(getattr(mmap, advice))
    memory = np.frombuffer(mapping, dtype=np.uint8)
    if spare:
        memory = memory[-memory.ctypes.data % HUGE_PAGE_BYTES :]
    memory = memory[:byte_count]
    memory[:: mmap.PAGESIZE] = 0
    return memory
