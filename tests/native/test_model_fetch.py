"""``epd model fetch smollm2``: a plain folder that transformers loads and that talks sense."""

from pathlib import Path
from typing import Any

import pytest

from epd.errors import InvalidRequestError, UnavailableError
from epd.model_fetch import default_folder, fetch, is_complete
from epd.model_fetch.fetch import MARKER


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch("smollm2")
    except UnavailableError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error.message}")


def test_the_folder_loads_with_plain_transformers_and_answers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert output[0, -1] == tokenizer.eos_token_id


def test_a_second_fetch_does_nothing(folder: Path) -> None:
    before = (folder / MARKER).stat().st_mtime_ns
    assert fetch("smollm2", folder) == folder
    assert (folder / MARKER).stat().st_mtime_ns == before


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequestError, match="holds something else"):
        fetch("smollm2", tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_half_made_folder_is_not_taken_for_complete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_complete("smollm2", tmp_path)


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="there is: smollm2"):
        default_folder("gpt-5")
