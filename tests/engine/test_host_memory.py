"""Registered host memory lies in huge pages where there are any, and stays with its process."""

import errno
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epd.engine.kv_cache import KVCache
from epd.engine.kv_layout import KvLayout
from epd.host_memory import HUGE_PAGE_BYTES, host_memory

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


needs_huge_pages = pytest.mark.skipif(
    not SETTING.is_file() or "[never]" in SETTING.read_text(), reason="no huge pages here"
)


@needs_huge_pages
def test_large_memory_lies_in_huge_pages() -> None:
    memory = host_memory(9 * HUGE_PAGE_BYTES + 5)
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    # The kernel may be out of them for a moment: most is what is asked for.
    assert huge_bytes(memory.ctypes.data) >= 5 * HUGE_PAGE_BYTES
    assert len(memory) == 9 * HUGE_PAGE_BYTES + 5
    assert not memory.any()


@needs_huge_pages
def test_kv_of_an_engine_lies_in_huge_pages() -> None:
    layout = KvLayout("", 2, 2, 64, "float16", 16)
    cache = KVCache(layout, 2048, torch.device("cpu"))
    assert cache.tensor.nbytes == 2 * 2048 * layout.block_bytes == 16 * HUGE_PAGE_BYTES
    assert huge_bytes(cache.tensor.data_ptr()) >= 8 * HUGE_PAGE_BYTES
    assert cache.tensor.dtype == torch.float16
    assert not cache.tensor.any()


def test_a_kernel_without_huge_pages_gives_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is built without them does not know the advice."""

    class Mapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "what is that")

    monkeypatch.setattr("epd.host_memory.mmap.mmap", Mapping)
    memory = host_memory(HUGE_PAGE_BYTES + 5)
    assert len(memory) == HUGE_PAGE_BYTES + 5
    assert not memory.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("byte_count", [100, 2 * HUGE_PAGE_BYTES])
def test_a_child_process_does_not_inherit_it(byte_count: int) -> None:
    """Else the first write after a fork moves a registered page."""
    script = f"""
import os
from epd.host_memory import host_memory
memory = host_memory({byte_count})
address = memory.ctypes.data
if os.fork() == 0:
    maps = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    os._exit(any(int(low, 16) <= address < int(high, 16) for low, high in maps))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert found.stdout.split() == ["0"]
