"""A fit of a Laplace estimator, from ``memory`` where it is stored."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sklaplace.core.cache import cached, check_memory
from sklaplace.core.fingerprint import fingerprint
from sklaplace.core.random import private_rng
from sklaplace.core.warn import warn_user
from sklaplace.curvature.uses import UnseenUseError
from sklaplace.estimators.laplace_fit import LaplaceFit, LaplaceSolver
from sklaplace.estimators.laplace_trainer import LaplaceTrainer
from sklaplace.estimators.options import LaplaceOptions
from sklaplace.estimators.samples import Samples
from sklaplace.estimators.trainer import inner_net
from sklaplace.estimators.workers import group_of
from sklaplace.networks.data import TrainingData
from sklaplace.networks.trained import TrainedNetwork


class UnfinishedFit(Exception):  # noqa: N818 - it is a result
    """A fit around a network whose training was interrupted."""


def cached_fit(
    model: Any,
    options: LaplaceOptions,
    data: TrainingData,
    validation: TrainingData | None,
    samples: Samples,
) -> LaplaceFit:
    """Return a fit from the ``memory`` of an estimator, or a new one.

    Raises
    ------
    UnfinishedFit
        If training was interrupted. Its argument is the fit, which is not stored.
    """
    memory, params = check_memory(model.memory), samples.fit_params
    trainer = replace(model._trainer(options), is_part=samples.is_part)
    key = partial(_key, model, options, data, validation, params)
    group = group_of(model)
    device = getattr(inner_net(model.estimator), "device", "cpu")

    def work() -> LaplaceFit:
        with torch.inference_mode(False):
            with group.together(), private_rng(model._seed, device):
                networks = trainer.train_with_folds(data, validation, params)
            # after `private_rng`, which admits one thread at a time: a fit would wait
            # for workers that wait for the fit
            if group.size == 1:
                fit = _accumulated(model._solver(options), trainer, *networks)
            else:
                fit = model._solver(options).accumulate(*networks)
        if trainer.is_interrupted:
            raise UnfinishedFit(fit)
        return fit

    if model.memory is None:
        return work()
    if model.random_state is None:
        warn_user(
            "memory has no effect with random_state=None, which makes every fit "
            "differ. Set random_state to a number.",
        )
        return work()

    fit = cached(memory, key(), lambda: work().stored(), key)
    trainer.check_trained(fit.network)
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


def _key(
    model: Any,
    options: LaplaceOptions,
    data: TrainingData,
    validation: TrainingData | None,
    fit_params: dict[str, Any],
) -> str:
    """Return a hash of everything that a `LaplaceFit` depends on."""
    settings = options.curvature_settings()
    settings |= {name: getattr(model, name) for name in ("batch_size", "n_shards")}
    if options.tunes_on_held_out:
        settings["validation_fraction"] = model.validation_fraction
    return fingerprint(
        {
            "kind": model._targets.likelihoods,
            "estimator": model.estimator,
            "data": (data, model._targets.n_outputs),
            "validation": validation,
            "fit_params": fit_params,
            "seed": model._seed,
            "settings": settings,
            # a refit of all weights needs the training samples again
            "rows": (
                (options.tunes_on_held_out, options.holds_out, options.uses_folds),
                options.may_refit,
                options.refine is True,
            ),
            "likelihood": model._likelihood_settings(),
        }
    )
