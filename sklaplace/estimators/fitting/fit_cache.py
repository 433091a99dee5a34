"""Cache of trained networks and their curvature, in ``memory``."""

from dataclasses import dataclass
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
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit, LaplaceSolver
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.trainer import EncodedData


class UnfinishedFit(Exception):  # noqa: N818 - it is a result
    """Fit of a network whose training was interrupted. Such a fit is not cached."""


@dataclass(frozen=True)
class FitWork:
    """Pending work of a fit: train a network and accumulate its curvature.

    Attributes
    ----------
    trainer : LaplaceTrainer
        Trainer of the network.
    solver : LaplaceSolver
        Solver that accumulates the curvature.
    data : EncodedData
        Training samples, and any held-out samples for tuning.
    """

    trainer: LaplaceTrainer
    solver: LaplaceSolver
    data: EncodedData

    def done(self) -> LaplaceFit:
        """Train the network and accumulate its curvature."""
        with torch.inference_mode(False):
            return self.solver.accumulate(*self.trainer.train_with_folds(self.data))

    def key(self, settings: dict[str, Any]) -> str:
        """Return a hash of everything that determines the `LaplaceFit`."""
        options = self.solver.options
        rows = options.uses_held_out, options.holds_out, options.uses_folds
        return fingerprint(
            {
                "settings": settings,
                "curvature": options.curvature_settings(),
                "estimator": self.trainer.estimator,
                "seed": self.trainer.seed,
                "data": self.data,
                "splits": self.trainer.splits,
                # refitting all weights requires the training samples again
                "rows": (rows, options.may_refit, options.refine is True),
            }
        )


def cached_fit(
    work: FitWork, memory: object, random_state: RandomState, settings: dict[str, Any]
) -> LaplaceFit:
    """Return a fit from ``memory``, or compute a new fit.

    Parameters
    ----------
    work : FitWork
        Work to do if no fit is stored.
    memory, random_state
        Parameters of the estimator.
    settings : dict
        Other settings of the estimator that affect the fit.
    """
    if memory is None:
        return work.done()
    if random_state is None:
        warn_user(
            "memory has no effect with random_state=None, because every fit differs. "
            "Set random_state to a number.",
        )
        return work.done()
    try:
        key = work.key(settings)
    except Exception as error:
        warn_without_memory(error)
        return work.done()
    try:
        fit = cached(check_memory(memory), key, partial(_stored, work))
    except UnfinishedFit as unfinished:
        return cast(LaplaceFit, unfinished.args[0])
    work.trainer.check_trained(fit.network)
    return fit


def _stored(work: FitWork) -> LaplaceFit:
    """Return the fit to store; after Ctrl-C, raise UnfinishedFit with the fit."""
    fit = work.done()
    if work.trainer.is_interrupted:
        raise UnfinishedFit(fit)
    if isinstance(fit.structure, Kron):
        # all prior precisions share the eigenvectors
        for factor in chain.from_iterable(fit.structure.factors):
            factor.eigh()
    return fit.stored()
