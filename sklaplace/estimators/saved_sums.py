"""SavedSums: sums over shards in a checkpoint; `added_up` goes on with them.

Shards are added in their order, so that a sum that was interrupted and goes on is that
which was not, and neither depends on the number of workers.
"""

from dataclasses import dataclass, replace
from typing import Any

from sklaplace.core import progress
from sklaplace.core.checkpoint import Checkpoint
from sklaplace.core.parallel import ordered_map
from sklaplace.estimators.curvature_sums import CurvaturePass, CurvatureSums
from sklaplace.estimators.group_sums import added_over_group
from sklaplace.estimators.workers import Workers
from sklaplace.networks.shards import Shards
from sklaplace.posterior.last_layer import LastLayerRecorder


@dataclass(frozen=True)
class SavedSums:
    """Sums over the shards so far, in a checkpoint where there is one.

    What is recorded of each sample is saved shard by shard, since it grows with their
    number.

    Attributes
    ----------
    checkpoint : Checkpoint or None
        Where they are saved.
    name : str
        Of the network whose sums they are.
    """

    checkpoint: Checkpoint | None
    name: str

    def of_pass(self, number: int) -> "SavedSums":
        """Return those of a further pass over the samples."""
        return replace(self, name=f"{self.name}-{number}")

    def load(self) -> tuple[int, CurvatureSums | None]:
        """Return the number of shards that were added up, and their sums."""
        found = None if self.checkpoint is None else self.checkpoint.load(self.name)
        if self.checkpoint is None or found is None:
            return 0, None
        n_done, total = found
        rows = [self.checkpoint.load(self._rows(k)) for k in range(n_done)]
        if any(some is None for some in rows):
            return 0, None
        total.head_rows = rows[0]
        for some in rows[1:]:
            total.head_rows.merge(some)
        return n_done, total

    def save(self, n_done: int, total: CurvatureSums, rows: Any) -> None:
        """Save the sums over ``n_done`` shards, and the recorded rows of the last."""
        if self.checkpoint is not None:
            self.checkpoint.save(self._rows(n_done - 1), rows)
            bare = replace(total, head_rows=LastLayerRecorder(None))
            self.checkpoint.save(self.name, (n_done, bare))

    def _rows(self, shard: int) -> str:
        return f"{self.name}-rows-{shard}"


def added_up(
    work: CurvaturePass, shards: Shards, workers: Workers, saved: SavedSums
) -> CurvatureSums:
    """Return the sums over all shards, in as many passes as they need.

    Parameters
    ----------
    work : CurvaturePass
        The first pass.
    shards : Shards
        Training samples.
    workers : Workers
        What computes them.
    saved : SavedSums
        Where sums are saved, and taken from where there are any.
    """
    total, n_passes = _one_pass(work, shards, workers, saved), 1
    while total.accumulator.needs_another_pass():
        again = replace(work, accumulator=total.accumulator, is_first=False)
        saved_again = saved.of_pass(n_passes := n_passes + 1)
        more = _one_pass(again, shards, workers, saved_again)
        total.accumulator = more.accumulator
    return total


def _one_pass(
    work: CurvaturePass, shards: Shards, workers: Workers, saved: SavedSums
) -> CurvatureSums:
    """Return the sums of one pass, over the shards of all processes."""

    def own() -> CurvatureSums | None:
        n_done, total = saved.load()
        rows = workers.group.part(shards.rows)[n_done:]
        found = ordered_map(work, rows, shards.load, workers.n_jobs)
        for sums in progress.tracked(found, "curvature", len(rows)):
            if total is None:
                total = sums
            else:
                total.merge(sums)
            n_done += 1
            saved.save(n_done, total, sums.head_rows)
        return total

    return added_over_group(workers.group, own, work.accumulator)
