"""What is read from the tables that UCX prints."""

import pytest

from epd.transfer.ucx_tables import UcxTables

PUT = "remote memory write by ucp_put* from host memory to host"
POSTED = "remote memory write by ucp_put*(multi) from host memory to host"
READ = "remote memory read by ucp_get*(multi) into host memory from host"


def table(connection, operation, *rows):
    lines = ["+---+", f"| {connection} |", f"| {operation} |", "+---+", "| Range | Des | Config |"]
    lines += [f"| {row} |" for row in rows] + ["+---+"]
    return [f"[1796020834.960147] [host:4036 :0]   {line}\n" for line in lines]


def carriers_of(*tables):
    found = UcxTables()
    for line in (line for one in tables for line in one):
        assert found.take(line)
    return found.carriers


@pytest.mark.parametrize(
    ("config", "carrier"),
    [
        ("cma/memory", "shm"),
        ("sysv/memory", "shm"),
        ("52% on tcp/lo and 48% on tcp/eth0", "tcp"),
        ("rc_mlx5/mlx5_0:1", "rdma"),
        ("50% on dc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1", "rdma"),
        ("cuda_ipc/cuda", "cuda_ipc"),
    ],
)
def test_a_transport_is_named_by_what_it_is(config, carrier):
    assert carriers_of(table("p intra-node cfg#1", POSTED, f"0..inf | zero-copy | {config}")) == (
        carrier,
    )


def test_the_way_of_large_pieces_counts():
    rows = ("0..2038 | short | tcp/eth0", "2039..inf | zero-copy | rc_mlx5/mlx5_0:1")
    assert carriers_of(table("p inter-node cfg#1", POSTED, *rows)) == ("rdma",)


def test_what_was_posted_takes_precedence_over_what_a_single_put_would_take():
    default = table("p inter-node cfg#1", PUT, "0..inf | zero-copy | tcp/eth0")
    assert carriers_of(default) == ("tcp",)
    posted = table("p inter-node cfg#1", POSTED, "0..inf | zero-copy | cuda_ipc/cuda")
    assert carriers_of(default, posted) == ("cuda_ipc",)
    read = table("p inter-node cfg#1", READ, "0..inf | zero-copy | rc_mlx5/mlx5_0:1")
    assert carriers_of(default, read, default) == ("rdma",)


def test_connections_are_told_together_and_a_processs_own_is_none():
    assert carriers_of(
        table("p self cfg#0", PUT, "0..inf | zero-copy | self/memory"),
        table("p intra-node cfg#1", POSTED, "0..inf | zero-copy | cma/memory"),
        table("p inter-node cfg#2", POSTED, "0..inf | zero-copy | tcp/eth0"),
    ) == ("shm", "tcp")


@pytest.mark.parametrize(
    "line",
    [
        "[1796020834.960147] [host:4036 :0]  sock.c:345  UCX  WARN  unable to read somaxconn\n",
        "| not of UCX |\n",
        "\n",
    ],
)
def test_other_lines_are_left_to_the_log(line):
    tables = UcxTables()
    assert not tables.take(line)
    assert tables.carriers == ()
