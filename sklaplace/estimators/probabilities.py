"""ClassPredictor: class probabilities, averaged over draws of the outputs."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor

from sklaplace.core.points import cached_sobol_normals
from sklaplace.estimators.classes import ClassTargets
from sklaplace.likelihoods import ClassificationLikelihood


class ClassPredictor(ClassTargets):
    """The part of classifiers that answers with probabilities; not for direct use."""

    def _likelihood(self) -> ClassificationLikelihood:
        return cast(ClassificationLikelihood, self.network_spec_.likelihood)

    def _of_logits(
        self, X: Any, function: Callable[[Tensor, Tensor], Tensor], *, diagonal: bool
    ) -> list[np.ndarray]:
        """A function of the Gaussian over class logits, (n·r, ...)."""
        likelihood = self._likelihood()

        def ask(mean: Tensor, cov: Tensor) -> tuple[Tensor]:
            return (function(*likelihood.class_logits(mean, cov)),)

        centred = likelihood.is_shift_invariant
        return self._collect(X, ask, diagonal=diagonal, centred=centred)

    def _over_options(self, proba: np.ndarray) -> np.ndarray:
        """Probabilities (n, K) of classes that there are; rows sum to one."""
        # a one-logit network has a column for a class that y did not have
        proba = proba[:, : self._n_options()]
        shares: np.ndarray = proba / proba.sum(1, keepdims=True)
        return shares

    def _proba_of_draws(self, draws: Tensor) -> Tensor:
        """Outputs (b, c, s) of drawn weights to probabilities (b·r, K, s)."""
        proba = self._likelihood().probabilities(draws.mT)  # (b, s, K) or (b, s, r, K)
        by_label = proba.movedim(1, -1)
        return by_label.reshape(-1, *by_label.shape[-2:])

    def _normal_draws(self, like: Tensor) -> Tensor:
        """Points of the sampled link for logits (b, K): the same for all rows."""
        return cached_sobol_normals(self.n_samples, like.shape[1], self._seed).to(like)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, averaged over the posterior.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            Rows sum to one; columns in the order of ``classes_``. For a matrix of
            labels: that each of them is one.
        """
        check_is_fitted(self)
        return self._labelling.probabilities(self._class_probabilities(X))

    def _class_probabilities(self, X: Any) -> np.ndarray:
        """Probabilities (n·r, K) of r labels per row; rows sum to one."""
        found = self._of_own_draws(
            X, lambda draws: self._proba_of_draws(draws).mean(-1)
        )
        proba: np.ndarray = found.numpy()
        return self._over_options(proba)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            In nats; ``-inf`` where a probability is zero.
        """
        with np.errstate(divide="ignore"):
            logarithms: np.ndarray = np.log(self.predict_proba(X))
        return logarithms

    def predict(self, X: Any) -> np.ndarray:
        """Most probable class under `predict_proba`.

        A net with a ``threshold`` (``skorch.NeuralNetBinaryClassifier``) keeps it.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.

        Returns
        -------
        ndarray of shape (n,), (n, n_labels) or (n, ...)
            Labels; of a matrix of labels zeros and ones.
        """
        proba = self.predict_proba(X)
        threshold = getattr(self.estimator_, "threshold", None)
        return self._labelling.decided(proba, self.classes_, threshold)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        y : array-like of shape (n,), (n, n_labels) or (n, ...)
            Their labels.
        sample_weight : array-like of shape (n,), optional
            Weights of the rows.

        Returns
        -------
        float
            Share of the rows whose labels are all right; for maps, share of the
            positions. Labels that the criterion ignores do not count.

        Raises
        ------
        ValueError
            If it ignores all of them, or y has labels of another kind than in fit.
        """
        predicted, labels = self.predict(X), self._labels(y)
        check_consistent_length(predicted, labels, sample_weight)
        known = ~self._is_ignored(labels)
        if not self._labelling.has_names:  # a row is right as a whole
            labels, known = labels.astype(predicted.dtype), known[:, 0]
        if not known.any():
            raise ValueError(
                "All labels are those that the criterion ignores, so that there is "
                "nothing to score. Pass some rows with classes."
            )
        weights = None
        if sample_weight is not None:
            rows = np.asarray(sample_weight).reshape(-1, *[1] * (known.ndim - 1))
            weights = np.broadcast_to(rows, known.shape)[known]
        found = accuracy_score(labels[known], predicted[known], sample_weight=weights)
        return float(found)

    def sample_proba(
        self, X: Any, n_samples: int = 1, random_state: Any = 0
    ) -> np.ndarray:
        """Draws of class probabilities from the posterior, joint across rows.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        n_samples : int, default=1
            Number of draws; each is one function, evaluated on all rows.
        random_state : int, RandomState or None, default=0
            Seeds the draws.

        Returns
        -------
        ndarray of shape (n, K, n_samples)
            (n, n_labels, n_samples) for a matrix of labels, and (n, K, ...,
            n_samples) for maps.

        Notes
        -----
        Memory is n_samples times the number of selected weights.
        """
        outputs = torch.as_tensor(self._sample_outputs(X, n_samples, random_state))
        drawn = self._likelihood().probabilities(
            outputs.mT
        )  # (n, s, K) or (n, s, r, K)
        proba = self._over_options(drawn.reshape(-1, drawn.shape[-1]).numpy())
        handed = self._labelling.probabilities(proba)
        by_draw = handed.reshape(*drawn.shape[:2], *handed.shape[1:])
        return np.moveaxis(by_draw, 1, -1)

    def latent_mean_and_variance(
        self, X: Any, full_cov: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the class logits.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        full_cov : bool, default=False
            Return covariances between classes, not variances alone.

        Returns
        -------
        mean : ndarray of shape (n, K)
        variance : ndarray of shape (n, K) or (n, K, K)
            For a matrix of labels: of one logit per label. For maps positions are the
            last axes.
        """

        def moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
            return self._labelling.latent(self._likelihood(), mean, cov)

        mean, variance = self._moments(X, moments, full_cov)
        return mean, variance

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        kind = getattr(self._asked_likelihood(), "columns", "labels")
        tags.classifier_tags.multi_label = kind == "labels"
        return tags

    def _log_proba_of(self, X: Any, y: Any) -> np.ndarray:
        """Log-probability of the labels of each row, (n,); finite."""
        labels = self._labels(y)
        known = ~self._is_ignored(labels)
        codes = self._labelling.codes(labels[known], self.classes_)
        proba = self._class_probabilities(X)[known.ravel()]
        chosen = proba[np.arange(len(codes)), codes.ravel()]
        found = np.zeros(labels.shape)
        found[known] = np.log(np.maximum(chosen, np.finfo(np.float64).tiny))
        total: np.ndarray = found.reshape(len(labels), -1).sum(1)
        return total
