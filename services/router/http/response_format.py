"""What the output must look like: OpenAI's response_format and vLLM's structured_outputs."""

import json

from epd.errors import InvalidRequestError, UnsupportedFeatureError
from epd.sampling import Constraint, ConstraintKind
from services.router.http.fields import Fields

_ANY_OBJECT = {"type": "object"}


def read_constraint(fields: Fields) -> Constraint | None:
    """Takes both fields; None where the output is free.

    Raises:
        InvalidRequestError: a field has no valid value, or both are set.
        UnsupportedFeatureError: a format that is not supported.
    """
    named = _response_format(fields.object("response_format"))
    structured = _structured_outputs(fields.object("structured_outputs"))
    if named and structured:
        raise InvalidRequestError("not together with response_format", field="structured_outputs")
    return named or structured


def _response_format(given: Fields | None) -> Constraint | None:
    if given is None:
        return None
    constraint: Constraint | None = None
    match given.required_text("type"):
        case "text":
            pass
        case "json_object":
            constraint = _schema(_ANY_OBJECT)
        case "json_schema":
            inner = given.object("json_schema")
            if inner is None:
                raise InvalidRequestError("missing", field=given.name("json_schema"))
            constraint = _schema(inner.take("schema") or _ANY_OBJECT)
            # Names are for people, and every schema is followed strictly.
            for field in ("name", "description"):
                inner.text(field)
            inner.flag("strict")
            inner.finish()
        case other:
            raise UnsupportedFeatureError(
                f"response_format {other[:32]!r} is not supported",
                reason="UNSUPPORTED_VALUE",
                metadata={"field": given.name("type")},
            )
    given.finish()
    return constraint


def _structured_outputs(given: Fields | None) -> Constraint | None:
    if given is None:
        return None
    regex, schema = given.text("regex"), given.take("json")
    given.finish()
    if (regex is None) == (schema is None):
        raise InvalidRequestError("one of regex and json must be set", field=given.path)
    return Constraint(ConstraintKind.REGEX, regex) if regex is not None else _schema(schema)


def _schema(schema: object) -> Constraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Constraint(ConstraintKind.JSON_SCHEMA, text)
