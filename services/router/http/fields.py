"""Reads a JSON object field by field, and refuses what nobody has read."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from epd.errors import InvalidRequestError, UnsupportedFeatureError


class Fields:
    """One JSON object of a request. A field that is null counts as absent.

    Args:
        value: What should be an object.
        path: Where it stands in the request; empty for the request itself.

    Raises:
        InvalidRequestError: it is no object.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise InvalidRequestError(f"expected an object, found {_kind(value)}", field=path)
        self._values = {name: found for name, found in value.items() if found is not None}
        self.path = path

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def name(self, field: str) -> str:
        """The field's path from the request's root."""
        return f"{self.path}.{field}" if self.path else field

    def take(self, field: str) -> Any:
        """The field's value, whatever it is; None when absent."""
        return self._values.pop(field, None)

    def text(self, field: str) -> str | None:
        """A string."""
        value: str | None = self._typed(field, str)
        return value

    def required_text(self, field: str) -> str:
        """A string that must be there."""
        value = self.text(field)
        if value is None:
            raise InvalidRequestError("missing", field=self.name(field), reason="MISSING_FIELD")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self._typed(field, bool)
        return default if value is None else value

    def integer(self, field: str) -> int | None:
        """A whole number."""
        if isinstance(self._values.get(field), bool):  # a bool is an int to Python
            raise self._wrong(field, "integer", True)
        value: int | None = self._typed(field, int)
        return value

    def number(self, field: str) -> float | None:
        """A finite number."""
        value = self.take(field)
        return None if value is None else self._number(field, value)

    def numbers(self, field: str) -> list[float]:
        """An array of finite numbers; empty when absent."""
        return [self._number(field, value) for value in self.items(field)]

    def items(self, field: str) -> list[Any]:
        """An array; empty when absent."""
        return self._typed(field, list) or []

    def object(self, field: str) -> "Fields | None":
        """An object."""
        value = self.take(field)
        return None if value is None else Fields(value, self.name(field))

    def objects(self, field: str) -> Iterator["Fields"]:
        """An array of objects."""
        for index, value in enumerate(self.items(field)):
            yield Fields(value, f"{self.name(field)}[{index}]")

    def only(self, field: str, *allowed: Any) -> None:
        """A field that is understood, of which nothing but these values is supported."""
        value = self.take(field)
        if value is not None and value not in allowed:
            known = ", ".join(repr(value) for value in allowed)
            raise UnsupportedFeatureError(
                f"{self.name(field)} is supported only as {known}",
                reason="UNSUPPORTED_VALUE",
                metadata={"field": self.name(field)},
            )

    def finish(self) -> None:
        """Refuses the fields that are left: none is ever ignored.

        Raises:
            UnsupportedFeatureError: names the first of them.
        """
        for field in self._values:
            raise UnsupportedFeatureError(
                f"{self.name(field)} is not supported",
                reason="UNSUPPORTED_FIELD",
                metadata={"field": self.name(field)},
            )

    def _number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(field, "number", value)
        try:
            number = float(value)
        except OverflowError:  # an integer may have any number of digits
            number = math.inf
        if not math.isfinite(number):
            raise InvalidRequestError("not a finite number", field=self.name(field))
        return number

    def _typed(self, field: str, kind: type) -> Any:
        value = self.take(field)
        if value is not None and not isinstance(value, kind):
            raise self._wrong(field, _NAMES[kind], value)
        return value

    def _wrong(self, field: str, wanted: str, value: Any) -> InvalidRequestError:
        return InvalidRequestError(
            f"expected {wanted}, found {_kind(value)}", field=self.name(field), reason="WRONG_TYPE"
        )


_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)
