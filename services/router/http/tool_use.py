"""What a chat request wants of tools: in the prompt, in the grammar and in the answer."""

import json
from dataclasses import dataclass, replace

from epd.errors import InvalidRequestError
from epd.sampling import Constraint, ConstraintKind, SamplingParams
from epd.text.call_parsers import CALL_PARSERS
from epd.text.forced_call import AnyCall, NamedCall, any_call_schema
from epd.text.tool_output import ToolOutput
from services.router.calls import Tool

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tools that the model is told of and how its answer is read.

    ``choice`` is ``none``, ``auto``, ``required`` or, with ``named`` set, ``named``; ``parser`` is
    one of :data:`CALL_PARSERS`.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str = ""
    parser: str = "hermes"

    @property
    def is_forced(self) -> bool:
        """Whether the answer can be nothing but a call."""
        return self.choice in ("required", "named")

    def output(self) -> ToolOutput | None:
        """What takes one answer apart; None where an answer is text."""
        match self.choice:
            case "auto":
                return CALL_PARSERS[self.parser]([tool.name for tool in self.tools])
            case "required":
                return AnyCall()
            case "named":
                return NamedCall(self.named)
        return None

    def constrained(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling that lets nothing but the forced call through.

        Raises:
            InvalidRequestError: the output is to follow something else already.
        """
        if self.choice == "none":
            return sampling
        if sampling.constraint is not None:
            raise InvalidRequestError(
                "not together with tools, unless tool_choice is none", field="response_format"
            )
        if not self.is_forced:
            return sampling
        parameters = {
            tool.name: json.loads(tool.definition).get("parameters") or _NO_ARGUMENTS
            for tool in self.tools
        }
        schema = parameters[self.named] if self.named else any_call_schema(parameters)
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
        return replace(sampling, constraint=constraint)
