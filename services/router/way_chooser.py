"""Decides per request between both ways and tells what it knew: span and counters."""

from opentelemetry import trace
from opentelemetry.metrics import Counter

from epd.telemetry import semconv
from services.router.disaggregation import Costs, Hysteresis, Way, remote_cost_s, size_class
from services.router.exploration import Exploration
from services.router.placement import LocalPlacement, Placement

_WAY = "way"


class WayChooser:
    """Local or remote prefill, where both are possible.

    Args:
        decisions: Counts attempts by way.
        predicted: Sums the predicted seconds of both ways.
        explored: Counts attempts that went the other way to measure it.
        exploration: Says when that is to be done.
    """

    def __init__(
        self,
        decisions: Counter,
        predicted: Counter,
        explored: Counter,
        exploration: Exploration,
    ) -> None:
        self._hysteresis = Hysteresis()
        self._exploration = exploration
        self._explored = explored
        self._decisions = decisions
        self._predicted = predicted

    def choose(self, alone: LocalPlacement, pair: Placement) -> Way:
        """The way for a request, told on its span."""
        costs = Costs(remote_cost_s(pair.ttft_s, pair.transfer_s), alone.cost_s)
        size = size_class(min(alone.uncached_tokens, pair.uncached_tokens))
        way = self._hysteresis.choose(costs, size)
        explored = self._exploration.due(way, costs, size)
        if explored:
            way = way.other
            self._explored.add(1, {_WAY: way.value})
        self._decisions.add(1, {_WAY: way.value})
        self._predicted.add(costs.remote_s, {_WAY: Way.REMOTE.value})
        self._predicted.add(costs.local_s, {_WAY: Way.LOCAL.value})
        trace.get_current_span().set_attributes(
            {
                semconv.EPD_ROUTE_WAY: way.value,
                semconv.EPD_ROUTE_EXPLORED: explored,
                semconv.EPD_ROUTE_COST_REMOTE_S: costs.remote_s,
                semconv.EPD_ROUTE_COST_LOCAL_S: costs.local_s,
            }
        )
        return way
