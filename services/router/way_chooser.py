"""Decides per request between both ways and tells what it knew: span and counters."""

from opentelemetry import trace
from opentelemetry.metrics import Counter

from epd.telemetry import semconv
from services.router.disaggregation import Costs, Hysteresis, Way, remote_cost_s
from services.router.placement import LocalPlacement, Placement

_WAY = "way"


class WayChooser:
    """Local or remote prefill, where both are possible.

    Args:
        decisions: Counts attempts by way.
        predicted: Sums the predicted seconds of both ways.
    """

    def __init__(self, decisions: Counter, predicted: Counter) -> None:
        self._hysteresis = Hysteresis()
        self._decisions = decisions
        self._predicted = predicted

    def choose(self, alone: LocalPlacement, pair: Placement) -> Way:
        """The way for a request, told on its span."""
        costs = Costs(remote_cost_s(pair.ttft_s, pair.transfer_s), alone.cost_s)
        way = self._hysteresis.choose(costs, min(alone.uncached_tokens, pair.uncached_tokens))
        self._decisions.add(1, {_WAY: way.value})
        self._predicted.add(costs.remote_s, {_WAY: Way.REMOTE.value})
        self._predicted.add(costs.local_s, {_WAY: Way.LOCAL.value})
        trace.get_current_span().set_attributes(
            {
                semconv.EPD_ROUTE_WAY: way.value,
                semconv.EPD_ROUTE_COST_REMOTE_S: costs.remote_s,
                semconv.EPD_ROUTE_COST_LOCAL_S: costs.local_s,
            }
        )
        return way
