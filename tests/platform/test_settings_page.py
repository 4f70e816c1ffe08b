"""The settings page tells what the services really take."""

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "settings_page.py"


def test_settings_page_is_what_the_configuration_classes_say() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["PAGE"].read_text() == tool["render"](), "run python tools/settings_page.py"
