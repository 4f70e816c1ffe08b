"""Shared by all tests: full counts, the fleets of the session, the summary of a full run."""

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.shared_fleets import SharedFleets

SUMMARY_OPTION = "--summary-file"
NOTES = pytest.StashKey[list[str]]()

# How long an example takes says nothing on a machine that others use too, and outside a full run
# the same examples are drawn each time: a new counterexample is no reason for a red build.
settings.register_profile(
    "epd",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("EPD_TEST_FULL") != "1",
)
settings.load_profile("epd")


def pytest_addoption(parser):
    parser.addoption(SUMMARY_OPTION, help="write the run's summary to this file")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """How tests are divided among processes; see :class:`FilesTogether`."""
    from tests.support.parallel import FilesTogether

    return FilesTogether(config, log)


def pytest_sessionfinish(session):
    """Sends the notes of one of several processes to the one that writes the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["notes"] = session.config.stash.get(NOTES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    notes = getattr(node, "workeroutput", {}).get("notes", [])
    node.config.stash.setdefault(NOTES, []).extend(notes)


@pytest.fixture(scope="session")
def full_run():
    """True in ``make test-full``: full counts."""
    return os.environ.get("EPD_TEST_FULL") == "1"


@pytest.fixture(scope="session")
def note(request):
    """Adds a line to the run's summary."""
    return request.config.stash.setdefault(NOTES, []).append


@pytest.fixture(scope="session")
def shared_fleets():
    """Fleets that tests share; see :class:`SharedFleets`."""
    fleets = SharedFleets()
    yield fleets
    fleets.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random Qwen2-VL of a few layers."""
    from tests.support.tiny_model import make_tiny_qwen2vl  # imports torch, which not all need

    return make_tiny_qwen2vl(tmp_path_factory.mktemp("tiny-qwen2-vl"))


@pytest.fixture
async def open_channel():
    """Opens channels by address; closed at the end."""
    import grpc  # which not all need

    channels = []

    def open_to(address):
        channels.append(grpc.aio.insecure_channel(address))
        return channels[-1]

    yield open_to
    for channel in channels:
        await channel.close(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the logs of shared fleets to a failed test."""
    report = yield
    fleets = getattr(item, "funcargs", {}).get("shared_fleets")
    if report.failed and fleets is not None:
        report.sections.append(("fleet logs", fleets.logs()))
    return report


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Writes what ran on what, without naming the machine."""
    notes = config.stash.get(NOTES, [])
    for line in notes:
        terminalreporter.write_line(line)
    file = config.getoption(SUMMARY_OPTION)
    if not file:
        return
    counts = {
        outcome: len(terminalreporter.stats[outcome])
        for outcome in ("passed", "failed", "error", "skipped", "xfailed")
        if terminalreporter.stats.get(outcome)
    }
    by_folder: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        folder = "/".join(report.nodeid.split("/")[:2])
        by_folder[folder] = by_folder.get(folder, 0) + 1
    lines = [
        f"date     {time.strftime('%Y-%m-%d', time.gmtime())}",
        f"python   {platform.python_version()}, {os.cpu_count()} cores",
        *(
            # Which build of it, the machine decides.
            f"{name:<8} {metadata.version(name).partition('+')[0]}"
            for name in ("torch", "grpcio", "nixl-cu12")
        ),
        "",
        *(f"{folder:<20} {count} passed" for folder, count in sorted(by_folder.items())),
        "",
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
        "",
        *notes,
        "",
        "skipped:" if terminalreporter.stats.get("skipped") else "",
        *sorted({_reason(report) for report in terminalreporter.stats.get("skipped", [])}),
    ]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("\n".join(lines).strip() + "\n", encoding="utf-8")


def _reason(report):
    return f"  {report.nodeid.split('/')[-1]}: {report.longrepr[2]}"
