"""A ModelInferRequest, read as Triton's vLLM backend reads it."""

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError, NotFoundError, UnsupportedFeatureError
from epd.rpc.request_context import new_id
from services.router.calls import (
    Conversation,
    GenerateCall,
    ImagePart,
    Message,
    PromptInput,
    TextPart,
    TextPrompt,
)
from services.router.http.fields import Fields
from services.router.http.sampling_fields import read_sampling, read_stop
from services.router.http.strict_json import read_json
from services.router.kserve.tensors import TensorSpec, read_tensors

#: The only version of the one model.
VERSION = "1"
INPUTS = (
    TensorSpec("text_input", "BYTES"),
    TensorSpec("image", "BYTES", (-1,)),
    TensorSpec("stream", "BOOL"),
    TensorSpec("sampling_parameters", "BYTES"),
    TensorSpec("exclude_input_in_output", "BOOL"),
    TensorSpec("return_finish_reason", "BOOL"),
    TensorSpec("return_num_input_tokens", "BOOL"),
    TensorSpec("return_num_output_tokens", "BOOL"),
)
TEXT = TensorSpec("text_output", "BYTES")
FINISH_REASON = TensorSpec("finish_reason", "BYTES")
INPUT_TOKENS = TensorSpec("num_input_tokens", "UINT32")
OUTPUT_TOKENS = TensorSpec("num_output_tokens", "UINT32")
OUTPUTS = (TEXT, FINISH_REASON, INPUT_TOKENS, OUTPUT_TOKENS)

#: vLLM's own.
_DEFAULT_MAX_TOKENS = 16
_EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
#: Values that clients written for vLLM's backend may send as text.
_NOT_NUMBERS = frozenset({"stop", "response_format", "structured_outputs"})


@dataclass(frozen=True)
class InferCall:
    """What is asked, and how it is told.

    Args:
        call: For the router.
        streams: One response per delta instead of one in all.
        before: Text that the whole output begins with.
        outputs: Names of the wanted ones.
        raw: Whether tensors travel as raw bytes.
        client_id: The client's own id, which it may use again and again.
    """

    call: GenerateCall
    streams: bool
    before: str
    outputs: frozenset[str]
    raw: bool
    client_id: str


def read_infer_request(request: Any, client: str) -> InferCall:
    """The checked request.

    Raises:
        InvalidRequestError: a field has no valid value.
        NotFoundError: a version that does not exist.
        UnsupportedFeatureError: a field that is not supported.
    """
    check_version(request.model_version)
    for name in sorted(request.parameters):
        if name != _EMPTY_FINAL_RESPONSE:
            raise _unsupported(f"parameters.{name}")
    inputs = read_tensors(request, INPUTS)
    if "text_input" not in inputs:
        raise InvalidRequestError("missing", field="inputs.text_input", reason="MISSING_FIELD")
    text = _text(inputs["text_input"][0], "inputs.text_input")
    streams = _flag(inputs, "stream", default=False)
    exclude = _flag(inputs, "exclude_input_in_output", default=streams)
    if streams and not exclude:
        raise InvalidRequestError(
            "a stream does not repeat its input", field="inputs.exclude_input_in_output"
        )
    fields = _sampling_fields(inputs)
    limit = fields.integer("max_tokens")
    call = GenerateCall(
        request_id=new_id(),
        model=request.model_name,
        prompt=_prompt(text, inputs.get("image", [])),
        sampling=read_sampling(
            fields, max_tokens=_DEFAULT_MAX_TOKENS if limit is None else limit, top_logprobs=0
        ),
        stop=read_stop(fields),
        client=client,
    )
    fields.only("n", 1)
    fields.finish()
    return InferCall(
        call,
        streams,
        "" if exclude else text,
        _outputs(request, inputs),
        bool(request.raw_input_contents),
        request.id,
    )


def check_version(version: str) -> None:
    """Takes no version or the only one.

    Raises:
        NotFoundError: another one.
    """
    if version not in ("", VERSION):
        raise NotFoundError(f"version {version[:32]!r} is not served", reason="MODEL_NOT_SERVED")


def _prompt(text: str, images: list[bytes]) -> PromptInput:
    """Raw text; with images a conversation, since in raw text nothing can stand for them."""
    if not images:
        return TextPrompt(text)
    return Conversation((Message("user", (*map(_image, images), TextPart(text))),))


def _image(data: bytes) -> ImagePart:
    try:
        return ImagePart(base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise InvalidRequestError("not valid base64", field="inputs.image") from error


def _sampling_fields(inputs: dict[str, list[bytes]]) -> Fields:
    path = "inputs.sampling_parameters"
    text = _text(inputs.get("sampling_parameters", [b"{}"])[0], path)
    try:
        values = read_json(text or "{}")
    except ValueError as error:
        raise InvalidRequestError("no JSON", field=path) from error
    if isinstance(values, dict):
        values = {name: _number(name, value) for name, value in values.items()}
    return Fields(values, path)


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, str) or name in _NOT_NUMBERS:
        return value
    try:
        return read_json(value)
    except ValueError:
        return value  # whoever reads the field says what is wrong


def _outputs(request: Any, inputs: dict[str, list[bytes]]) -> frozenset[str]:
    known = {spec.name for spec in OUTPUTS}
    for output in request.outputs:
        if output.name not in known or output.parameters:
            raise _unsupported(f"outputs.{output.name}")
    if request.outputs:
        return frozenset(output.name for output in request.outputs)
    return frozenset(
        name
        for name in known
        if name == TEXT.name or _flag(inputs, f"return_{name}", default=False)
    )


def _flag(inputs: dict[str, list[bytes]], name: str, *, default: bool) -> bool:
    return inputs[name][0] != b"\0" if name in inputs else default


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("not UTF-8", field=field) from error


def _unsupported(field: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{field} is not supported", reason="UNSUPPORTED_FIELD", metadata={"field": field}
    )
