"""Cache of trained networks and their curvature, in ``memory``."""

from typing import Any

from sklaplace.core.cache import (
    Entry,
    check_memory,
    fingerprint,
    warn_without_memory,
)
from sklaplace.core.checks import warn_user
from sklaplace.core.random import RandomState
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.training.laplace import LaplaceTrainer


def cache_entry(
    trainer: LaplaceTrainer,
    data: TrainingData,
    *,
    memory: object,
    random_state: RandomState,
    settings: dict[str, Any],
) -> Entry | None:
    """Return the place of a `LaplaceFit` in ``memory``, or None without a cache.

    The key of the place is a hash of everything that the fit depends on. Without a
    seed, or if a part cannot be hashed, there is no cache, and a warning says so.

    Parameters
    ----------
    trainer : LaplaceTrainer
        Trainer of the networks.
    data : TrainingData
        Training samples, and any held-out samples for tuning.
    memory, random_state
        Parameters of the estimator.
    settings : dict
        Other settings of the estimator that affect the fit.
    """
    if memory is None:
        return None
    if random_state is None:
        warn_user(
            "memory has no effect with random_state=None, because every fit differs. "
            "Set random_state to a number.",
        )
        return None
    options = trainer.options
    # the options that decide which samples are held out, if any
    sample_use = options.uses_held_out, options.holds_out, options.uses_folds
    try:
        key = fingerprint(
            {
                "settings": settings,
                "curvature": options.curvature_settings(),
                "estimator": trainer.estimator,
                "seed": trainer.seed,
                "data": data,
                "splits": trainer.splits,
                # refitting all weights requires the training samples again
                "rows": (sample_use, options.may_refit, options.refine is True),
            }
        )
    except Exception as error:
        warn_without_memory(error)
        return None
    return Entry(check_memory(memory), key)
