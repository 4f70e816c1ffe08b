"""The rendered prompt equals transformers' for the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from epd.errors import InvalidRequestError
from epd.text.chat_template import ChatTemplate
from tests.support.tiny_model import CHAT_TEMPLATE, _tokenizer
from tests.support.tool_template import LOOK, STOP, TOOL_TEMPLATE

PARTS: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief.\n"}]},
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": ' what\'s <this> & "that"?\n\n'},
            {"type": "image"},
        ],
    },
]
STRINGS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi\n"},
    {"role": "user", "content": "日本 & <b>"},
]
TEMPLATES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "qwen": (CHAT_TEMPLATE, PARTS),
    "blocks": (
        "{%- if true %}\n  {% for m in messages %}\n    {{ m.role }}:{{ m.content | trim }}\n"
        "    {%- if loop.first %}{% continue %}{% endif %}|{{ eos_token }}\n"
        "  {% endfor %}\n{% endif %}{{ 'A:' if add_generation_prompt }}",
        STRINGS,
    ),
    "tojson": ("{{ messages | tojson }}{{ messages | tojson(indent=2) }}", STRINGS),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        STRINGS,
    ),
    "date": ("{{ strftime_now('%Y-%m') }}{{ tools is none }}{{ documents is none }}", STRINGS),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(name: str, folder: Path) -> None:
    source, messages = TEMPLATES[name]
    (folder / "chat_template.jinja").write_text(source)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    assert template.render(messages) == expected


@pytest.mark.parametrize(
    "entry",
    [
        "{{ messages[0].content }}!",
        [{"name": "default", "template": "{{ messages[0].content }}!"}],
    ],
)
def test_older_folders_keep_the_template_in_tokenizer_config(folder: Path, entry: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "chat_template": entry}))
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    assert template.render(STRINGS) == "hello!"


def test_a_folder_without_a_template_has_none(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert ChatTemplate.from_folder(folder) is None


def test_whether_content_may_be_parts_is_found_out_by_trying() -> None:
    assert ChatTemplate(CHAT_TEMPLATE, {}).takes_parts
    assert not ChatTemplate("{{ '<' + messages[0]['content'] + '>' }}", {}).takes_parts
    assert not ChatTemplate("{{ messages[0].content }}", {}).takes_parts


def test_a_conversation_that_the_template_refuses_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(STRINGS)


def test_a_conversation_that_the_template_stumbles_over_is_the_clients_error() -> None:
    template = ChatTemplate("{% for k, v in tools[0].properties|items %}{{ k }}{% endfor %}", {})
    with pytest.raises(InvalidRequestError, match="mapping"):
        template.render(STRINGS, [{"properties": 5}])


def test_a_template_cannot_reach_python_internals() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequestError):
        template.render(STRINGS)


def test_tools_and_calls_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    _tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"x": "ä<"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "which?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "left"},
    ]
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tools=[LOOK, STOP], tokenize=False, add_generation_prompt=True
    )
    assert template.render(messages, [LOOK, STOP]) == expected


def test_whether_a_template_knows_tools_is_found_out_by_trying() -> None:
    assert ChatTemplate(TOOL_TEMPLATE, {}).takes_tools
    assert not ChatTemplate(CHAT_TEMPLATE, {}).takes_tools
    # One that tells of tools, and cannot show the calls that were made, would lose them.
    assert not ChatTemplate("{{ tools }}" + CHAT_TEMPLATE, {}).takes_tools
