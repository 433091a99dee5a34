"""Workers: parameters of the processes, of joblib and torch.distributed."""

from typing import Any

import numpy as np

from sklaplace.core.checks import check_count, check_n_jobs
from sklaplace.core.distributed import Group

_BOOL = bool, np.bool_


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
    Group.of(value)  # raises where there is no group
    if value and model.memory is not None:
        raise ValueError(
            "distributed=True cannot be used with memory: what one process finds there "
            "another may lack, and the first would wait for it. Use memory=None."
        )
