"""Preferences: scores of items, learned from which of two was preferred.

Bradley and Terry's model: ``P(second is preferred) = sigmoid(s(second) - s(first))``
with a score ``s`` that a network gives each item by itself. Around it, a Laplace
approximation is that of a classifier of pairs, and the scores are linear in the same
Gaussian over weights.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from sklearn.utils.validation import check_array, check_is_fitted
from torch import Tensor, nn

from sklaplace.classifier import LaplaceClassifier
from sklaplace.data import TrainingData, is_opaque
from sklaplace.labelling import OneLabel
from sklaplace.likelihoods import Bernoulli
from sklaplace.networks import TabularNetwork, penalised_classifier


class BradleyTerry(nn.Module):
    """Module that compares two items by a score that it gives to each of them.

    Parameters
    ----------
    scorer : nn.Module
        Gives one number per item: (b, ...) to (b,) or (b, 1). A bias of its last layer
        cancels in every comparison, and is best left out: no pair says anything of it.

    References
    ----------
    Bradley and Terry (1952), "Rank analysis of incomplete block designs: I. The method
    of paired comparisons", Biometrika 39.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.preferences import BradleyTerry
    >>> module = BradleyTerry(torch.nn.Linear(3, 1, bias=False))
    >>> module(torch.ones(5, 2, 3)).flatten().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, X: Tensor) -> Tensor:
        """Score of the second item less that of the first, or of a single item.

        Parameters
        ----------
        X : Tensor of shape (b, 2, ...) or (b, 1, ...)
            Pairs of items, or single ones.

        Returns
        -------
        Tensor of shape (b, 1)
            Logits, or scores.

        Raises
        ------
        ValueError
            If X has neither shape, or the scorer gives not one number per item.
        """
        if X.ndim < 2 or X.shape[1] not in (1, 2):
            raise ValueError(
                f"rows of shape {tuple(X.shape[1:])} are neither pairs (2, ...) nor "
                "single items (1, ...)"
            )
        # one call for each item, so that layers keep one position per item
        scores = [self._score(item) for item in X.unbind(1)]
        return scores[-1] - scores[0] if len(scores) == 2 else scores[0]

    def _score(self, item: Tensor) -> Tensor:
        score: Tensor = self.scorer(item)
        if score.numel() != len(item):
            raise ValueError(
                f"the scorer gives outputs of shape {tuple(score.shape[1:])} per item, "
                "and has to give one number"
            )
        return score.reshape(-1, 1)


class PairNetwork(BradleyTerry):
    """The default: a small network that scores items by their features.

    Parameters
    ----------
    **constants
        Of `TabularNetwork`.
    """

    def __init__(self, **constants: Any) -> None:
        scorer = TabularNetwork(**constants)
        scorer.head.register_parameter("bias", None)
        super().__init__(scorer)

    def _score(self, item: Tensor) -> Tensor:
        return super()._score(item.reshape(len(item), -1))

    def squared_norm(self) -> Tensor:
        """Sum of squares of all weights, ()."""
        return cast(TabularNetwork, self.scorer).squared_norm()


@dataclass(frozen=True)
class _Items:
    """Single items in place of pairs, (n, 1, ...)."""

    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


class LaplaceRanker(LaplaceClassifier):
    """Scores of items with their uncertainty, from pairs of which one was preferred.

    A `LaplaceClassifier` of pairs that also tells the scores behind its answers. Prefer
    it where judgements compare (which answer is better, who won) and nobody can say how
    good an item is by itself.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, whose module is a `BradleyTerry` around a scorer, or another that
        takes (b, 2, ...) and (b, 1, ...); None makes a small one that suits tables.
    **params
        As for `LaplaceClassifier`.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
        Labels: the first one means that the first item was preferred.
    estimator_, posterior_, n_iter_, prior_precision_, log_marginal_likelihood_value_
        As for `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : The same for labels of single rows.

    Notes
    -----
    A scorer is called twice for each pair, so that its last layer is not refitted: the
    posterior is around the trained weights.

    References
    ----------
    Bradley and Terry (1952), "Rank analysis of incomplete block designs: I. The method
    of paired comparisons", Biometrika 39.

    Examples
    --------
    >>> import numpy as np
    >>> from sklaplace import LaplaceRanker
    >>> rng = np.random.default_rng(0)
    >>> pairs = rng.normal(size=(200, 2, 3))
    >>> y = pairs[:, 1].sum(1) > pairs[:, 0].sum(1)  # the larger sum is preferred
    >>> ranker = LaplaceRanker(random_state=0).fit(pairs, y)
    >>> scores, std = ranker.predict_score(pairs[:, 0], return_std=True)
    >>> bool(np.corrcoef(scores, pairs[:, 0].sum(1))[0, 1] > 0.9)
    True
    """

    _likelihoods = (Bernoulli,)

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        shape = np.asarray(X).shape
        if len(shape) < 2 or shape[1] != 2:
            raise ValueError(
                f"X has shape {shape}, and pairs of items have (n, 2, ...). Stack the "
                "first and the second items along axis 1."
            )
        X, y = super()._validated(X, y, reset=reset)
        if reset:
            self._item_shape = X.shape[2:]
        self._check_items("X", X.shape[2:])
        return X, y

    def _check_items(self, name: str, shape: tuple[int, ...]) -> None:
        known = getattr(self, "_item_shape", shape)
        if shape != known:
            raise ValueError(
                f"{name} has items of shape {shape}, but those in fit have {known}. "
                "Pass items of one kind."
            )

    def _encode(self, y: Any, *, reset: bool, name: str = "y") -> np.ndarray:
        codes = super()._encode(y, reset=reset, name=name)
        if self._labelling != OneLabel() or len(self.classes_) != 2:
            raise ValueError(
                f"y has shape {np.shape(y)} and the labels "
                f"{self.classes_[:5].tolist()}. A pair has one of two labels, of which "
                "the larger means that its second item was preferred."
            )
        # the default network, too, has one logit
        return codes.astype(np.float32)

    def _default_net(self, data: TrainingData) -> Any:
        items = data.X.reshape(2 * len(data.X), -1)
        preferred = np.stack([1 - data.y, data.y], 1).reshape(-1, 1)
        weights = data.sample_weight
        if weights is not None:
            weights = np.repeat(weights, 2)
        # each pair counts once, and is two items
        return penalised_classifier(
            items, preferred, weights, nn.BCEWithLogitsLoss, 2.0, PairNetwork
        )

    def _rows(self, X: Any) -> Any:
        if isinstance(X, _Items):
            return self._input_type.inputs(X.rows)
        rows = super()._rows(X)
        if not is_opaque(rows):
            self._check_items("X", rows.shape[2:])
        return rows

    def predict_score(
        self, items: Any, return_std: bool = False, return_cov: bool = False
    ) -> Any:
        """Scores of single items, whose differences are the logits of pairs.

        Parameters
        ----------
        items : array-like of shape (n, ...)
            As each of the two in a pair.
        return_std : bool, default=False
            Return standard deviations, too.
        return_cov : bool, default=False
            Return the joint covariance of all scores.

        Returns
        -------
        mean : ndarray of shape (n,)
            Posterior means, in nats. Only differences can be learned from pairs: a
            constant common to all is as the network and the prior have it.
        std : ndarray of shape (n,)
            If ``return_std``. What all scores share by the prior is part of it; what a
            difference has follows from the covariance.
        cov : ndarray of shape (n, n)
            If ``return_cov``.

        Raises
        ------
        ValueError
            If both are asked for, or items are not of the kind seen in fit.

        Notes
        -----
        Linearised at the trained weights, as `predict_proba` is. Memory for the
        covariance is that of n items times the selected weights.
        """
        check_is_fitted(self)
        if return_std and return_cov:
            raise ValueError(
                "return_std and return_cov are both True. Ask for one: the diagonal of "
                "the covariance has the variances."
            )
        array = check_array(
            items, dtype=None, ensure_2d=False, allow_nd=True, input_name="items"
        )
        self._check_items("items", array.shape[1:])
        rows = _Items(array[:, None])
        if return_cov:
            mean, cov = self._joint(rows)
            return mean[:, 0], cov[..., 0]
        mean, variance = self._latent(rows)
        if return_std:
            return mean[:, 0], np.sqrt(np.maximum(variance[:, 0], 0))
        return mean[:, 0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = False
        tags.classifier_tags.multi_class = False
        return tags
