"""Starts the router: ``python -m services.router --model DIR --decodes ... --prefills ...``.

1. Settings from flags, environment and file.
2. Bind, answer health checks with NOT_SERVING.
3. Tokenizer and chat template from the model folder.
4. Watch the workers; wait until they suffice for a request.
5. SERVING and the READY line.
"""

from epd.rpc.options import IMAGE_MESSAGE_BYTES
from epd.rpc.service import Service
from services.router.application import application
from services.router.config import RouterConfig

SERVICE = Service(
    role="router",
    config_class=RouterConfig,
    service_names=("epd.v1.RouterService",),
    application=application,
    starts_traces=True,
    message_bytes=IMAGE_MESSAGE_BYTES,
)

if __name__ == "__main__":
    SERVICE.main()
