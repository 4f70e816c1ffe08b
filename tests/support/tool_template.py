"""A chat template that knows tools, in the way of Qwen2.5's, and tools to put into it."""

from typing import Any

TOOL_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def function(name: str, parameters: object = None, **fields: object) -> dict[str, Any]:
    """A tool as clients send it."""
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


#: All of its arguments are of few values, so that even a random model comes to an end.
LOOK = function(
    "look",
    {
        "type": "object",
        "properties": {
            "where": {"$ref": "#/$defs/where"},
            "closely": {"type": "boolean"},
        },
        "required": ["where", "closely"],
        "additionalProperties": False,
        "$defs": {"where": {"enum": ["left", "right"]}},
    },
    description="Looks at a side.",
)
STOP = function("stop")
