"""Workers: the processes, of joblib and of torch.distributed, that compute sums."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sklaplace.core.checks import check_count, check_n_jobs
from sklaplace.core.distributed import Group

_BOOL = bool, np.bool_


@dataclass(frozen=True)
class Workers:
    """What computes sums over samples.

    Attributes
    ----------
    group : Group
        Processes, each of which computes those of a part of the shards.
    n_jobs : int or None
        Number of workers of each of them, see `ordered_map`.
    """

    group: Group
    n_jobs: int | None

    @classmethod
    def of(cls, options: Any) -> "Workers":
        """Return those that parameters of an estimator describe."""
        return cls(Group.of(options.distributed), options.n_jobs)


def group_of(model: Any) -> Group:
    """Return the group of an estimator, whose parameters are not checked yet."""
    return Group.of(isinstance(model.distributed, _BOOL) and model.distributed)


def check_workers(model: Any) -> None:
    """Raise for parameters of an estimator that describe no workers."""
    check_n_jobs(model.n_jobs)
    if model.n_shards is not None:
        check_count("n_shards", model.n_shards)
    value = model.distributed
    if not isinstance(value, _BOOL):
        raise ValueError(f"distributed={value!r} is not known. Choose True or False.")
    Workers.of(model)  # raises where there is no group
    if value and model.memory is not None:
        raise ValueError(
            "distributed=True cannot be used with memory: what one process finds there "
            "another may lack, and the first would wait for it. Use memory=None, or "
            "fit(X, y, checkpoint=...)."
        )
