"""Tables and picture come from the records alone."""

from pathlib import Path
from xml.etree import ElementTree

from bench.harness import Sample
from bench.kv_exposed import MEASURES
from bench.kv_page import BEGIN, END, main
from bench.record import provenance, save


def samples(arms: dict[str, float]) -> list[dict[str, object]]:
    return [
        vars(Sample(arm, number, number, value))
        for number in range(3)
        for arm, value in arms.items()
    ]


def test_a_page_holds_what_was_measured_between_its_markers(tmp_path: Path) -> None:
    origin = provenance(["kv_page"])
    transfer = {
        "ratio_by_size": {"shm": {"4": 0.5}},
        "added_ms_4mb": 0.7,
        "reserve_ms_p50": 1.5,
        "idle_thread_percent": 0.6,
    }
    moved = samples({"shm@4 raw": 1.0, "shm@4 epd": 2.0})
    save(tmp_path, "kv_transfer", origin, transfer, moved)
    times = {
        f"{arm}@{n} {m}": n / 64
        for arm in ("layerwise", "after")
        for n in (64, 256)
        for m in MEASURES
    }
    save(tmp_path, "kv_exposed", origin, {"lengths": [64, 256]}, samples(times))
    page, picture = tmp_path / "page.md", tmp_path / "kv.svg"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # the second time gives the same
        main(tmp_path, page, picture)
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert text.count("| shm | 4 | 1.00 | 2.00 | 0.50 | 0.50 to 0.50 |") == 1
        assert text.count("| after | 256 | 4.00 | 4.00 | 4.0 | 4.0 | 1.00 |") == 1
    lines = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 4
