"""Two processes come to the same transport, or refuse naming both lists."""

import re

import pytest

from epd.errors import TransportMismatchError
from epd.transfer.base import AgentDescriptor
from epd.transfer.negotiation import negotiate


def process(name, *transports, metadata=b""):
    return [AgentDescriptor(name, name, transport, metadata) for transport in transports]


def test_the_first_transport_of_the_sending_side_that_both_have_is_used():
    here, there = negotiate(
        process("p", "mooncake", "nixl", "collective"), process("d", "collective", "nixl")
    )
    assert (here.agent_name, here.transport) == ("p", "nixl")
    assert (there.agent_name, there.transport) == ("d", "nixl")


def test_nothing_in_common_is_refused_naming_both_lists():
    with pytest.raises(TransportMismatchError, match=re.escape("nixl, mooncake on")) as refused:
        negotiate(process("p", "nixl", "mooncake"), process("d", "collective"))
    assert "collective on" in refused.value.message
    assert (refused.value.code, refused.value.reason) == (
        "FAILED_PRECONDITION",
        "TRANSPORT_MISMATCH",
    )


def test_local_leads_to_no_other_process():
    here = process("p", "local", metadata=b"one") + process("p", "nixl")
    other = process("d", "local", metadata=b"other")
    assert negotiate(here, process("p2", "local", metadata=b"one"))[1].transport == "local"
    assert negotiate(here, other + process("d", "nixl"))[1].transport == "nixl"
    with pytest.raises(TransportMismatchError):
        negotiate(here, other)
