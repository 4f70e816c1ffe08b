"""Threads that answer get a core soon; those that compute do not inherit that."""

import ctypes
import platform
import threading

import pytest

from epd.thread_slices import (
    PROMPT_SLICE_NS,
    compute_patiently,
    copy_promptly,
    serve_promptly,
    sleep_exactly,
    yield_core,
)

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
PR_GET_TIMERSLACK = 30


def slice_ns():
    """The calling thread's, from the kernel; ``struct sched_attr`` has it at byte 24."""
    attributes = (ctypes.c_uint64 * 6)()
    number = SCHED_GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 48, 0) == 0
    return attributes[3]


def on_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def a_kernel_with_slices():
    if platform.system() != "Linux" or platform.machine() not in SCHED_GETATTR:
        return False

    def changed():
        before = slice_ns()
        serve_promptly()
        return before != slice_ns()

    return on_a_thread(changed)


@pytest.mark.skipif(not a_kernel_with_slices(), reason="this kernel has no slices of threads")
def test_threads_inherit_a_short_slice_until_they_compute():
    usual = on_a_thread(slice_ns)

    def computing():
        inherited = slice_ns()
        compute_patiently()
        return inherited, slice_ns()

    def serving():
        serve_promptly()
        return on_a_thread(computing)

    assert on_a_thread(serving) == (PROMPT_SLICE_NS, usual)
    assert on_a_thread(slice_ns) == usual


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux has timer slack")
def test_a_polling_thread_sleeps_without_slack():
    def slack_ns():
        sleep_exactly()
        return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)

    assert on_a_thread(slack_ns) == 1


def test_where_the_kernel_knows_nothing_of_it_nothing_happens(monkeypatch):
    monkeypatch.setattr("epd.thread_slices._libc", lambda: None)
    for call in (serve_promptly, copy_promptly, compute_patiently, sleep_exactly, yield_core):
        call()
