"""The load of a worker: booked exactly for this router, reported for others."""

import time

from services.router.account import LoadReport, WorkerAccount


def test_a_booking_is_given_back_once_whatever_is_called() -> None:
    account = WorkerAccount()
    first = account.book(prompt_tokens=100, uncached_tokens=40)
    second = account.book(prompt_tokens=10, uncached_tokens=10)
    assert (account.load, account.waiting_tokens, account.waiting_prompts) == (2, 50, 2)
    first.computed()
    assert (account.load, account.waiting_tokens, account.waiting_prompts) == (2, 10, 1)
    for _ in range(2):
        first.release()
        second.release()
    assert (account.load, account.waiting_tokens, account.waiting_prompts) == (0, 0, 0)


def test_only_what_exceeds_this_routers_own_work_is_taken_for_others() -> None:
    account = WorkerAccount()
    booking = account.book(prompt_tokens=1000, uncached_tokens=50)
    account.report(LoadReport(1, waiting_tokens=1000))
    assert (account.load, account.waiting_tokens) == (1, 50)
    account.report(LoadReport(3, waiting_tokens=1700))
    assert (account.load, account.waiting_tokens, account.waiting_prompts) == (3, 750, 2)
    booking.release()
    account.report(LoadReport(0))
    assert (account.load, account.waiting_tokens, account.waiting_prompts) == (0, 0, 0)


def test_blocks_booked_since_the_last_report_are_not_free() -> None:
    account = WorkerAccount()
    assert account.free_blocks is None
    account.report(LoadReport(0, free_blocks=10, total_blocks=16))
    with account.booked(blocks=4):
        assert account.free_blocks == 6
        account.report(LoadReport(1, free_blocks=6, total_blocks=16))
        assert account.free_blocks == 6


def test_the_time_of_a_prompt_begins_when_the_one_before_it_is_done() -> None:
    account = WorkerAccount()
    first, second = (account.book(prompt_tokens=1) for _ in range(2))
    time.sleep(0.2)
    began_s = time.monotonic()
    assert first.computed() >= 0.2
    assert second.computed() <= time.monotonic() - began_s
