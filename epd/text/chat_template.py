"""A model's chat template, rendered as ``transformers``' ``apply_chat_template`` renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epd.errors import InvalidRequestError, UnsupportedFeatureError

_PROBE = "probe"


class ChatTemplate:
    """Renders conversations. Thread-safe.

    Args:
        source: The Jinja template.
        special_tokens: Texts by name (``bos_token``, ``eos_token``, ...), as templates use them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        #: Whether a message's content may be a list of typed parts. Templates of text-only models
        #: often take strings only.
        self.takes_parts = self._renders_parts()
        #: Whether the template tells the model of tools, shows calls it has made, and results.
        self.takes_tools = self._renders_tools()

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """Reads ``chat_template.jinja``, else ``tokenizer_config.json``; None without template."""
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
        template_file = folder / "chat_template.jinja"
        if template_file.exists():
            source: str | None = template_file.read_text("utf-8")
        else:
            source = _default_template(config.get("chat_template"))
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text, ending where the assistant begins to speak.

        Args:
            messages: ``{"role": ..., "content": str or [{"type": "text", "text": ...} or
                {"type": "image"}, ...]}``; an assistant's may have ``tool_calls``.
            tools: ``{"type": "function", "function": {...}}`` each.

        Raises:
            InvalidRequestError: the template refuses the conversation (roles out of order), or
                cannot work with it.
        """
        try:
            return self._render(messages, tools)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # The others come of values that it did not expect, as of properties that are no object.
            reason = error.message if isinstance(error, jinja2.TemplateError) else str(error)
            raise InvalidRequestError(
                f"the chat template refuses the conversation: {reason or 'no reason given'}",
                field="conversation.messages",
                reason="CHAT_TEMPLATE_REFUSED",
            ) from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )

    def _renders_parts(self) -> bool:
        content = [{"type": "text", "text": _PROBE}]
        try:
            text = self._render([{"role": "user", "content": content}])
        except (jinja2.TemplateError, TypeError, AttributeError):
            return False
        return _PROBE in text and "'type'" not in text

    def _renders_tools(self) -> bool:
        tool, call, result = f"{_PROBE}-tool", f"{_PROBE}-call", f"{_PROBE}-result"
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": self._content(_PROBE)},
            {
                "role": "assistant",
                "content": self._content(""),
                "tool_calls": [
                    {"id": "x", "type": "function", "function": {"name": call, "arguments": {}}}
                ],
            },
            {"role": "tool", "tool_call_id": "x", "content": self._content(result)},
        ]
        function = {"name": tool, "parameters": {"type": "object", "properties": {}}}
        try:
            text = self._render(messages, [{"type": "function", "function": function}])
        except (jinja2.TemplateError, TypeError, AttributeError):
            return False
        return all(probe in text for probe in (tool, call, result))

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        return [{"type": "text", "text": text}] if self.takes_parts else text


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template.

    Raises:
        UnsupportedFeatureError: the model has none.
    """
    if template is None:
        raise UnsupportedFeatureError(
            "the model has no chat template: send text_prompt or token_prompt",
            reason="NO_CHAT_TEMPLATE",
        )
    return template


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _default_template(entry: Any) -> str | None:
    """Older configs hold several named templates; the one named default counts."""
    if isinstance(entry, list):
        return next((item["template"] for item in entry if item["name"] == "default"), None)
    return entry if isinstance(entry, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
