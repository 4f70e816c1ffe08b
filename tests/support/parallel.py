"""Tests in two processes at a time (``pytest -n 2``): most of their time is waiting for others.

What is measured there is measured on a busy machine, so bounds on time have to be generous anyway.
"""

from xdist.scheduler import LoadFileScheduling

#: Its files take turns in using one fleet, so one process runs them all.
SHARING_FLEETS = "tests/e2e/"


class FilesTogether(LoadFileScheduling):
    """A file's tests run in one process and one after another, for their module's fixtures.

    Files begin in the order of their names, which puts the long ones first.
    """

    def __init__(self, config, log=None):
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return SHARING_FLEETS if file.startswith(SHARING_FLEETS) else file
