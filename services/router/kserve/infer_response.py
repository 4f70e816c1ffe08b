"""Answers as ModelInferResponse messages."""

from typing import Any

from services.router.calls import Completion, Delta
from services.router.kserve.infer_request import (
    FINISH_REASON,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    TEXT,
    VERSION,
    InferCall,
)
from services.router.kserve.tensors import add_output

#: Triton's mark of the last response to a request of a stream.
_FINAL = "triton_final_response"


class ResponseWriter:
    """Writes the responses to one request.

    Args:
        asked: The request.
        model: As clients call it.
        stubs: The package's ``service_pb2``.
    """

    def __init__(self, asked: InferCall, model: str, stubs: Any) -> None:
        self._asked = asked
        self._model = model
        self._stubs = stubs

    def delta(self, delta: Delta) -> Any:
        """New tokens of a stream."""
        response = self._response(final=False)
        self._add(response, {TEXT: delta.text, OUTPUT_TOKENS: len(delta.token_ids)})
        return response

    def end(self, completion: Completion) -> Any:
        """The end of a stream: no text, and what is known only now."""
        response = self._response(final=True)
        self._add(response, {TEXT: "", OUTPUT_TOKENS: 0, **_at_the_end(completion)})
        return response

    def whole(self, text: str, completion: Completion) -> Any:
        """The answer in one piece."""
        response = self._response(final=True)
        tokens = completion.usage.completion_tokens
        values = {TEXT: self._asked.before + text, OUTPUT_TOKENS: tokens, **_at_the_end(completion)}
        self._add(response, values)
        return response

    def _response(self, *, final: bool) -> Any:
        response = self._stubs.ModelInferResponse(
            model_name=self._model, model_version=VERSION, id=self._asked.client_id
        )
        response.parameters[_FINAL].bool_param = final
        return response

    def _add(self, response: Any, values: dict[Any, str | int]) -> None:
        for spec, value in values.items():
            if spec.name in self._asked.outputs:
                add_output(response, spec, value, raw=self._asked.raw)


def _at_the_end(completion: Completion) -> dict[Any, str | int]:
    return {
        FINISH_REASON: completion.finish_reason.value,
        INPUT_TOKENS: completion.usage.prompt_tokens,
    }
