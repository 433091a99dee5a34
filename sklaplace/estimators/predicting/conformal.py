"""Conformal: intervals and sets with guaranteed coverage, from conformity scores.

A score measures how unlikely a target is under the predictions of a model. The model
has not seen the calibration samples. The interval or set for a new sample contains a
value unless the score of this value exceeds too many calibration scores.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import check_cv

from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import check_count, listed, plain
from sklaplace.core.parallel import cached_property
from sklaplace.core.random import private_rng
from sklaplace.data.dataset import TrainingData
from sklaplace.data.split import hash_folds, sample_keys

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
    groups : sequence of ndarray of shape (n_k,), or None
        Group of each sample. If None, each sample is a group.
    categories : sequence of ndarray of shape (n_k,), or None
        Category of each sample. New samples use the scores of their category.

    References
    ----------
    Vovk, Gammerman and Shafer (2005), "Algorithmic learning in a random world"; Barber,
    Candès, Ramdas and Tibshirani (2021), "Predictive inference with the jackknife+"
    (CV+); Lee, Barber and Willett (2023), "Distribution-free inference with
    hierarchical data" (groups); Vovk, Lindsay, Nouretdinov and Gammerman (2003),
    "Mondrian confidence machine" (categories).
    """

    models: Sequence[Any]
    scores: Sequence[Array]
    settings: dict[str, Any]
    groups: Sequence[NDArray[Any]] | None
    categories: Sequence[NDArray[Any]] | None = None

    @classmethod
    def of(
        cls,
        models: Sequence[Any],
        scores: Sequence[Array],
        settings: dict[str, Any],
        groups: Sequence[NDArray[Any]] | None,
        categories: Sequence[NDArray[Any]] | None = None,
    ) -> "Conformal":
        """Return the scores that are not NaN. The arguments are the attributes."""
        conformal = cls(models, scores, settings, groups, categories)
        return conformal._selected([np.asarray(~np.isnan(s).any(1)) for s in scores])

    @property
    def known_categories(self) -> NDArray[Any]:
        """Categories of the scores, sorted; empty without categories."""
        return np.unique(np.concatenate(self.categories or [np.empty(0)]))

    def by_category(
        self, categories: NDArray[Any] | None
    ) -> "list[tuple[Conformal, NDArray[np.intp]]]":
        """Return the scores of each category of new samples, and the samples' indices.

        Raise ValueError if the scores have no categories, if the samples have none, or
        if a category has no scores.
        """
        known = self.known_categories.tolist()
        if self.categories is None:
            raise ValueError(
                "conformalize did not receive categories. Pass categories= to "
                "conformalize, too."
            )
        if categories is None:
            raise ValueError(
                f"conformalize received the categories {listed(known)}. Pass "
                "categories=, with one of these for each row of X."
            )
        labels = np.unique(categories)
        unknown = [label for label in labels.tolist() if label not in known]
        if unknown:
            raise ValueError(
                f"conformalize received no rows of the categories {listed(unknown)}. "
                f"It received the categories {listed(known)}."
            )
        return [
            (
                self._selected([each == label for each in self.categories]),
                np.flatnonzero(categories == label),
            )
            for label in labels
        ]

    def _selected(self, rows: Sequence[NDArray[np.bool_]]) -> "Conformal":
        """Return the scores for which ``rows``, one array per model, are True."""
        chosen = {
            name: [each[kept] for each, kept in zip(arrays, rows, strict=True)]
            for name in ("scores", "groups", "categories")
            if (arrays := getattr(self, name)) is not None
        }
        return replace(self, **chosen)  # type: ignore[arg-type]

    @cached_property
    def weights(self) -> list[Array]:
        """One over the number of samples in the group of each sample, per model."""
        # groups are counted over the samples of all models
        ends = np.cumsum([len(s) for s in self.scores])
        labels: Any = range(ends[-1])
        if self.groups is not None:
            labels = np.concatenate(self.groups)
        _, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        return np.split(1 / sizes[group], ends[:-1])

    def _needed(self, coverage: Array) -> Array:
        """Return the total weight of the scores within the limit of each coverage.

        The new sample counts as one of n + 1 groups, so the weight is ``(n + 1) α`` for
        the coverage α. The weights of a group sum to one. A coverage that needs more
        than n groups raises ValueError.
        """
        n = round(sum(w.sum() for w in self.weights))
        # weights within 1e-9, more than their rounding errors, count as equal
        needed = (n + 1) * coverage - 1e-9
        if (needed > n).any():
            level = float(coverage.max())
            units = "rows" if self.groups is None else "groups"
            category = next(iter(self.known_categories.tolist()), None)
            of_category = "" if category is None else f" of the category {category!r}"
            # smallest n with (n + 1) α <= n
            n_needed = int(np.ceil(level / (1 - level) - 1e-9))
            raise ValueError(
                f"A coverage of {level:g} cannot be guaranteed from {n} "
                f"{units}{of_category}. Pass at least {n_needed} {units}{of_category} "
                "to conformalize, or choose a smaller coverage."
            )
        return np.maximum(needed, 1e-9)  # positive, so that no limit is without scores

    def signed_scores(self, coverage: Array, joint: bool) -> list[Array]:
        """Return the normal scores (c or 1, 2 s) of the ends that each model predicts.

        These are minus the s conformity scores of the model, followed by the scores
        themselves. If the estimator is the only model, s is the number of coverages,
        and the scores are the limits for the coverages. With ``joint``, the scores are
        the same for all columns.
        """
        scores = self.scores
        if joint:
            scores = [s.max(axis=1, keepdims=True) for s in scores]
        if self.models:
            return [_signed(s.T) for s in scores]
        (weights,) = self.weights
        return [_signed(_limits(scores[0].T, weights, self._needed(coverage)))]

    def interval(self, ends: Sequence[Array], coverage: Array) -> Array:
        """Return interval ends (n, c, 2, n_levels) from the ends that models predict.

        ``ends`` contains one array (n, c, 2 s) per model: the lower ends at its s
        scores, and the upper ends; see `signed_scores`. Without models of folds, there
        is one array, which the estimator predicts. With them (CV+), each score of each
        model yields an end on either side. The interval extends to the end at which the
        weights of the scores suffice for the coverage.
        """
        if not self.models:
            # the estimator's own ends, at the limits for all coverages
            return ends[0].reshape(*ends[0].shape[:2], 2, -1)
        needed, weights = self._needed(coverage), np.concatenate(self.weights)
        # a pair of arrays (n, c, s) per model, joined to a pair (n, c, Σ s)
        sides = [np.split(array, 2, axis=-1) for array in ends]
        low, high = np.concatenate(sides, axis=-1)
        limits = -_limits(-low, weights, needed), _limits(high, weights, needed)
        # the lower end of CV+ can exceed the upper end if the coverage is low
        return np.asarray(np.sort(np.stack(limits, axis=-2), axis=-2))

    def require_bytes(self, n_samples: int) -> None:
        """Raise ValueError if the ends of all models do not fit into memory."""
        n_scores, n_columns = np.concatenate(self.scores).shape
        # without models of folds, there are only the ends of the coverages
        if self.models:
            # float64; two ends, with their order, weights and sorted copies
            require_bytes(
                64 * n_samples * n_columns * n_scores,
                "cpu",
                f"method='conformal' for {n_samples:,} rows and {n_scores:,} scores of "
                "folds",
                "predict fewer rows at a time, or call conformalize with cv=None",
            )

    def members(self, scores: Sequence[Array], coverage: float) -> NDArray[np.bool_]:
        """Return whether sets contain each label, (n, K).

        ``scores`` contains each model's conformity scores (n, K) of all labels. A set
        contains a label unless the calibration scores below the label's score have at
        least the weight that the coverage needs.
        """
        # total weight of calibration scores below each label's score, over all models
        needed, below = self._needed(np.array([coverage])), np.zeros(1)
        for label_scores, calibration, weights in zip(
            scores, self.scores, self.weights, strict=True
        ):
            order = np.argsort(calibration[:, 0])
            totals = np.concatenate([[0], np.cumsum(weights[order])])
            below = below + totals[np.searchsorted(calibration[order, 0], label_scores)]
        return np.asarray(below < needed)


def _limits(scores: Array, weights: Array, needed: Array) -> Array:
    """Return the smallest scores (..., L) below which there is enough weight.

    The sum of the ``weights`` (s,) of all scores (..., s) up to a returned score, which
    is included, is at least one of the values ``needed`` (L,).
    """
    order = np.argsort(scores, axis=-1)
    totals = np.cumsum(weights[order], axis=-1)
    places = np.stack([(totals < total).sum(-1) for total in needed], axis=-1)
    return np.take_along_axis(np.take_along_axis(scores, order, -1), places, -1)


def check_no_categories(categories: object) -> None:
    """Raise ValueError for categories of predictions that are not conformal."""
    if categories is not None:
        raise ValueError(
            "categories have no effect on these predictions. Use method='conformal', "
            "after conformalize with categories=."
        )


def parts_of(
    labels: NDArray[Any] | None, rows_of_parts: Sequence[Any]
) -> list[NDArray[Any]] | None:
    """Return the labels of the rows of each part, or None without labels."""
    return None if labels is None else [labels[rows] for rows in rows_of_parts]


def folds_of(
    data: TrainingData, y: Any, cv: Any, seed: int, stratify: bool
) -> list[Indices]:
    """Return the training and held-out samples of each fold.

    Each sample is held out exactly once, and all samples of a group together. ``y``
    contains the targets of ``data``, as passed by the user. With ``stratify``, samples
    of each class are spread evenly over the folds.
    """
    if isinstance(plain(cv), int):
        keys = sample_keys(data.X, data.y, seed, data.groups)
        return hash_folds(keys, data.y, check_count("cv", cv, 2), stratify=stratify)
    splitter, rows = check_cv(cv, y, classifier=stratify), np.arange(len(data.y))
    try:
        with private_rng(None):
            # splitters only need the length of X
            pairs = list(splitter.split(np.empty(len(rows)), y, data.groups))
    except (TypeError, ValueError) as error:
        if data.groups is not None or "group" not in f"{cv}{error}".lower():
            raise  # groups would not help
        raise ValueError(f"{cv} needs groups. Pass groups= to conformalize.") from error
    folds = [(rows[seen], rows[held_out]) for seen, held_out in pairs]
    # the empty list allows that there are no folds
    if not np.array_equal(np.sort(np.concatenate([[], *(t for _, t in folds)])), rows):
        raise ValueError(
            f"cv={reprlib.repr(cv)} must hold out each row exactly once. Use an "
            "integer, or folds such as KFold."
        )
    # without groups, no row may be on both sides
    units = rows if data.groups is None else data.groups
    if any(np.isin(units[seen], units[test]).any() for seen, test in folds):
        raise ValueError(
            f"cv={reprlib.repr(cv)} trains a fold on its own held-out rows or groups. "
            "Use an integer, or folds such as KFold or GroupKFold."
        )
    return folds


def _signed(scores: Array) -> Array:
    """Return scores (c, s) with both signs, (c, 2 s), minus signs first.

    They are enlarged by more than rounding errors, so that intervals include targets
    exactly at an end.
    """
    scores = scores * (1 + 1e-9)
    return np.concatenate([-scores, scores], axis=1)
