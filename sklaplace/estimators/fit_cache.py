"""A fit of a Laplace estimator, from ``memory`` or a checkpoint where there is one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sklaplace.core.cache import cached, check_memory
from sklaplace.core.checkpoint import Checkpoint
from sklaplace.core.distributed import Group
from sklaplace.core.fingerprint import fingerprint
from sklaplace.core.random import private_rng
from sklaplace.core.stored import StoredArray
from sklaplace.core.trees import joined_rows
from sklaplace.core.warn import warn_user
from sklaplace.curvature.uses import UnseenUseError
from sklaplace.estimators.laplace_fit import LaplaceFit, LaplaceSolver
from sklaplace.estimators.laplace_trainer import LaplaceTrainer
from sklaplace.estimators.options import LaplaceOptions
from sklaplace.estimators.samples import Samples
from sklaplace.estimators.trainer import inner_net
from sklaplace.estimators.workers import Workers
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

    A new one goes on from the checkpoint of ``samples``, if it has one.

    Raises
    ------
    UnfinishedFit
        If training was interrupted. Its argument is the fit, which is not stored.
    """
    memory, params = check_memory(model.memory), samples.fit_params
    trainer = replace(model._trainer(options), is_part=samples.is_part)

    def key() -> str:
        return _key(model, options, data, validation, params)

    def train() -> Any:
        device = getattr(inner_net(model.estimator), "device", "cpu")
        with private_rng(model._seed, device):
            return trainer.train_with_folds(data, validation, params)

    def work() -> LaplaceFit:
        # outside of the context of training, which admits one thread at a time: it
        # would wait for workers that wait for it
        with torch.inference_mode(False):
            networks, saved = _networks(group, checkpoint, trainer, train)
            if checkpoint is None and group.size == 1:
                fit = _accumulated(model._solver(options), trainer, *networks)
            else:
                fit = model._solver(options).accumulate(*networks, saved)
        if trainer.is_interrupted:
            raise UnfinishedFit(fit)
        return fit

    group = Workers.of(options).group
    with group.together():
        checkpoint = _checkpoint(group.rank, model, data, validation, samples, key)
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
    shown: Any = None
    while True:
        try:
            return solver.accumulate(network, folds)
        except UnseenUseError as error:
            more = error.samples
            shown = more if shown is None else joined_rows(more, shown)
            known = _paths(network)
            network, *folds = (
                trainer.including(one, shown) for one in (network, *folds)
            )
            if _paths(network) == known:
                raise


def _paths(network: TrainedNetwork) -> Any:
    """Return what samples with other uses of layers change of a layout."""
    return network.spec.layout.blocks, network.spec.layout.uses


def _networks(
    group: Group, checkpoint: Checkpoint | None, trainer: Any, train: Callable[[], Any]
) -> tuple[Any, Checkpoint | None]:
    """Return trained networks, and the checkpoint unless training was interrupted.

    They are of the checkpoint if all processes have them there. Else all train, since
    they may do so together, and sums of other weights are lost.
    """
    with group.together():
        found = None if checkpoint is None else checkpoint.load("networks")
    if all(group.gather(found is not None)):
        return found, checkpoint
    with group.together():
        found = train()
        saved = None if trainer.is_interrupted else checkpoint
        if saved is not None:
            saved.restart("networks", found)
    return found, saved


def _checkpoint(
    rank: int,
    model: Any,
    data: TrainingData,
    validation: TrainingData | None,
    samples: Samples,
    key: Callable[[], str],
) -> Checkpoint | None:
    """Return the checkpoint of a fit, if it has one."""
    if samples.checkpoint is None:
        return None
    if model.random_state is None:
        raise ValueError(
            "checkpoint needs random_state, since a fit that starts anew would have "
            "another seed. Set random_state to a number."
        )
    named = {f"data-{name}": value for name, value in vars(data).items()}
    if validation is not None:
        named |= {f"val-{name}": value for name, value in vars(validation).items()}
    # parts of an array on disk are stored as positions in it
    stored = {k: v.source for k, v in named.items() if isinstance(v, StoredArray)}
    named |= {f"{name}-source": source for name, source in stored.items()}
    return Checkpoint.at(samples.checkpoint, key(), named, rank)


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
