"""A real language model through the engine: the same tokens as transformers ``generate``."""

import threading
from pathlib import Path
from typing import Any

import pytest

from epd.engine.build import build_engine
from epd.engine.engine_config import EngineConfig
from epd.engine.requests import EngineEvent, EngineRequest, Failed, Finished, NewTokens
from epd.errors import UnavailableError
from epd.model_fetch import fetch
from epd.sampling import SamplingParams

NEW_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers.",
    "Summarise this: " + "The quick brown fox jumps over the lazy dog. " * 120,  # over 1024 tokens
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch("smollm2")
    except UnavailableError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error.message}")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    rendered: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True
    )
    return list(rendered["input_ids"])


def run_together(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once in chunks of 256 tokens, so that chunks and decodes share steps."""
    config = EngineConfig(block_size=32, num_blocks=96, max_running=8, token_budget=256, threads=1)
    engine = build_engine(folder, config, model_digest="")
    tokens: dict[str, list[int]] = {str(row): [] for row in range(len(prompts))}
    left, ended = set(tokens), threading.Event()

    def deliver(events: list[tuple[str, EngineEvent]]) -> None:
        for request_id, event in events:
            if isinstance(event, NewTokens):
                tokens[request_id] += event.token_ids
            elif isinstance(event, Finished | Failed):
                left.discard(request_id)
        if not left:
            ended.set()

    engine.start(deliver)
    try:
        for request_id, prompt in zip(tokens, prompts, strict=True):
            sampling = SamplingParams(max_tokens=NEW_TOKENS)
            engine.submit(EngineRequest(request_id, prompt, sampling))
        assert ended.wait(240)
    finally:
        engine.stop()
    return list(tokens.values())


@pytest.mark.timeout(300)
def test_mixed_prompts_give_the_tokens_of_generate(folder: Path, prompts: list[list[int]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert max(len(prompt) for prompt in prompts) > 1024
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert run_together(folder, prompts) == expected
