"""A fit of a Laplace estimator, from ``memory`` where it was computed before."""

from typing import Any

import torch

from sklaplace.core.cache import cached, check_memory
from sklaplace.core.fingerprint import fingerprint
from sklaplace.core.random import private_rng
from sklaplace.core.warn import warn_user
from sklaplace.estimators.laplace_fit import LaplaceFit
from sklaplace.estimators.options import LaplaceOptions
from sklaplace.estimators.trainer import inner_net
from sklaplace.networks.data import TrainingData


def cached_fit(
    model: Any,
    options: LaplaceOptions,
    data: TrainingData,
    validation: TrainingData | None,
    params: dict[str, Any],
) -> LaplaceFit:
    """Return a fit from the ``memory`` of an estimator, or a new one."""
    memory, trainer = check_memory(model.memory), model._trainer(options)

    def work() -> LaplaceFit:
        device = getattr(inner_net(model.estimator), "device", "cpu")
        with private_rng(model._seed, device), torch.inference_mode(False):
            networks = trainer.train_with_folds(data, validation, params)
            return model._solver(options).accumulate(*networks)

    if model.memory is None:
        return work()
    if model.random_state is None:
        warn_user(
            "memory has no effect with random_state=None, which makes every fit "
            "differ. Set random_state to a number.",
        )
        return work()

    def key() -> str:
        return _key(model, options, data, validation, params)

    fit = cached(memory, key(), lambda: work().stored(), key)
    trainer.check_trained(fit.network)
    return fit


def _key(
    model: Any,
    options: LaplaceOptions,
    data: TrainingData,
    validation: TrainingData | None,
    fit_params: dict[str, Any],
) -> str:
    """Return a hash of everything that a `LaplaceFit` depends on."""
    settings = {**options.curvature_settings(), "batch_size": model.batch_size}
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
