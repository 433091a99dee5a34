"""Conformal: intervals and sets with guaranteed coverage, from conformity scores.

A score measures how unlikely a target is under the predictions of a model. The model
has not seen the calibration samples. The interval or set for a new sample contains a
value unless the score of this value exceeds too many calibration scores.
"""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import check_cv

from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import check_count
from sklaplace.core.random import private_rng
from sklaplace.core.trees import Inputs
from sklaplace.networks.data import TrainingData, count_rows
from sklaplace.networks.split import hash_folds, row_keys

Array = NDArray[np.float64]
Indices = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(frozen=True)
class Conformal:
    """Conformity scores of calibration samples, and the models behind these scores.

    Attributes
    ----------
    models : sequence of estimators
        Models of the folds. Empty if the estimator itself is the only model.
    scores : sequence of ndarray of shape (n_k, c)
        Scores of the samples that each model was not trained on.
    settings : dict
        Parameters of the predictions.

    References
    ----------
    Vovk, Gammerman and Shafer (2005), "Algorithmic learning in a random world"; Barber,
    Candès, Ramdas and Tibshirani (2021), "Predictive inference with the jackknife+"
    (CV+).
    """

    models: Sequence[Any]
    scores: Sequence[Array]
    settings: dict[str, Any]

    def ranks(self, coverage: Array) -> NDArray[np.intp]:
        """Return the rank (from 1) of the score that each coverage requires."""
        n = sum(map(len, self.scores))
        # differences within rounding errors count as equal
        ranks = np.ceil((n + 1) * coverage - 1e-9).astype(np.intp)
        if (ranks > n).any():
            level = float(coverage.max())
            needed = int(np.ceil(level / (1 - level) - 1e-9))
            raise ValueError(
                f"A coverage of {level:g} cannot be guaranteed from {n} rows. Pass at "
                f"least {needed} rows to conformalize, or choose a smaller coverage."
            )
        return np.maximum(ranks, 1)

    def interval(self, model: Any, X: Inputs, coverage: Array, joint: bool) -> Array:
        """Return interval ends (n, c, 2, n_levels), joint over columns if ``joint``."""
        ranks, parts = self.ranks(coverage), self.scores
        if joint:
            parts = [s.max(axis=1, keepdims=True) for s in parts]
        if not self.models:
            chosen = np.sort(parts[0], axis=0)[ranks - 1]
            ends = model._at_scores(X, _signed(chosen.T))
            return np.asarray(ends.reshape(*ends.shape[:2], 2, -1))
        n, (n_scores, c) = count_rows(X), np.concatenate(self.scores).shape
        require_bytes(
            48 * n * c * n_scores,
            "cpu",
            f"method='conformal' for {n:,} rows and {n_scores:,} scores of folds",
            "predict fewer rows at a time, or call conformalize with cv=None",
        )
        pairs = zip(self.models, parts, strict=True)
        ends = [np.split(m._at_scores(X, _signed(s.T)), 2, axis=-1) for m, s in pairs]
        low, high = np.sort(np.concatenate(ends, axis=-1), axis=-1)
        ends = np.stack([low[..., -ranks], high[..., ranks - 1]], axis=-2)
        return np.asarray(np.sort(ends, axis=-2))

    def members(
        self, model: Any, scores: Callable[[Any], Array], coverage: float
    ) -> NDArray[np.bool_]:
        """Return whether sets contain each label, (n, K), given ``scores(model)``."""
        (rank,) = self.ranks(np.array([coverage]))
        pairs = zip(self.models or [model], self.scores, strict=True)
        n_below = sum(np.searchsorted(np.sort(s[:, 0]), scores(m)) for m, s in pairs)
        return np.asarray(n_below < rank)


def folds_of(
    data: TrainingData, y: Any, cv: Any, seed: int, stratify: bool
) -> list[Indices]:
    """Return the training and held-out samples of each fold.

    Each sample is held out exactly once. ``y`` contains the targets of ``data``, as
    passed by the user. With ``stratify``, samples of each class are spread evenly over
    the folds.
    """
    if isinstance(cv, int):
        check_count("cv", cv, 2)
        keys = row_keys(data.X, len(data.y), seed)
        return hash_folds(keys, data.y, cv, stratify=stratify)
    splitter = check_cv(cv, y, classifier=stratify)
    with private_rng(None):
        folds = list(splitter.split(np.empty(len(data.y)), y))
    held_out = np.sort(np.concatenate([[], *(test for _, test in folds)]))
    if not np.array_equal(held_out, np.arange(len(data.y))):
        raise ValueError(
            f"cv={reprlib.repr(cv)} must hold out each row exactly once. Use an "
            "integer, or folds such as KFold."
        )
    return folds


def _signed(scores: Array) -> Array:
    """Return scores with both signs, (c, 2 s), slightly enlarged to include ties."""
    scores = scores * (1 + 1e-9)
    return np.concatenate([-scores, scores], axis=1)
