"""Cache of trained networks and their curvature, in ``memory``."""

from functools import partial
from itertools import chain
from typing import Any, cast

import torch

from sklaplace.core.cache import (
    cached,
    check_memory,
    fingerprint,
    warn_without_memory,
)
from sklaplace.core.checks import warn_user
from sklaplace.core.random import RandomState
from sklaplace.curvature.structures.kron import Kron
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit, accumulate_fit
from sklaplace.estimators.training.folds import train_with_folds
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.trainer import EncodedData


class UnfinishedFit(Exception):  # noqa: N818 - it is a result
    """Fit of a network whose training was interrupted. Such a fit is not cached."""


@torch.inference_mode(False)
def train_and_accumulate(trainer: LaplaceTrainer, encoded: EncodedData) -> LaplaceFit:
    """Train the networks, and accumulate the curvature of their losses."""
    network, folds = train_with_folds(trainer, encoded)
    return accumulate_fit(trainer.options, network, folds)


def cached_fit(
    trainer: LaplaceTrainer,
    encoded: EncodedData,
    *,
    memory: object,
    random_state: RandomState,
    settings: dict[str, Any],
) -> LaplaceFit:
    """Return the fit of `train_and_accumulate` from ``memory``, or compute it.

    Parameters
    ----------
    trainer, encoded
        Arguments of `train_and_accumulate`.
    memory, random_state
        Parameters of the estimator.
    settings : dict
        Other settings of the estimator that affect the fit.
    """
    if memory is None:
        return train_and_accumulate(trainer, encoded)
    if random_state is None:
        warn_user(
            "memory has no effect with random_state=None, because every fit differs. "
            "Set random_state to a number.",
        )
        return train_and_accumulate(trainer, encoded)
    try:
        key = _key(trainer, encoded, settings)
    except Exception as error:
        warn_without_memory(error)
        return train_and_accumulate(trainer, encoded)
    try:
        fit = cached(check_memory(memory), key, partial(_stored, trainer, encoded))
    except UnfinishedFit as unfinished:
        return cast(LaplaceFit, unfinished.args[0])
    trainer.check_trained(fit.network)
    return fit


def _key(
    trainer: LaplaceTrainer, encoded: EncodedData, settings: dict[str, Any]
) -> str:
    """Return a hash of everything that determines a `LaplaceFit`."""
    options = trainer.options
    rows = options.uses_held_out, options.holds_out, options.uses_folds
    return fingerprint(
        {
            "settings": settings,
            "curvature": options.curvature_settings(),
            "estimator": trainer.estimator,
            "seed": trainer.seed,
            "data": encoded,
            "splits": trainer.splits,
            # refitting all weights requires the training samples again
            "rows": (rows, options.may_refit, options.refine is True),
        }
    )


def _stored(trainer: LaplaceTrainer, encoded: EncodedData) -> LaplaceFit:
    """Return the fit to store; after Ctrl-C, raise UnfinishedFit with the fit."""
    fit = train_and_accumulate(trainer, encoded)
    if trainer.is_interrupted:
        raise UnfinishedFit(fit)
    if isinstance(fit.structure, Kron):
        # all prior precisions share the eigenvectors
        for factor in chain.from_iterable(fit.structure.factors):
            factor.eigh()
    return fit.stored()
