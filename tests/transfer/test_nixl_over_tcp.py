"""NIXL's conformance when UCX may use TCP alone, as between containers or machines without RDMA."""

import pytest

from tests.support.over_tcp import pass_over_tcp

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
    expression = f"nixl and ({' or '.join(CASES)})"
    pass_over_tcp("tests/transfer/test_conformance.py", expression, len(CASES) + 1)
