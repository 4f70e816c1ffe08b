"""How the fleet reads images.

All its encoders must do so alike: an embedding is found by a digest that the settings of the image
processor are part of, and which encoder an image meets is chance.
"""

from collections import Counter
from collections.abc import Sequence

from services.router.workers import Role, Worker


class FleetProcessor:
    """The settings that most encoders have; the others take no requests until they agree.

    Without encoders unified workers decide. Beside encoders they may differ: they read no images.
    """

    def __init__(self) -> None:
        #: Empty before the first worker that reads images.
        self.digest = ""
        self._deciding = Role.ENCODER

    def forget(self) -> None:
        """The fleet serves another model now."""
        self.digest = ""

    def update(self, workers: Sequence[Worker]) -> None:
        """Counts the workers that could take requests.

        Of equally many the settings in use stay. They also stay while nobody is there: a request
        that comes meanwhile may meet the next encoder.
        """
        for role in (Role.ENCODER, Role.DECODE):
            digests = [worker.info.processor_digest for worker in workers if worker.role is role]
            votes = Counter(digest for digest in digests if digest)
            if votes:
                self._deciding = role
                most = max(votes.values())
                if votes[self.digest] < most:
                    self.digest = next(digest for digest in votes if votes[digest] == most)
                return

    def objection(self, worker: Worker) -> str:
        """Why a worker must not be used; empty when it may."""
        digest = worker.info.processor_digest
        if worker.role is not self._deciding or digest in ("", self.digest):
            return ""
        return (
            f"reads images with processor {digest}, most of the fleet with {self.digest}: the "
            "model folder's processor settings and --jpeg-draft must be the same on all"
        )
