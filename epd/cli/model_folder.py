"""The model folder a command was given, checked before any process starts."""

from pathlib import Path

from epd.config import ConfigError

DEFAULT_MODEL = Path("models/shapes-vl")


def check_model_folder(folder: Path) -> Path:
    """The folder, absolute.

    Raises:
        ConfigError: there is no model in it.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no model in {folder}: there is no config.json; name one with --model")
    return folder.resolve()
