"""The tensors of KServe v2 requests and answers: strings, flags and counts."""

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError, UnsupportedFeatureError

#: Far above what any input has: what is longer is not even read.
_MAX_ELEMENTS = 1024
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name. ``shape`` has -1 for any length."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)


def read_tensors(request: Any, specs: Sequence[TensorSpec]) -> dict[str, list[bytes]]:
    """The elements of each input by its name, as bytes; a BOOL is one byte.

    Args:
        request: A ModelInferRequest.
        specs: The inputs there are.

    Raises:
        InvalidRequestError: an input has another type or shape, or its content does not fit it.
        UnsupportedFeatureError: an input that does not exist.
    """
    known = {spec.name: spec for spec in specs}
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"{len(raw)} contents of {len(request.inputs)} inputs", field="raw_input_contents"
        )
    found: dict[str, list[bytes]] = {}
    for index, tensor in enumerate(request.inputs):
        field = f"inputs.{tensor.name}"
        spec = known.get(tensor.name)
        if spec is None or tensor.parameters:
            what = "input" if spec is None else "parameter of an input"
            raise UnsupportedFeatureError(
                f"{field}: this {what} is not supported",
                reason="UNSUPPORTED_FIELD",
                metadata={"field": field},
            )
        if tensor.datatype != spec.datatype:
            raise InvalidRequestError(
                f"expected {spec.datatype}, found {tensor.datatype}", field=field
            )
        if tensor.name in found:
            raise InvalidRequestError("given twice", field=field)
        if len(tensor.shape) > _MAX_DIMENSIONS:
            raise InvalidRequestError(f"{len(tensor.shape)} dimensions are too many", field=field)
        values = list(
            itertools.islice(
                _split(raw[index], spec.datatype, field)
                if raw
                else _typed(tensor.contents, spec.datatype),
                _MAX_ELEMENTS + 1,
            )
        )
        if len(values) > _MAX_ELEMENTS:
            raise InvalidRequestError(f"more than {_MAX_ELEMENTS} elements", field=field)
        if math.prod(tensor.shape) != len(values) or (spec.shape == (1,) and len(values) != 1):
            raise InvalidRequestError(
                f"shape {list(tensor.shape)} and {len(values)} elements, expected shape "
                f"{list(spec.shape)}",
                field=field,
            )
        found[tensor.name] = values
    return found


def add_output(response: Any, spec: TensorSpec, value: str | int, *, raw: bool) -> None:
    """Adds an output of one element, in the form in which the request has its inputs."""
    tensor = response.outputs.add(name=spec.name, datatype=spec.datatype, shape=[1])
    if isinstance(value, str):
        data = value.encode()
        if raw:
            response.raw_output_contents.append(struct.pack("<I", len(data)) + data)
        else:
            tensor.contents.bytes_contents.append(data)
    elif raw:
        response.raw_output_contents.append(struct.pack("<I", value))
    else:
        tensor.contents.uint_contents.append(value)


def _typed(contents: Any, datatype: str) -> Iterator[bytes]:
    if datatype == "BYTES":
        return iter(contents.bytes_contents)
    return (bytes([flag]) for flag in contents.bool_contents)


def _split(data: bytes, datatype: str, field: str) -> Iterator[bytes]:
    """Strings follow their lengths (four bytes, little-endian); flags are a byte each."""
    if datatype == "BOOL":
        yield from (data[index : index + 1] for index in range(len(data)))
        return
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        position += 4
        if position + length > len(data):
            raise InvalidRequestError("its content is cut", field=field)
        yield data[position : position + length]
        position += length
