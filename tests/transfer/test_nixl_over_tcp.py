"""NIXL's conformance when UCX may use TCP alone, as between containers or machines without RDMA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What shared memory and TCP do differently: order of data and notice, scattered blocks, lost and
#: hung peers.
CASES = (
    "test_write_puts_the_bytes_into_the_peer",
    "test_read_gets_the_bytes_of_the_peer",
    "test_notice_names_the_sender_and_comes_after_all_data",
    "test_scattered_blocks_land_where_they_belong",
    "test_unregistered_memory_is_refused",
    "test_a_killed_peer_fails_the_next_transfer_and_only_that",
    "test_a_transfer_with_a_hung_peer_does_not_fail_and_its_notice_arrives_later",
    "test_transfers_with_a_hung_peer_hold_up_no_other",
    "test_a_hundred_transfers_all_arrive_and_each_notice_follows_its_data",
)


@pytest.mark.timeout(280)
def test_nixl_conforms_over_tcp_alone():
    """In a process of its own: UCX reads its environment once."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            "tests/transfer/test_conformance.py",
            *("-k", f"nixl and ({' or '.join(CASES)})"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert f"{len(CASES) + 1} passed" in ran.stdout, ran.stdout[-400:]
