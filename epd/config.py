"""Configuration: one frozen dataclass defines flag, environment variable and TOML key at once.

A field made by :func:`option` named ``kv_blocks`` is the flag ``--kv-blocks``, the variable
``EPD_KV_BLOCKS`` and the TOML key ``kv_blocks``. A flag wins over a variable, a variable over the
file named by ``--config`` or ``EPD_CONFIG``, the file over the default. A field whose type is a
dataclass contributes its fields as if they were its owner's.
"""

import argparse
import dataclasses
import difflib
import math
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ENVIRONMENT_PREFIX = "EPD_"
CONFIG_VARIABLE = "EPD_CONFIG"
_OPTION = "epd.option"
_SECRET = "epd.secret"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is missing, unknown or out of range; the text is one line for people."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting. ``type`` is the bare type: of an item for tuples, without None for optionals."""

    name: str
    type: type
    default: Any
    help: str
    unit: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    repeated: bool

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def required(self) -> bool:
        """True when there is no default."""
        return self.default is dataclasses.MISSING


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that can be set from outside; without ``default`` it is required.

    Types: str, int, float, bool, Path, ``Literal`` of strings, ``tuple[X, ...]`` (comma-separated)
    and ``X | None``. ``minimum`` and ``maximum`` are inclusive. A ``secret`` is never shown.
    """
    metadata = {
        _OPTION: {"help": help, "unit": unit, "minimum": minimum, "maximum": maximum},
        _SECRET: secret,
    }
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def describe(cls: type) -> list[Option]:
    """All settings of a configuration class, in order, for generated documentation."""
    return [found for found, _ in _walk(cls)]


def resolve(cls: type[T], argv: Sequence[str], environ: Mapping[str, str], prog: str = "") -> T:
    """Builds the configuration from flags, environment and file.

    Variables that no setting of ``cls`` uses are left alone, because the services share one
    environment; :func:`unused_variables` names them for the log.

    Raises:
        ConfigError: an unknown flag or key, a value that does not parse or is out of range, a
            required setting that is absent, or an unreadable file.
    """
    options = {found.name: found for found in describe(cls)}
    flags = vars(_parser(cls, options, prog).parse_args(argv))
    config_file = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    values: dict[str, Any] = {}
    if config_file:
        values.update(_read_file(Path(config_file), options))
    for found in options.values():
        if found.variable in environ:
            values[found.name] = _parse(found, environ[found.variable], found.variable)
    for name, text in flags.items():
        if text is not None:
            values[name] = _parse(options[name], text, options[name].flag)
    for found in options.values():
        if found.required and found.name not in values:
            raise ConfigError(f"{found.flag} (or {found.variable}) is required: {found.help}")
    return typing.cast(T, _build(cls, values))


def resolve_or_exit(cls: type[T], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> T:
    """As :func:`resolve`, but a mistake ends the process with one line and status 2."""
    try:
        return resolve(cls, argv, environ, prog)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def unused_variables(cls: type, environ: Mapping[str, str]) -> list[str]:
    """``EPD_*`` variables that ``cls`` does not use: other services' settings or misspellings."""
    used = {found.variable for found in describe(cls)} | {CONFIG_VARIABLE}
    return sorted(
        name for name in environ if name.startswith(ENVIRONMENT_PREFIX) and name not in used
    )


def settings(config: Any) -> dict[str, Any]:
    """The values of a resolved configuration by setting name, flat; secrets only as set or not."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found.update(settings(value))
        else:
            hidden = field.metadata.get(_SECRET) and value
            found[field.name] = "(set)" if hidden else value
    return found


def _walk(cls: type) -> Iterator[tuple[Option, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _walk(hint)
        elif _OPTION in field.metadata:
            bare, repeated, choices = _bare_type(hint)
            yield (
                Option(
                    name=field.name,
                    type=bare,
                    default=field.default,
                    repeated=repeated,
                    choices=choices,
                    **field.metadata[_OPTION],
                ),
                field,
            )


def _bare_type(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _bare_type(inner)
    if origin is tuple:
        bare, _, choices = _bare_type(arguments[0])
        return bare, True, choices
    if origin is typing.Literal:
        return str, False, arguments
    assert hint in (str, int, float, bool, Path), f"no option can have the type {hint}"
    return hint, False, ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _parser(cls: type, options: Mapping[str, Option], prog: str) -> argparse.ArgumentParser:
    summary = (cls.__doc__ or "").strip().split("\n")[0]
    parser = _Parser(prog=prog or None, description=summary, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]"
    )
    for found in options.values():
        unit = f" ({found.unit})" if found.unit else ""
        default = "required" if found.required else f"default {_text(found.default) or 'none'}"
        text = f"{found.help}{unit} [{found.variable}; {default}]".replace("%", "%%")
        if found.type is bool:
            # A switch may stand alone; --x=false switches it off.
            parser.add_argument(found.flag, nargs="?", const="true", metavar="BOOL", help=text)
        else:
            metavar = "|".join(found.choices) or found.type.__name__.upper()
            parser.add_argument(found.flag, metavar=metavar, help=text)
    return parser


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _read_file(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    values = {}
    for key, value in content.items():
        if key not in options:
            close = difflib.get_close_matches(key, options, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}: unknown key {key}{hint}")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        values[key] = _parse(options[key], text, f"{path}: {key}")
    return values


def _parse(found: Option, text: str, source: str) -> Any:
    if found.repeated:
        return tuple(
            _parse_one(found, item.strip(), source) for item in text.split(",") if item.strip()
        )
    return _parse_one(found, text, source)


def _parse_one(found: Option, text: str, source: str) -> Any:
    if found.type is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{source}: {text!r} is neither true nor false")
        return text.lower() in _TRUE
    if found.choices and text not in found.choices:
        raise ConfigError(f"{source}: {text!r} is none of {', '.join(found.choices)}")
    try:
        value = found.type(text)
    except ValueError:
        raise ConfigError(f"{source}: {text!r} is not of type {found.type.__name__}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}: {text!r} is not finite")
    if found.minimum is not None and value < found.minimum:
        raise ConfigError(f"{source}: {text} is below the least allowed value, {found.minimum}")
    if found.maximum is not None and value > found.maximum:
        raise ConfigError(f"{source}: {text} is above the largest allowed value, {found.maximum}")
    return value


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    arguments = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[field.name] = _build(hint, values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    try:
        return cls(**arguments)
    except ValueError as error:  # __post_init__ checks that compare settings with each other
        raise ConfigError(str(error)) from error
