"""``python -m bench.kv_page DIR``: tables and plot of docs/benchmarks.md from the records in DIR.

DIR holds what ``kv_transfer --out DIR`` and ``kv_exposed --out DIR`` left there.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Sample, ratio, typical
from bench.kv_exposed import ARMS, p50
from bench.kv_transfer import raw_of
from bench.svg_plot import Chart, render

PAGE = Path("docs/benchmarks.md")
PICTURE = Path("docs/kv.svg")
BEGIN, END = "<!-- kv tables: begin -->", "<!-- kv tables: end -->"


def main(folder: Path, page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Rewrites the part of the page between the markers, and the picture. A benchmark without a
    record is left out.
    """
    lines: list[str] = []
    charts: list[Chart] = []
    for name, table, chart in (
        ("kv_transfer", _transfer_table, _transfer_chart),
        ("kv_exposed", _exposed_table, _exposed_chart),
    ):
        if (folder / f"{name}.json").is_file():
            record, raw = _record(folder, name)
            lines += [*table(record, raw), ""]
            charts.append(chart(record, raw))
    text = page.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text("\n".join([f"{head}{BEGIN}", *lines, END]) + tail)
    picture.write_text(render(charts))


def _record(folder: Path, name: str) -> tuple[dict[str, Any], list[Sample]]:
    record = json.loads((folder / f"{name}.json").read_text())
    return record, [Sample(**sample) for sample in record["raw"]]


def _origin(record: dict[str, Any]) -> str:
    origin = record["provenance"]
    return (
        f"`{origin['command']}`, {origin['cores']} cores of {origin['cpu']}, "
        f"load {origin['load_before']} before the start."
    )


def _sizes(record: dict[str, Any]) -> list[tuple[str, int]]:
    by_size = record["result"]["ratio_by_size"]
    return [(transport, int(size)) for transport, sizes in by_size.items() for size in sizes]


def _transfer_table(record: dict[str, Any], raw: Sequence[Sample]) -> list[str]:
    result = record["result"]
    lines = [
        _origin(record),
        "",
        "| transport | MiB | raw NIXL ms | epd ms | raw / epd | 95 % interval |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for transport, size in _sizes(record):
        samples = raw_of(raw, transport, size)
        found = ratio(samples, "raw", "epd")
        lines.append(
            f"| {transport} | {size} | {typical(samples, 'raw'):.2f} | "
            f"{typical(samples, 'epd'):.2f} | {found.value:.2f} | "
            f"{found.low:.2f} to {found.high:.2f} |"
        )
    return [
        *lines,
        "",
        f"Added at 4 MiB: {result['added_ms_4mb']} ms at most. Reserve and posting the first layer "
        f"on a decode worker under load: {result['reserve_ms_p50']} ms at p50. "
        f"Transfer thread with nothing announced: {result['idle_thread_percent']} % of a core.",
    ]


def _exposed_table(record: dict[str, Any], raw: Sequence[Sample]) -> list[str]:
    lines = [
        _origin(record),
        "",
        "| push | prompt tokens | exposed ms | KV still in flight ms | gap 1-2 ms | later gap ms | "
        "ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for arm in ARMS:
        for length in record["result"]["lengths"]:
            second, later = (p50(raw, arm, length, m) for m in ("second_gap", "later_gap"))
            lines.append(
                f"| {arm} | {length} | {p50(raw, arm, length, 'exposed'):.2f} | "
                f"{p50(raw, arm, length, 'kv_exposed'):.2f} | {second:.1f} | {later:.1f} | "
                f"{second / later:.2f} |"
            )
    return lines


def _transfer_chart(record: dict[str, Any], raw: Sequence[Sample]) -> Chart:
    lines: dict[str, list[tuple[float, float]]] = {}
    for transport, size in _sizes(record):
        samples = raw_of(raw, transport, size)
        for arm in ("raw", "epd"):
            gb_s = size * (1 << 20) / typical(samples, arm) / 1e6
            lines.setdefault(f"{transport}, {arm}", []).append((size, gb_s))
    return Chart("From post to the receiver's notice", "MiB", "GB/s", lines, log_x=True)


def _exposed_chart(record: dict[str, Any], raw: Sequence[Sample]) -> Chart:
    lengths = record["result"]["lengths"]
    lines = {
        f"push {arm}": [(length, p50(raw, arm, length, "exposed")) for length in lengths]
        for arm in ARMS
    }
    return Chart("Exposed hand-over", "prompt tokens", "ms", lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
