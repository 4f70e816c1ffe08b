"""The OpenAI client, unmodified, at the HTTP port of a router."""

import openai


def openai_client(http_address: str, api_key: str = "unused") -> openai.AsyncOpenAI:
    """Asks once: what a router refuses is to be seen and not tried again."""
    return openai.AsyncOpenAI(base_url=f"http://{http_address}/v1", api_key=api_key, max_retries=0)
