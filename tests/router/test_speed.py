"""Predicted times, from measured ones."""

import random

import pytest

from services.router.pick import cheapest
from services.router.speed import MeasuredLine, WorkerSpeed
from tests.router.test_prefix_knowledge import Clock


def test_a_line_is_learnt_from_measurements() -> None:
    line = MeasuredLine(0.005, 0.001, 1000.0)
    rng = random.Random(0)
    for _ in range(200):
        amount = rng.uniform(10, 2000)
        line.add(amount, (0.01 + 0.0002 * amount) * rng.uniform(0.9, 1.1))
    assert line.seconds(1000) == pytest.approx(0.21, rel=0.1)
    assert line.seconds(300, count=3) == pytest.approx(0.03 + 0.06, rel=0.2)


def test_equal_amounts_and_falling_times_never_make_a_negative_prediction() -> None:
    line = MeasuredLine(0.01, 0.001, 100.0)
    for amount in (100, 100, 100, 10, 1000):
        line.add(amount, 5.0 / amount)
    assert line.base >= 0
    assert line.slope >= 0
    assert line.seconds(0) >= 0


def test_a_worker_twice_as_slow_is_known_as_such_and_forgiven_when_not_measured() -> None:
    clock = Clock()
    line = MeasuredLine(0.0, 0.001, 100.0, half_life_s=60, clock=clock)
    slow, fast = WorkerSpeed(line), WorkerSpeed(line)
    for _ in range(100):
        clock.now += 0.1
        slow.add(100, 0.2)
        fast.add(100, 0.1)
    assert slow.seconds(100) / fast.seconds(100) == pytest.approx(2.0, rel=0.15)
    clock.now += 3600
    assert slow.seconds(100) == pytest.approx(fast.seconds(100), rel=0.01)


def test_one_outlier_counts_as_no_more_than_ten_times_the_expected() -> None:
    line = MeasuredLine(0.0, 0.001, 100.0)
    speed = WorkerSpeed(line)
    for _ in range(20):
        speed.add(100, 0.1)
    speed.add(100, 1000.0)
    assert speed.seconds(100) < 0.3


def test_a_slow_first_measurement_alone_makes_a_worker_no_slower_than_a_tie() -> None:
    line = MeasuredLine(0.0, 0.001, 100.0)
    cold, warm = WorkerSpeed(line), WorkerSpeed(line)
    cold.add(100, 5.0)
    assert cheapest([cold.seconds(100), warm.seconds(100)], [0, 1], random.Random(0)) == 0


def test_a_worker_ten_times_as_slow_is_known_as_such_after_a_while() -> None:
    line = MeasuredLine(0.0, 0.001, 100.0)
    slow, fast = WorkerSpeed(line), WorkerSpeed(line)
    for _ in range(100):
        slow.add(100, 1.0)
        for _ in range(10):  # most requests go to the fast one
            fast.add(100, 0.1)
    assert slow.seconds(100) / fast.seconds(100) > 5.0
