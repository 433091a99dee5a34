"""LaplaceTrainer: train a network for a Laplace approximation.

The trainer holds out samples if tuning uses held-out samples. The specification of the
network also describes its Jacobian. The weights of a subnetwork are selected after
training.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from sklearn.base import clone
from skorch import NeuralNet, callbacks
from skorch.helper import predefined_split
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import warn_user
from sklaplace.core.parallel import in_parallel, one_thread
from sklaplace.core.random import private_rng
from sklaplace.curvature.derivatives import DEPENDENT_SAMPLES
from sklaplace.curvature.network import NetworkSpec, check_batch, infer_network_spec
from sklaplace.curvature.subnetwork import SCORE_CHECKS, SelectionProblem, choose
from sklaplace.curvature.subsets import CRITERION, select
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.options.laplace import (
    LaplaceOptions,
    check_earlier_layout,
    check_prior_matrix,
    check_prior_shape,
)
from sklaplace.estimators.predicting.output_model import check_covariances
from sklaplace.estimators.targets.base import brings_targets
from sklaplace.estimators.training.prior_callback import given_callbacks
from sklaplace.estimators.training.trainer import EncodedData, Trainer
from sklaplace.networks import split
from sklaplace.networks.data import TrainingData, first_rows, spread_rows
from sklaplace.networks.history import recorded_split
from sklaplace.networks.net_checks import check_sampler, whole_batches
from sklaplace.networks.outputs import check_repeatable
from sklaplace.networks.streams import is_stream, require_choice
from sklaplace.networks.trained import TrainedNetwork, device_of
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import refit_bytes

# Number of folds if there are too few samples to hold some out.
N_FOLDS = 5
# With fewer distinct samples, the tuner "auto" also trains networks on folds. With a
# noise model, folds narrow the intervals up to about 1,000 samples.
FEW, FEW_FOR_NOISE = 100, 1000
# Numbers of held-out samples that suffice for tuning, and for a noise model. These
# numbers limit the number of folds.
ENOUGH, ENOUGH_FOR_NOISE = 200, 5000
# callbacks that only monitor or control the training
SILENT = {
    *(callbacks.BatchScoring, callbacks.EarlyStopping, callbacks.EpochScoring),
    *(callbacks.EpochTimer, callbacks.Freezer, callbacks.GradientNormClipping),
    *(callbacks.Initializer, callbacks.LRScheduler, callbacks.ParamMapper),
    *(callbacks.PassthroughScoring, callbacks.PrintLog, callbacks.ProgressBar),
    *(callbacks.Unfreezer, callbacks.WarmRestartLR),
}
# Minimum number of held-out samples for reliable tuning.
MIN_HELD_OUT = 10


@dataclass(kw_only=True)
class LaplaceTrainer(Trainer):
    """Trainer of a skorch net for a Laplace approximation.

    Attributes
    ----------
    options : LaplaceOptions
        Options of the approximation.
    takes_covariances : bool
        Whether tuning and predictions need covariances between the outputs.
    models_noise : bool
        Whether a noise model is fitted to held-out samples.
    splits : sequence of (ndarray, ndarray) or None
        Indices of the training samples and of the scored samples of each split of a
        cross-validation, which replaces all other held-out samples.
    """

    options: LaplaceOptions
    takes_covariances: bool = False
    models_noise: bool = False
    splits: Sequence[tuple[np.ndarray, np.ndarray]] | None = None

    def train(self, encoded: EncodedData) -> TrainedNetwork:
        """Return the trained network with its training and held-out samples."""
        trained = super().train(encoded)
        if not self.options.selects_weights:
            return trained
        options = {"indices": self._selected_weights(trained)}
        fixed: dict[str, Any] = {"is_trained": True, "options": options}
        return replace(
            trained, spec=self.infer_spec(trained.net, trained.train, **fixed)
        )

    def hold_out(self, data: TrainingData) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the indices of training samples and of held-out samples.

        Return None if there are too few samples, if the net is not trained, or if
        networks are trained on folds instead.
        """
        if self.splits is not None:
            return None
        on_folds = self.options.uses_folds and _is_silent(self.estimator)
        if "validation" in (self.options.tuner, self.options.sigma_noise):
            require_choice(data.X)
        if on_folds and self._takes_folds(data):
            check_sampler(self.estimator)
            return None
        return super().hold_out(data)

    def own_split(self, net: NeuralNet, data: TrainingData) -> tuple[Any, Any] | None:
        """Return a frozen net's training and held-out samples, or None if unknown."""
        is_used = self.is_frozen and self.options.uses_held_out
        if (
            not is_used
            or self.splits is not None
            or data.sample_weight is not None
            or is_stream(data.X)
        ):
            return None
        parts = recorded_split(net, data.X, data.y)
        return None if parts is None or len(parts[1]) < MIN_HELD_OUT else parts

    def train_with_folds(
        self, encoded: EncodedData
    ) -> tuple[TrainedNetwork, list[TrainedNetwork]]:
        """Return the trained network, and one network per fold if there are folds.

        The folds are those of a cross-validation, or those that tuning uses.
        """
        device = getattr(inner_net(self.estimator), "device", "cpu")
        # workers for folds also use `private_rng`, which admits one thread at a time
        with private_rng(self.seed, device):
            trained = self.train(encoded)
        if self.splits is not None:
            # samples that the net itself held out are not scored
            trained = replace(trained, held_out=None)
            return trained, self._train_each(self.splits, encoded)
        on_folds = self.options.uses_folds and not is_stream(encoded.data.X)
        if encoded.validation is not None or not on_folds or self.is_interrupted:
            return trained, []
        return trained, self._train_on_folds(trained, encoded)

    def _train_on_folds(
        self, trained: TrainedNetwork, encoded: EncodedData
    ) -> list[TrainedNetwork]:
        """Return networks that are each trained on all folds but one.

        The list is empty if the net is frozen, if there are enough samples to hold some
        out, if ``trained`` has held-out samples for tuning, or if callbacks may write
        files. With many samples, only some of the folds are used.
        """
        net, data = self.estimator, encoded.data
        can_train = not self.is_frozen and _is_silent(net)
        own: Any = trained.held_out if getattr(net, "train_split", None) else None
        has_own = brings_targets(trained.train, own) and len(own) >= MIN_HELD_OUT
        if has_own or not (can_train and self._takes_folds(data)):
            return []
        keys, stratify = self.keys(data), self.targets.stratify
        folds = split.hash_folds(keys, data.y, N_FOLDS, stratify=stratify)
        if len(folds) < (N_FOLDS if data.groups is None else 2):
            return []
        enough = ENOUGH_FOR_NOISE if self.models_noise else ENOUGH
        folds = folds[: math.ceil(N_FOLDS * enough / len(data.y))]
        return self._train_each(folds, encoded)

    def _takes_folds(self, data: TrainingData) -> bool:
        """Return whether to train networks on folds instead of holding out samples.

        Folds require more training, but the network can then be trained on all samples.
        The default network, which is fast to train, always uses folds.
        """
        replaces = self.models_noise and self.options.holds_out
        replaces = replaces and self.options.free_prior  # not in searches over priors
        few = FEW_FOR_NOISE if replaces else FEW
        return self.estimator is None or len(np.unique(self.keys(data))) < few

    @progress.phase("train on folds")
    def _train_each(
        self, folds: Sequence[tuple[np.ndarray, np.ndarray]], encoded: EncodedData
    ) -> list[TrainedNetwork]:
        """Return one network per fold, trained without the samples of this fold.

        If the folds are not those of a cross-validation, folds whose training fails are
        skipped with a warning.
        """
        size = self.size_for(encoded.data) if self.estimator is None else None
        trainer = replace(self, size=size, is_part=True)
        tasks = []
        for n, (train, rest) in enumerate(folds):
            data = encoded.split((whole_batches(self.estimator, train), rest))
            seed = self.seed if self.splits is not None else (self.seed + n) % 2**32
            tasks.append((trainer, data, seed))
        if self.splits is not None:
            return in_parallel(_trained_on, tasks, self.options.n_jobs, "folds")
        networks, failures = [], []
        for task in progress.tracked(tasks, "folds", len(tasks)):
            try:
                networks.append(_trained_on(*task))
            except Exception as error:
                failures.append(error)
        if failures:
            warn_user(
                f"The training failed on {len(failures)} of {len(folds)} folds, so "
                f"tuning uses {len(networks) or 'no'} folds. The first error was: "
                f"{failures[0]}"
            )
        return networks

    def require_no_held_out(self) -> None:
        """Raise an error before training if the tuner needs held-out samples."""
        if "validation" in (self.options.tuner, self.options.sigma_noise):
            raise ValueError(
                "'validation' needs held-out samples, but there are none. Pass X_val "
                "and y_val, or use prior_precision='marglik'."
            )

    # ----------------------------------------------------------------- subnetworks
    def _selected_weights(self, trained: TrainedNetwork) -> Tensor:
        """Return the indices of the weights with the largest scores."""
        forward, options = trained.forward(), self.options
        elements = options.row_elements(trained.spec)
        fitting = trained.spec.batch_size(row_elements=elements)
        by = options.subset_params.get("by", CRITERION)
        known = options.subset_params.keys() & SCORE_CHECKS.get(by, {}).keys()
        given = {name: options.subset_params[name] for name in known}
        with forward.frozen():
            layout = select(forward, spread_rows(trained.net, trained.train), "all", {})
            problem = SelectionProblem(
                network=trained,
                layout=layout,
                descent=self.descent(trained),
                batch_size=options.batch_size or fitting,
                seed=self.seed,
            )
            return choose(problem, by, trained.spec.layout.n_parameters, **given)

    # --------------------------------------------------------------- specification
    def infer_spec(
        self,
        net: NeuralNet,
        dataset: Any,
        *,
        is_trained: bool,
        options: dict[str, Any] | None = None,
    ) -> NetworkSpec:
        """Return the network's specification; raise an error for unsuitable options."""
        samples = spread_rows(net, dataset)
        try:
            spec = infer_network_spec(
                net,
                samples,
                self.options.subset_of_weights,
                options=options or self.options.subset_params,
                **self.spec_options(is_trained),
            )
        except ValueError as error:
            if DEPENDENT_SAMPLES in str(error):  # random outputs seem to be dependent
                check_repeatable(net, samples)
            raise
        if not is_trained:
            elements = self.options.row_elements(spec)
            fitting = spec.batch_size(row_elements=elements)
            size = self.options.batch_size or fitting
            check_batch(net, first_rows(net, dataset, size), spec)
        self._check_spec(spec)
        device = device_of(net)
        self.options.check_bytes(spec, device, len(dataset))
        if self.takes_covariances:
            check_covariances(spec)
        if self.options.refits(spec, len(dataset)):
            require_bytes(
                refit_bytes(spec.layout, len(dataset), spec.n_outputs),
                device,
                f"refitting the last layer on {len(dataset):,} rows",
                "use refine=False, or fewer rows",
            )
        return spec

    def check_trained(self, network: TrainedNetwork) -> None:
        """Raise an error for options that a trained network does not support.

        A cached network may have been trained with different values for options that
        are not part of the cache key.
        """
        self._check_spec(network.spec)
        if network.held_out is None:
            self.require_no_held_out()

    def _check_spec(self, spec: NetworkSpec) -> None:
        """Raise an error for options that do not match the layers or the likelihood."""
        options, p = self.options, spec.layout.n_parameters
        check_prior_shape(options.prior_precision, options.prior_structure, spec.layout)
        if np.shape(options.prior_mean) not in ((), (1,), (p,)):
            raise ValueError(
                f"prior_mean has shape {np.shape(options.prior_mean)}. Use one number, "
                f"or one per selected weight: shape ({p},)."
            )
        if isinstance(options.prior, GaussianPosterior):
            check_earlier_layout(options.prior, spec.layout)
        elif options.prior is not None:
            check_prior_matrix(options.prior, spec.layout)
        if options.refine is True:
            self._check_refine(spec)

    def _check_refine(self, spec: NetworkSpec) -> None:
        """Raise an error if the weights cannot be refitted."""
        if spec.head_map is None and self.options.pred_type == "nn":
            raise ValueError(
                "refine=True refits the linearised network here, so pred_type='nn' "
                "cannot be used. Use pred_type='glm', or subset_of_weights="
                "'last_layer' with a network that ends in a Linear layer."
            )
        if not spec.likelihood.is_convex:
            raise ValueError(
                "refine=True needs a loss that is convex in the outputs, unlike "
                f"{type(spec.likelihood).__name__}. Use refine=False."
            )


def _trained_on(
    trainer: LaplaceTrainer, fold: EncodedData, seed: int
) -> TrainedNetwork:
    """Train a network on a fold without printing anything, in any process.

    In a cross-validation, the network is trained as on all samples. Otherwise, a net
    with a ``train_split`` uses the held-out samples for validation, for example for
    early stopping.
    """
    net, is_scored = trainer.estimator, trainer.splits is not None
    if isinstance(net, NeuralNet):
        net = clone(net).set_params(verbose=0)
        trainer = replace(trainer, estimator=net, brings_encoded=not is_scored)
        if net.train_split and not is_scored:
            held_out = cast(TrainingData, fold.validation).dataset(net)
            net.set_params(train_split=predefined_split(held_out))
    device = getattr(inner_net(net), "device", "cpu")
    # the default network uses one thread in workers, too
    limit = one_thread() if net is None else nullcontext()
    # training on all samples has already raised the same warnings
    ignored = warnings.catch_warnings(action="ignore")
    with torch.inference_mode(False), limit, private_rng(seed, device), ignored:
        return trainer.train(fold)


def _is_silent(net: NeuralNet) -> bool:
    """Return whether all callbacks of a net are known not to write files."""
    return all(
        (c if isinstance(c, type) else type(c)) in SILENT for c in given_callbacks(net)
    )
