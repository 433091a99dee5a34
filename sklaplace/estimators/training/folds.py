"""Folds: networks that are each trained without one fold of the samples."""

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from sklearn.base import clone
from skorch import NeuralNet
from skorch.helper import predefined_split

from sklaplace.core import progress
from sklaplace.core.checks import warn_user
from sklaplace.core.parallel import in_parallel, one_thread
from sklaplace.core.random import private_rng
from sklaplace.data.dataset import TrainingData
from sklaplace.data.split import hash_folds
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.targets.base import brings_targets
from sklaplace.estimators.training.laplace import MIN_HELD_OUT, LaplaceTrainer
from sklaplace.networks.net_checks import whole_batches
from sklaplace.networks.trained import TrainedNetwork

# Number of folds if there are too few samples to hold some out, and for a noise model
# of at least `MANY_SAMPLES` distinct samples or groups. Two thirds of these suffice for
# training: on six tables, three folds instead of five changed the interval score by at
# most 1 %. On tables of 28 to 200 samples, three folds lowered the coverage.
N_FOLDS, FOLDS_OF_MANY, MANY_SAMPLES = 5, 3, 500
# Numbers of held-out samples that suffice for tuning, and for a noise model. These
# numbers limit the number of folds.
ENOUGH, ENOUGH_FOR_NOISE = 200, 5000

Fold = tuple[np.ndarray, np.ndarray]  # indices of training and of held-out samples


@dataclass(frozen=True)
class FoldTask:
    """Training of a network without one fold of the samples.

    Attributes
    ----------
    trainer : LaplaceTrainer
        Trainer, with the size of the default network for all samples.
    data : TrainingData
        Training samples of the fold, and its held-out samples.
    seed : int
        Seed of the training.
    """

    trainer: LaplaceTrainer
    data: TrainingData
    seed: int


@torch.inference_mode(False)
def train_with_folds(
    trainer: LaplaceTrainer, data: TrainingData
) -> tuple[TrainedNetwork, list[TrainedNetwork]]:
    """Return the network trained on all samples, and a list of networks of folds.

    Each network of a fold is trained without this fold. The folds are those of a
    cross-validation (``trainer.splits``), which workers train on, or those of
    `_tuning_folds`, of which training may fail on some. The list is empty if there are
    no folds.
    """
    device = getattr(inner_net(trainer.estimator), "device", "cpu")
    # folds are trained outside this block: their workers also use `private_rng`, which
    # admits one thread at a time
    with private_rng(trainer.seed, device):
        trained = trainer.train(data)
    if trainer.splits is not None:
        tasks = _fold_tasks(trainer, data, trainer.splits)
        with progress.phase("train on folds"):
            n_jobs = trainer.options.n_jobs
            arguments = [(task,) for task in tasks]
            networks = in_parallel(_trained_on_fold, arguments, n_jobs, "folds")
        # a cross-validation scores only its folds, not what the net itself held out
        return replace(trained, held_out=None), networks
    folds = _tuning_folds(trainer, trained, data)
    if not folds:
        return trained, []
    with progress.phase("train on folds"):
        return trained, _train_each(_fold_tasks(trainer, data, folds))


def _tuning_folds(
    trainer: LaplaceTrainer, trained: TrainedNetwork, data: TrainingData
) -> list[Fold]:
    """Return the folds for tuning, or an empty list if tuning uses no folds.

    Tuning uses no folds if the user passed held-out samples, if Ctrl-C ended the
    training of ``trained``, if the net's ``train_split`` brought enough held-out
    samples, or if `LaplaceTrainer.takes_folds` is False. With many samples, only some
    of the folds are used.
    """
    if data.validation is not None or trainer.is_interrupted:
        return []
    if getattr(trainer.estimator, "train_split", None):
        held_out: Any = trained.held_out
        # samples from elsewhere do not reduce the training samples, unlike a split of X
        brings_samples = brings_targets(trained.train, held_out)
        if brings_samples and len(held_out) >= MIN_HELD_OUT:
            return []
    if not trainer.takes_folds(data):
        return []
    keys, stratify = trainer.keys(data), trainer.targets.stratify
    n_folds, n_enough = N_FOLDS, ENOUGH
    if trainer.models_noise:
        n_enough = ENOUGH_FOR_NOISE
        if len(np.unique(keys)) >= MANY_SAMPLES:
            n_folds = min(n_folds, FOLDS_OF_MANY)
    folds = hash_folds(keys, data.y, n_folds, stratify=stratify)
    # with few distinct samples or groups, there are fewer folds than requested; whole
    # groups still show how the network predicts new ones, if there are two folds
    if len(folds) < (n_folds if data.groups is None else 2):
        return []
    # each fold holds out a share 1 / n_folds of the samples
    return folds[: math.ceil(n_folds * n_enough / len(data.y))]


def _fold_tasks(
    trainer: LaplaceTrainer, data: TrainingData, folds: Sequence[Fold]
) -> list[FoldTask]:
    """Return one task per fold, which trains a network without this fold.

    In a cross-validation, all networks have the same seed. Otherwise, each fold has its
    own seed.
    """
    # default networks of folds are as large as the network for all samples; `is_part`
    # lets Ctrl-C end the training of all networks
    size = trainer.size_for(data) if trainer.estimator is None else None
    fold_trainer = replace(trainer, size=size, is_part=True)
    tasks = []
    for n, (train, held_out) in enumerate(folds):
        # without a last batch of one sample, on which batch norm fails
        train = whole_batches(trainer.estimator, train)
        seed_shift = n if trainer.splits is None else 0
        seed = (trainer.seed + seed_shift) % 2**32  # seeds of numpy have 32 bits
        tasks.append(FoldTask(fold_trainer, data.split(train, held_out), seed))
    return tasks


def _train_each(tasks: Sequence[FoldTask]) -> list[TrainedNetwork]:
    """Return one network per fold; skip folds whose training fails, with a warning.

    Tuning can do without a fold, and the network for all samples is already trained.
    """
    networks, failures = [], []
    for task in progress.tracked(tasks, "folds", len(tasks)):
        try:
            networks.append(_trained_on_fold(task))
        except Exception as error:
            failures.append(error)
    if failures:
        warn_user(
            f"The training failed on {len(failures)} of {len(tasks)} folds, so "
            f"tuning uses {len(networks) or 'no'} folds. The first error was: "
            f"{failures[0]}"
        )
    return networks


def _trained_on_fold(task: FoldTask) -> TrainedNetwork:
    """Return a network trained on a fold, without printing anything, in any process.

    In a cross-validation, the network is trained as on all samples. Otherwise, a net
    with a ``train_split`` uses the held-out samples for validation, for example for
    early stopping.
    """
    trainer, data = task.trainer, task.data
    net, is_scored = trainer.estimator, trainer.splits is not None
    if isinstance(net, NeuralNet):
        net = clone(net).set_params(verbose=0)
        # the split set below brings held-out samples whose targets are encoded
        trainer = replace(trainer, estimator=net, brings_encoded=not is_scored)
        if net.train_split and not is_scored:
            held_out = cast(TrainingData, data.validation).dataset(net)
            net.set_params(train_split=predefined_split(held_out))
    device = getattr(inner_net(net), "device", "cpu")
    # the default network always uses one thread, in this process as in workers
    limit = one_thread() if net is None else nullcontext()
    # training on all samples has already raised the same warnings
    silence = warnings.catch_warnings(action="ignore")
    with torch.inference_mode(False), limit, private_rng(task.seed, device), silence:
        return trainer.train(data)
