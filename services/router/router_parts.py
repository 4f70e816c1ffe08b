"""What a router is made of."""

from dataclasses import dataclass

from opentelemetry.metrics import Counter

from epd.telemetry.genai_metrics import GenAiMetrics
from epd.telemetry.setup import Telemetry
from epd.text.tokenizer import Tokenizer
from services.router.admission import Admission
from services.router.dispatcher import Dispatcher
from services.router.image_urls.url_images import UrlImages
from services.router.limits import RequestLimits
from services.router.prompt import PromptBuilder
from services.router.registry import WorkerRegistry
from services.router.retry import RetryPolicy
from services.router.retry_budget import RetryBudget
from services.router.routes import Routes
from services.router.waiting_line import WaitingLine


@dataclass(frozen=True)
class RouterParts:
    """What the router works with. ``end_ids`` are the model's end tokens."""

    registry: WorkerRegistry
    routes: Routes
    dispatcher: Dispatcher
    builder: PromptBuilder
    url_images: UrlImages
    tokenizer: Tokenizer
    admission: Admission
    line: WaitingLine
    limits: RequestLimits
    policy: RetryPolicy
    budget: RetryBudget
    telemetry: Telemetry
    metrics: GenAiMetrics
    retries: Counter
    end_ids: frozenset[int]
    first_token_timeout_s: float
    worker_patience_s: float
    output_capacity: int
    coalesce_s: float
