"""SamplingEstimator: one training, and predictions from draws of the outputs."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.core.checks import check_fraction
from sklaplace.core.random import private_rng
from sklaplace.estimators.bands import BandPredictor
from sklaplace.estimators.columns import check_noise, geometric_mean, likelihood_of
from sklaplace.estimators.fitting import NetworkFitter, unchanged_on_error
from sklaplace.estimators.outputs import Draws, TrainedNetwork
from sklaplace.posterior.predictive import moments

# The noise is sought between these multiples of the residuals' root mean square.
_LEAST_SHARE, _LARGEST_SHARE = 1e-4, 1e1


class SamplingEstimator(NetworkFitter):
    """Shared by estimators that predict from draws; not for direct use."""

    verbose: int

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
        **fit_params: Any,
    ) -> "SamplingEstimator":
        """Train on rows.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training rows. Arrays are validated and cast to the network's dtype;
            anything else goes to skorch as it is.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets. For a classifier class labels of any kind, a matrix of labels
            that are 0 or 1, or a map of labels for each row.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the rows: a row of weight two counts as two.
        X_val, y_val : optional
            Rows that the network does not see, for what is chosen or compared on
            held-out rows: the noise of numbers, and whether Bayes by Backprop predicts
            worse than the network that it started from.
        **fit_params : dict
            Passed to the ``fit`` of the skorch net. They must not change what the
            module computes: predictions are made without them.

        Returns
        -------
        self : object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network cannot be right; the estimator,
            the network and the data are then as they were.
        """
        with unchanged_on_error(self):
            self._check_parameters()
            data, validation = self._check_data(X, y, sample_weight, X_val, y_val)
            random_state = self._fresh_random_state()
            self._seed = int(random_state.randint(np.iinfo(np.int32).max))
            device = getattr(self._net(), "device", "cpu")
            with private_rng(self._seed, device), torch.inference_mode(False):
                fitted = self._fit_network(data, validation, fit_params)
                self.estimator_, self.network_spec_ = fitted.net, fitted.inspected
                self.n_iter_ = max(1, len(getattr(fitted.net, "history_", None) or []))
                with fitted.forward().frozen():
                    self._publish(fitted)
            self._forget()
        if self.verbose:
            print(f"[{type(self).__name__}] {self._summary()}")  # noqa: T201
        return self

    def _publish(self, fitted: TrainedNetwork) -> None:
        """Overridden where more is known once the network has been trained."""

    def _forget(self) -> None:
        """Overridden where something is of no use once fit is over."""

    def _summary(self) -> str:
        """What was fitted, in one line."""
        return f"trained for {self.n_iter_} epochs"

    def _drawn_rows(
        self, fitted: TrainedNetwork, dataset: Any, draws: Draws, n: int
    ) -> Iterator[tuple[Tensor, Any, Tensor | None]]:
        """Of each batch: outputs (b, c, n), targets and weights."""
        forward = fitted.forward()
        for x, y, weights in self._batches(fitted, dataset, n_draws=n):
            yield draws(forward, x), y, weights


class NoiseFromRows(BandPredictor, SamplingEstimator):
    """Regressors whose noise is chosen once the network is there."""

    validation_fraction: float
    _noise_names: ClassVar[tuple[str, ...]] = ("auto",)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_draws(2)
        check_noise(self.sigma_noise, self._noise_names)
        check_fraction(
            "validation_fraction",
            self.validation_fraction,
            "Choose a share of the rows, such as 0.2.",
        )

    def _tunes_on_rows(self) -> bool:
        likelihood = self.likelihood or likelihood_of(self._net())
        has_none = likelihood is not None and not likelihood.has_noise
        return isinstance(self.sigma_noise, str) and not has_none

    def _publish(self, fitted: TrainedNetwork) -> None:
        if not fitted.inspected.likelihood.has_noise:
            self._set_noise(1.0)
        elif isinstance(self.sigma_noise, str):
            self._set_noise(self._chosen_noise(fitted))
        else:
            self._set_noise(geometric_mean(np.atleast_1d(self.sigma_noise)))
        super()._publish(fitted)

    def _chosen_noise(self, fitted: TrainedNetwork) -> float:
        """Noise by the rows that there are."""
        rows = fitted.train if fitted.held_out is None else fitted.held_out
        return self._most_probable_noise(fitted, rows)

    def _most_probable_noise(self, fitted: TrainedNetwork, dataset: Any) -> float:
        """Noise under which the targets of rows are most probable."""
        likelihood = fitted.inspected.likelihood
        draws, parts = self._own_draws(), []
        for drawn, y, w in self._drawn_rows(fitted, dataset, draws, self._n_draws):
            mean, variance = moments(drawn, diagonal=True, centred=False)
            targets = likelihood.targets(y, mean)
            weights = torch.ones_like(mean[:, 0]) if w is None else w.to(mean)
            parts.append((mean, variance, targets, weights))
        mean, variance, y, weights = (
            torch.cat(part) for part in zip(*parts, strict=True)
        )

        def loss(log_sigma: float) -> float:
            density = likelihood.log_density(mean, variance, y, math.exp(log_sigma))
            return -float(weights @ density)

        squares = weights @ likelihood.loss(mean, y) / weights.sum() / mean.shape[1]
        root = math.sqrt(max(2 * float(squares), torch.finfo(torch.float32).tiny))
        shares = math.log(_LEAST_SHARE), math.log(_LARGEST_SHARE)
        found = minimize_scalar(
            lambda share: loss(share + math.log(root)), bounds=shares, method="bounded"
        )
        return root * math.exp(float(found.x))
