"""What UCX's own tables say about how it moves bytes."""

import re

#: What stands between ``[time] [host:pid:thread]`` and the end of a line of a table.
_ROW = re.compile(r"^\[[\d.]+\] \[[^\]]*\]\s+(?P<row>[|+].*[|+])\s*$")
#: A transport and the device it uses, as in ``cma/memory`` and in
#: ``52% on tcp/lo and 48% on tcp/eth0``
_LANE = re.compile(r"(?<![\w/])([a-z][a-z0-9_]*)/[\w.:-]+")

#: UCX's names of transports, or what they begin with, by what they are.
_CARRIERS = {
    "shm": ("posix", "sysv", "cma", "xpmem", "knem"),
    "tcp": ("tcp",),
    "rdma": ("rc", "dc", "ud", "srd", "gga"),
}


class UcxTables:
    """Takes the tables that UCX prints with ``UCX_PROTO_INFO`` in, line by line.

    A table is printed when a connection is set up or first used in another way::

        | prefill intra-node cfg#1                                        |
        | remote memory write by ucp_put*(multi) from host memory to host |
        | Range  | Description | Config                                   |
        | 0..inf | zero-copy   | cma/memory                               |
    """

    def __init__(self) -> None:
        self._titles: list[str] = []
        # By connection, and whether it is the way NIXL really posts (many at once) or only what a
        # single put would take, which UCX prints for every connection.
        self._found: dict[tuple[str, bool], frozenset[str]] = {}

    def take(self, line: str) -> bool:
        """Takes a line in; False: it belongs to no table."""
        matched = _ROW.match(line)
        if matched is None:
            return False
        row = matched["row"]
        if row.startswith("+"):
            return True
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 1:
            # Two titles a table; a third one begins the next.
            self._titles = [*self._titles, cells[0]] if len(self._titles) < 2 else [cells[0]]
        elif cells[0].endswith("inf") and len(self._titles) == 2:  # the way of large pieces
            connection, operation = self._titles
            if " self cfg#" not in connection:
                lanes = frozenset(map(_carrier, _LANE.findall(cells[-1])))
                self._found[connection, "(multi)" in operation] = lanes
        return True

    @property
    def carriers(self) -> tuple[str, ...]:
        """shm, tcp, rdma or UCX's own name, of all connections since the process start."""
        found = self._found.copy()  # another thread takes lines in
        posted = {connection for connection, as_posted in found if as_posted}
        return tuple(
            sorted(
                {
                    carrier
                    for (connection, as_posted), lanes in found.items()
                    for carrier in lanes
                    if as_posted or connection not in posted
                }
            )
        )


def _carrier(name: str) -> str:
    for carrier, names in _CARRIERS.items():
        if name.split("_")[0] in names:
            return carrier
    return name
