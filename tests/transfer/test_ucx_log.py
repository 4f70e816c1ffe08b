"""UCX's log comes to us, unless the user wants it."""

import logging
import os
import time

import pytest

from epd.transfer.ucx_log import UcxLog

PREFIX = "[1796020834.960147] [host:4036 :0]   "
LINES = (
    "| prefill intra-node cfg#1 |",
    "| remote memory write by ucp_put*(multi) from host memory to host |",
    "| 0..inf | zero-copy | cma/memory |",
    "sock.c:345  UCX  WARN  unable to read somaxconn",
)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO"):
        monkeypatch.delenv(name, raising=False)


def test_tables_are_read_and_the_rest_goes_to_our_log(caplog):
    caplog.set_level(logging.INFO, "ucx")
    ucx = UcxLog()
    with ucx.captured(), open(os.environ["UCX_LOG_FILE"], "w") as file:
        file.writelines(f"{PREFIX}{line}\n" for line in LINES)
    deadline = time.monotonic() + 20
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ucx.carriers == ("shm",)
    (record,) = caplog.records
    assert (record.levelname, "unable to read somaxconn" in record.message) == ("WARNING", True)
    assert "UCX_LOG_FILE" not in os.environ, "children would write here"


@pytest.mark.parametrize("name", ["UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO"])
def test_a_log_that_the_user_has_set_up_is_left_alone(name, monkeypatch):
    monkeypatch.setenv(name, "y")
    before = dict(os.environ)
    ucx = UcxLog()
    with ucx.captured():
        assert dict(os.environ) == before
    assert ucx.carriers == ()
