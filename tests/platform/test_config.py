"""One definition gives flag, variable and file key, and mistakes are one clear line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from epd.config import (
    ConfigError,
    describe,
    option,
    resolve,
    resolve_or_exit,
    settings,
    unused_variables,
)


@dataclass(frozen=True)
class Nested:
    kv_blocks: int = option(64, help="blocks", unit="blocks", minimum=1)


@dataclass(frozen=True)
class Sample:
    model: Path = option(help="model folder")
    name: str | None = option(None, help="name")
    share: float = option(0.5, help="share", minimum=0, maximum=1)
    eager: bool = option(False, help="eager")
    kind: Literal["a", "b"] = option("a", help="kind")
    decodes: tuple[str, ...] = option((), help="decodes")
    nested: Nested = Nested()


def resolved(*argv, **environ):
    return resolve(Sample, ["--model", "m", *argv], environ)


def test_a_flag_wins_over_a_variable_over_a_file_over_the_default(tmp_path):
    file = tmp_path / "epd.toml"
    file.write_text('model = "from-file"\nname = "file"\nkv_blocks = 3\nshare = 0.25\n')
    config = resolve(
        Sample,
        ["--config", str(file), "--name", "flag"],
        {"EPD_NAME": "variable", "EPD_KV_BLOCKS": "5"},
    )
    assert config == Sample(
        model=Path("from-file"), name="flag", share=0.25, nested=Nested(kv_blocks=5)
    )


def test_the_file_may_be_named_by_a_variable(tmp_path):
    file = tmp_path / "epd.toml"
    file.write_text('decodes = ["a:1", "b:2"]\neager = true\n')
    config = resolved(EPD_CONFIG=str(file))
    assert (config.decodes, config.eager) == (("a:1", "b:2"), True)


@pytest.mark.parametrize(
    ("argv", "eager"),
    [([], False), (["--eager"], True), (["--eager=false"], False), (["--eager", "1"], True)],
)
def test_a_switch_stands_alone_or_takes_a_word(argv, eager):
    assert resolved(*argv).eager is eager


def test_a_list_is_separated_by_commas():
    assert resolved(EPD_DECODES="a:1, b:2,").decodes == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (["--modle", "x"], {}, "unrecognized arguments: --modle"),
        (["--kv-blocks", "many"], {}, "--kv-blocks: 'many' is not of type int"),
        (["--kv-blocks", "0"], {}, "--kv-blocks: 0 is below the least allowed value, 1"),
        (["--share", "1.5"], {}, "--share: 1.5 is above the largest allowed value, 1"),
        (["--share", "nan"], {}, "--share: 'nan' is not finite"),
        (["--kind", "c"], {}, "--kind: 'c' is none of a, b"),
        ([], {"EPD_EAGER": "perhaps"}, "EPD_EAGER: 'perhaps' is neither true nor false"),
        ([], {"EPD_CONFIG": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_a_wrong_setting_is_refused_and_named(argv, environ, text):
    with pytest.raises(ConfigError) as caught:
        resolved(*argv, **environ)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_of_the_file_is_refused_with_a_guess(tmp_path):
    file = tmp_path / "epd.toml"
    file.write_text("kv_block = 3\n")
    with pytest.raises(ConfigError, match="unknown key kv_block, did you mean kv_blocks"):
        resolved(EPD_CONFIG=str(file))


def test_a_required_setting_is_asked_for_by_flag_and_variable():
    with pytest.raises(ConfigError, match=r"--model \(or EPD_MODEL\) is required"):
        resolve(Sample, [], {})


def test_settings_that_contradict_each_other_are_refused():
    @dataclass(frozen=True)
    class Pair:
        low: int = option(1, help="low")
        high: int = option(2, help="high")

        def __post_init__(self):
            if self.low > self.high:
                raise ValueError("--low is above --high")

    with pytest.raises(ConfigError, match="--low is above --high"):
        resolve(Pair, ["--low", "3"], {})


def test_a_mistake_ends_the_process_with_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        resolve_or_exit(Sample, [], {}, "services.sample")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("services.sample: --model")


def test_variables_nobody_uses_are_named_not_swallowed():
    environ = {"EPD_MODEL": "m", "EPD_SAHRE": "1", "HOME": "/"}
    assert unused_variables(Sample, environ) == ["EPD_SAHRE"]


def test_settings_and_descriptions_are_flat():
    assert settings(resolved())["kv_blocks"] == 64
    described = {found.name: found for found in describe(Sample)}
    assert described["kv_blocks"].flag == "--kv-blocks"
    assert described["kv_blocks"].variable == "EPD_KV_BLOCKS"
    assert described["kv_blocks"].unit == "blocks"
    assert described["model"].required
