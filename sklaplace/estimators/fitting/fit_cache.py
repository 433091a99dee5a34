"""A trained network and its curvature, from ``memory`` where they are stored."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from sklaplace.core.cache import (
    cached,
    check_memory,
    fingerprint,
    warn_without_memory,
)
from sklaplace.core.checks import warn_user
from sklaplace.core.random import RandomState, private_rng
from sklaplace.curvature.structures.kron import Kron
from sklaplace.curvature.uses import UnseenUseError
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit, LaplaceSolver
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.options.workers import Group
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.networks.data import TrainingData
from sklaplace.networks.trained import TrainedNetwork


class UnfinishedFit(Exception):  # noqa: N818 - it is a result
    """A fit around a network whose training was interrupted."""


@dataclass(frozen=True)
class FitWork:
    """Training of a network and accumulation of its curvature, yet to be done.

    Attributes
    ----------
    trainer : LaplaceTrainer
        Trains the network.
    solver : LaplaceSolver
        Accumulates the curvature.
    group : Group
        Processes that compute the fit together.
    data, validation : TrainingData
        Training samples, and samples to tune on or None.
    fit_params : dict
        For the ``fit`` of the skorch net.
    """

    trainer: LaplaceTrainer
    solver: LaplaceSolver
    group: Group
    data: TrainingData
    validation: TrainingData | None
    fit_params: dict[str, Any]

    def done(self) -> LaplaceFit:
        """Train and accumulate.

        Raises
        ------
        UnfinishedFit
            If training was interrupted. Its argument is the fit.
        """
        trainer = self.trainer
        device = getattr(inner_net(trainer.estimator), "device", "cpu")
        with torch.inference_mode(False):
            with self.group.together(), private_rng(trainer.seed, device):
                networks = trainer.train_with_folds(
                    self.data, self.validation, self.fit_params
                )
            # after `private_rng`, which admits one thread at a time: a fit would wait
            # for workers that wait for the fit
            if self.group.size == 1:
                fit = _accumulated(self.solver, trainer, *networks)
            else:
                fit = self.solver.accumulate(*networks)
        if trainer.is_interrupted:
            raise UnfinishedFit(fit)
        return fit

    def key(self, settings: dict[str, Any]) -> str:
        """Return a hash of everything that the `LaplaceFit` depends on."""
        options = self.solver.options
        rows = options.tunes_on_held_out, options.holds_out, options.uses_folds
        return fingerprint(
            {
                "settings": settings,
                "curvature": options.curvature_settings(),
                "estimator": self.trainer.estimator,
                "seed": self.trainer.seed,
                "data": (self.data, self.validation, self.fit_params),
                # a refit of all weights needs the training samples again
                "rows": (rows, options.may_refit, options.refine is True),
            }
        )


def cached_fit(
    work: FitWork, memory: Any, random_state: RandomState, settings: dict[str, Any]
) -> LaplaceFit:
    """Return a fit from ``memory``, or a new one.

    Parameters
    ----------
    work : FitWork
        Makes a new fit.
    memory, random_state
        Parameters of the estimator.
    settings : dict
        Other values of the estimator that the fit depends on.

    Raises
    ------
    UnfinishedFit
        If training was interrupted. The fit is not stored.
    """
    if memory is None:
        return work.done()
    if random_state is None:
        warn_user(
            "memory has no effect with random_state=None, which makes every fit "
            "differ. Set random_state to a number.",
        )
        return work.done()
    try:
        key = work.key(settings)
    except Exception as error:
        warn_without_memory(error)
        return work.done()
    fit = cached(check_memory(memory), key, lambda: _factorised(work.done()).stored())
    work.trainer.check_trained(fit.network)
    return fit


def _factorised(fit: LaplaceFit) -> LaplaceFit:
    """Compute the eigenvectors of a fit, which serve all prior precisions."""
    if isinstance(fit.structure, Kron):
        for factor in chain.from_iterable(fit.structure.factors):
            factor.eigh()
    return fit


def _accumulated(
    solver: LaplaceSolver,
    trainer: LaplaceTrainer,
    network: TrainedNetwork,
    folds: list[TrainedNetwork],
) -> LaplaceFit:
    """Return the fit of networks, whose layouts may be inferred from more samples.

    Those use layers in ways that the first few do not.
    """
    shown: list[Any] = []
    while True:
        try:
            return solver.accumulate(network, folds)
        except UnseenUseError as error:
            shown.append(error.samples)
            before, including = network.spec.layout, trainer.including
            network, *folds = (including(one, shown) for one in (network, *folds))
            after = network.spec.layout
            if (before.blocks, before.uses) == (after.blocks, after.uses):
                raise
