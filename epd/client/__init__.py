"""A typed asyncio client of the router.

    async with EpdClient("127.0.0.1:50050") as client:
        stream = client.generate("what is different?", images=[Path("a.png"), Path("b.png")])
        async for delta in stream:
            print(delta.text, end="", flush=True)
        print(stream.completion.usage)

Needs neither torch nor a model folder.
"""

from epd.client.answers import Answer, AnswerStream, Completion, Delta, Usage
from epd.client.client import EpdClient
from epd.client.model import Model, Worker
from epd.client.prompts import Image, ImageUrl, Message, Prompt, RawText, Tokens, Video
from epd.client.sampling import Sampling
from epd.rpc.tls_config import ClientTlsConfig
from epd.sampling import Constraint, ConstraintKind

__all__ = [
    "Answer",
    "AnswerStream",
    "ClientTlsConfig",
    "Completion",
    "Constraint",
    "ConstraintKind",
    "Delta",
    "EpdClient",
    "Image",
    "ImageUrl",
    "Message",
    "Model",
    "Prompt",
    "RawText",
    "Sampling",
    "Tokens",
    "Usage",
    "Video",
    "Worker",
]
