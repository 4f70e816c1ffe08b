"""Writes docs/settings.md from the configuration classes: ``python tools/settings_page.py``."""

from pathlib import Path

from epd.config import Option, describe
from services.decode.config import DecodeConfig
from services.encoder.config import EncoderConfig
from services.prefill.config import PrefillConfig
from services.router.config import RouterConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
ROLES = {
    "router": RouterConfig,
    "encoder": EncoderConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}


def render() -> str:
    """The page; one table per service."""
    lines = [
        "# Settings",
        "",
        "A setting is a flag (`--kv-blocks`), a variable (`EPD_KV_BLOCKS`) and a key of the TOML",
        "file that `--config` or `EPD_CONFIG` names. Flags win over variables, these over it.",
        "This page is made by `python tools/settings_page.py`.",
    ]
    for role, config in ROLES.items():
        lines += [
            "",
            f"## {role}",
            "",
            "| setting | default | unit | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_row(option) for option in describe(config)]
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    default = "required" if option.required else f"`{option.default}`"
    return f"| `{option.name}` | {default} | {option.unit} | {option.help} |"


if __name__ == "__main__":
    PAGE.write_text(render())
