"""LaplaceTrainer: train a network for a Laplace approximation.

The trainer holds out samples if tuning uses held-out samples. The specification of the
network also describes its Jacobian. The weights of a subnetwork are selected after
training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from skorch import NeuralNet, callbacks
from torch import Tensor

from sklaplace.core.budget import require_bytes
from sklaplace.curvature.derivatives import DEPENDENT_SAMPLES
from sklaplace.curvature.network import NetworkSpec, check_batch, infer_network_spec
from sklaplace.curvature.subnetwork import SCORE_CHECKS, SelectionProblem, choose
from sklaplace.curvature.subsets import CRITERION, select
from sklaplace.data.dataset import TrainingData, first_rows, spread_rows
from sklaplace.data.streams import is_stream, require_choice
from sklaplace.estimators.options.laplace import (
    LaplaceOptions,
    check_earlier_layout,
    check_prior_matrix,
    check_prior_shape,
)
from sklaplace.estimators.predicting.output_model import check_covariances
from sklaplace.estimators.training.prior_callback import given_callbacks
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.history import recorded_split
from sklaplace.networks.net_checks import check_sampler
from sklaplace.networks.outputs import check_repeatable
from sklaplace.networks.trained import TrainedNetwork, device_of
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import refit_bytes

# With fewer distinct samples, the tuner "auto" also trains networks on folds. With a
# noise model, folds narrow the intervals up to about 1,000 samples.
FEW, FEW_FOR_NOISE = 100, 1000
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

    def after_training(self, trained: TrainedNetwork) -> TrainedNetwork:
        """Return the network with a specification of the selected weights.

        Only the weights of a subnetwork are selected after training.
        """
        if not self.options.selects_weights:
            return trained
        indices = {"indices": self._selected_weights(trained)}
        spec = self.infer_spec(
            trained.net, trained.train, is_trained=True, options=indices
        )
        return replace(trained, spec=spec)

    def hold_out(self, data: TrainingData) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the indices of training samples and of held-out samples.

        Return None if there are too few samples, if the net is not trained, or if
        networks are trained on folds instead.
        """
        if self.splits is not None:
            return None
        if "validation" in (self.options.tuner, self.options.sigma_noise):
            # the user asks for held-out samples, which streams cannot provide
            require_choice(data.X)
        if self.takes_folds(data):
            # raises if the net's sampler refers to positions in X, which folds change
            check_sampler(self.estimator)
            return None
        return super().hold_out(data)

    def split_of_frozen(
        self, net: NeuralNet, data: TrainingData
    ) -> tuple[Any, Any] | None:
        """Return a frozen net's training and held-out samples, or None if unknown."""
        is_used = self.is_frozen and self.options.uses_held_out
        # the net's history refers to all samples, and zero weights drop some of them
        is_known = self.splits is None and data.sample_weight is None
        if not (is_used and is_known) or is_stream(data.X):
            return None
        split = recorded_split(net, data.X, data.y)
        return None if split is None or len(split[1]) < MIN_HELD_OUT else split

    def takes_folds(self, data: TrainingData) -> bool:
        """Return whether to train networks on folds instead of holding out samples.

        Folds require more training, but the network can then be trained on all samples.
        The default network, which is fast to train, always uses folds. Networks whose
        callbacks may write files are not trained on folds.
        """
        if not self.options.uses_folds or self.is_frozen or is_stream(data.X):
            return False
        if self.estimator is None:
            return True
        options = self.options
        # not for a given prior: a search over priors would train folds for each value
        fits_noise = self.models_noise and options.holds_out and options.free_prior
        n_few = FEW_FOR_NOISE if fits_noise else FEW
        return _is_silent(self.estimator) and len(np.unique(self.keys(data))) < n_few

    def check_without_held_out(self) -> None:
        """Raise an error before training if the tuner needs held-out samples."""
        if "validation" in (self.options.tuner, self.options.sigma_noise):
            raise ValueError(
                "'validation' needs held-out samples, but there are none. Pass X_val "
                "and y_val, or use prior_precision='marglik'."
            )

    # ----------------------------------------------------------------- subnetworks
    def _selected_weights(self, trained: TrainedNetwork) -> Tensor:
        """Return the indices of the weights with the largest scores.

        ``subset_params["by"]`` names the score, which measures how much a weight
        matters, such as its magnitude. `choose` computes the scores. The number of
        weights is that of the specification before training, which already counts the
        weights to select.
        """
        forward, given = trained.forward(), self.options.subset_params
        by = given.get("by", CRITERION)
        # other entries, such as the number of weights, are no parameters of the score
        names_of_score = given.keys() & SCORE_CHECKS.get(by, {}).keys()
        score_params = {name: given[name] for name in names_of_score}
        with forward.frozen():
            # all weights, among which the score selects
            layout = select(forward, spread_rows(trained.net, trained.train), "all", {})
            problem = SelectionProblem(
                network=trained,
                layout=layout,
                descent=self.descent(trained),
                batch_size=self._batch_size(trained.spec),
                seed=self.seed,
            )
            return choose(problem, by, trained.spec.layout.n_parameters, **score_params)

    # --------------------------------------------------------------- specification
    def infer_spec(
        self,
        net: NeuralNet,
        dataset: Any,
        *,
        is_trained: bool,
        options: dict[str, Any] | None = None,
    ) -> NetworkSpec:
        """Return the network's specification; raise an error for unsuitable options.

        A few samples of ``dataset`` determine the specification. The options must match
        it, and its curvature, covariances and refit must fit into memory. ``options``
        replaces ``subset_params``.
        """
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
            # random outputs seem to depend on other samples; this raises a clearer
            # error if they are random
            if DEPENDENT_SAMPLES in str(error):
                check_repeatable(net, samples)
            raise
        # before training, so that a batch of full size does not fail after it
        if not is_trained:
            x = first_rows(net, dataset, self._batch_size(spec))
            check_batch(net, x, spec)
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

    def _batch_size(self, spec: NetworkSpec) -> int:
        """Return the number of samples per batch in sums over the training samples."""
        elements = self.options.row_elements(spec)
        return self.options.batch_size or spec.batch_size(row_elements=elements)

    def check_trained(self, network: TrainedNetwork) -> None:
        """Raise an error for options that a trained network does not support.

        A cached network may have been trained with different values for options that
        are not part of the cache key.
        """
        self._check_spec(network.spec)
        if network.held_out is None:
            self.check_without_held_out()

    def _check_spec(self, spec: NetworkSpec) -> None:
        """Raise an error for options that do not match the layers or the likelihood.

        The prior precision and mean must have as many values as the P selected weights
        require. A prior can also be an earlier posterior or a precision matrix.
        """
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
        """Raise an error if ``refine=True`` does not match predictions or the loss.

        ``refine=True`` refits the weights to the maximum of the posterior of a linear
        model. Without a `NetworkSpec.head_map`, which maps the outputs of a last linear
        layer to those of the network, this is the linearised network. Its weights do
        not fit the network itself, which ``pred_type="nn"`` evaluates.
        """
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


def _is_silent(net: NeuralNet) -> bool:
    """Return whether all callbacks of a net are known not to write files."""
    return all(
        (c if isinstance(c, type) else type(c)) in SILENT for c in given_callbacks(net)
    )
