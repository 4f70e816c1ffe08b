"""The accuracy table in the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_BEGIN: Final = "<!-- accuracy: begin -->"
_END: Final = "<!-- accuracy: end -->"


def update_card(folder: Path, table: str) -> None:
    """Replace what stands between the two marks of the card, which must be there."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN, 1)
    _, after = rest.split(_END, 1)
    card.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}", encoding="utf-8")
