"""Cross-validation: the splits of the samples, and the scores of a search."""

import inspect
import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.base import is_classifier
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import brier_score_loss, check_scoring, log_loss
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, check_cv
from sklearn.utils import indexable

from sklaplace.core.checks import naming, warn_user
from sklaplace.core.random import private_rng
from sklaplace.data.dataset import TrainingData, is_opaque
from sklaplace.data.split import hash_folds, sample_keys
from sklaplace.estimators.targets.classes import ClassTargets
from sklaplace.estimators.targets.numbers import NumberTargets
from sklaplace.estimators.training.samples import (
    Samples,
    as_groups,
    as_weights,
    select,
    weighted_data,
)

Targets = ClassTargets | NumberTargets
Split = tuple[np.ndarray, np.ndarray]  # indices of training and of scored samples


@dataclass(frozen=True)
class CrossValidation:
    """Splits of the samples passed to ``fit``, and their scored samples.

    Attributes
    ----------
    splits : list of (ndarray, ndarray)
        Indices of the training samples and of the scored samples of each split, among
        the encoded samples.
    data : TrainingData
        Samples as passed to ``fit``.
    scored_rows : list of ndarray
        Indices of the scored samples of each split in ``data``.
    scorer : callable or None
        Scorer, as in scikit-learn. None means the log-likelihood.
    """

    splits: list[Split]
    data: TrainingData
    scored_rows: list[np.ndarray]
    scorer: Any

    @classmethod
    def of(
        cls, samples: Samples, targets: Targets, cv: Any, scoring: Any, owner: Any
    ) -> "CrossValidation":
        """Return the checked splits and scorer of the arguments of ``fit``.

        Parameters
        ----------
        samples : Samples
            Arguments of ``fit``.
        targets : Targets
            Encoder of the targets.
        cv, scoring : object
            Parameters of the search.
        owner : estimator
            Estimator whose predictions are scored.
        """
        X, y, weights = samples.X, targets.check(samples.y), samples.sample_weight
        data = TrainingData(
            X if is_opaque(X) else indexable(X)[0],
            y,
            None if weights is None else as_weights(weights, len(y)),
            as_groups(samples.groups, len(y)),
        )
        scorer = None if scoring is None else check_scoring(owner, scoring)
        labels = targets if isinstance(targets, ClassTargets) else None
        rows = _row_splits(cv, data, labels)
        if labels is not None and not labels.target_type.is_single:
            _check_scores_columns(scorer)
        elif isinstance(scoring, str):
            _check_score(owner, scoring, scorer, y, rows[0])
        # samples without weight are not encoded
        encoded = weighted_data(targets, np.arange(len(y)), y, data.sample_weight).X
        places = np.full(len(y), -1)
        places[encoded] = np.arange(len(encoded))
        splits = []
        for number, split in enumerate(rows):
            splits.append(_among_encoded(number, split, places))
            if labels is None:
                continue
            lacking = labels.missing_classes(y[split[0]])
            if len(lacking):
                raise ValueError(
                    f"Split {number} of cv has no rows of the classes "
                    f"{lacking[:5].tolist()} to train on. {_advice(data, lacking)}, or "
                    "leave these classes out."
                )
        return cls(splits, data, [test for _, test in rows], scorer)

    def scored(self, fold: int) -> TrainingData:
        """Return the scored samples of a split, as passed to ``fit``."""
        return select(self.data, self.scored_rows[fold])


def _row_splits(
    cv: Any, data: TrainingData, labels: ClassTargets | None
) -> list[Split]:
    """Return the splits by ``cv``, as row numbers of the samples passed to ``fit``.

    ``labels`` is None for regression.
    """
    scorable, by_class = np.arange(len(data.y)), labels is not None
    if labels is not None:  # labels that the criterion ignores have no score
        ignored = labels.is_ignored(data.y).reshape(len(scorable), -1).all(1)
        scorable = scorable[~ignored]
    part = select(data, scorable)
    splitter = _splitter(cv, part, by_class)
    try:
        with private_rng(None):
            X = scorable.reshape(-1, 1) if is_opaque(part.X) else part.X
            pairs = splitter.split(X, part.y, part.groups)
            splits = [(scorable[train], scorable[test]) for train, test in pairs]
    except (IndexError, TypeError, ValueError) as error:
        advice = (
            "Use fewer folds, leave out classes of y with few samples, or pass pairs "
            "(train, test) of row indices."
        )
        if part.groups is None and "group" in f"{splitter}{error}".lower():
            advice = "Pass groups= to fit, with the group of each row."
        raise ValueError(
            f"cv={cv!r} cannot split {len(scorable)} samples: "
            f"{str(error).rstrip('.')}. {advice}"
        ) from error
    if not splits:
        raise ValueError("cv has no splits. Pass at least one pair (train, test).")
    return splits


def _splitter(cv: Any, data: TrainingData, by_class: bool) -> Any:
    """Return the splitter for a value of ``cv`` and samples, which may have groups."""
    has_number, has_groups = isinstance(cv, Integral | None), data.groups is not None
    if cv is None and not (has_groups or by_class):
        cv = hash_folds(sample_keys(data.X, data.y, 0, None), data.y, 5, stratify=False)
    with naming(cv="cv"):
        cv = check_cv(cv, data.y, classifier=by_class)
    if not (has_groups and has_number):
        return cv
    kind = GroupKFold if isinstance(cv, KFold) else StratifiedGroupKFold
    return kind(cv.n_splits)


def _advice(data: TrainingData, lacking: np.ndarray) -> str:
    """Return what to do about classes that are missing from a part of the samples."""
    noun = "row" if data.groups is None else "group"
    rows = np.isin(data.y, lacking).reshape(len(data.y), -1).any(1)
    units = np.arange(len(data.y)) if data.groups is None else data.groups
    if len(np.unique(units[rows])) <= len(lacking):
        return f"A class needs more than one {noun}. Pass more {noun}s"
    return "Use shuffled or stratified folds (StratifiedKFold)"


def _among_encoded(number: int, split: Split, places: np.ndarray) -> Split:
    """Return a split of the encoded samples; raise ValueError if a part is empty.

    ``places`` contains the index of each row among the encoded samples, or -1.
    """
    train, test = (places[rows][places[rows] >= 0] for rows in split)
    for name, rows in {"train on": train, "score": test}.items():
        if not len(rows):
            raise ValueError(
                f"Split {number} of cv has no rows to {name} with positive weight. "
                "Use fewer folds, or pass other splits."
            )
    return train, test


def _check_score(
    owner: Any, scoring: str, scorer: Any, y: np.ndarray, split: Split
) -> None:
    """Score constant predictions before training; raise an error if scoring fails."""
    dummy = DummyClassifier() if is_classifier(owner) else DummyRegressor()
    train, test = split
    with warnings.catch_warnings(action="ignore"):
        try:
            dummy.fit(np.zeros((len(train), 1)), y[train])
            scorer(dummy, np.zeros((len(test), 1)), y[test])
        except (TypeError, ValueError, AttributeError) as error:
            reason = str(error).replace(type(dummy).__name__, type(owner).__name__)
            raise ValueError(
                f"scoring={scoring!r} cannot score these targets: "
                f"{reason.rstrip('.')}. Use another score, or scoring=None."
            ) from error


def _check_scores_columns(scorer: object) -> None:
    """Raise ValueError for scores that mistake several labels for one-hot classes."""
    score = getattr(scorer, "_score_func", None)
    if score in (log_loss, brier_score_loss):
        raise ValueError(
            f"scoring with {score.__name__} treats the columns of y as classes of a "
            "single label. Use scoring=None, the log-likelihood of all labels."
        )


def score_of(scorer: Any, fitted: Any, data: TrainingData) -> float:
    """Return the score of a fitted estimator; raise ValueError if it is no number."""
    options = {}
    if data.sample_weight is not None and _takes_weights(scorer):
        options = {"sample_weight": data.sample_weight}
    score = scorer(fitted, data.X, data.y, **options)
    try:
        return float(score)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"scoring returned {score!r}, which is not a number. Use one scorer that "
            "returns a float."
        ) from error


def _takes_weights(scorer: Any) -> bool:
    """Return whether a scorer accepts sample weights."""
    if hasattr(scorer, "_accept_sample_weight"):
        return bool(scorer._accept_sample_weight())
    return "sample_weight" in inspect.signature(scorer).parameters


def cv_results(params: list[dict[str, Any]], scores: np.ndarray) -> dict[str, Any]:
    """Return ``cv_results_`` as in scikit-learn, from scores (candidates, folds)."""
    mean = scores.mean(1)
    is_finite = np.isfinite(mean)
    if not is_finite.any():
        raise ValueError(
            f"No prior precision has a finite score: {mean}. Check what scoring "
            "returns for rows of a fold, or use scoring=None."
        )
    if not is_finite.all():
        warn_user(f"Some scores are not finite, and count as the worst: {mean}.")
    with np.errstate(invalid="ignore"):
        std = scores.std(1)
    ranks = rankdata(-np.where(is_finite, mean, -np.inf), method="min")
    return {
        **{f"param_{k}": np.array([entry[k] for entry in params]) for k in params[0]},
        "params": params,
        **{f"split{k}_test_score": column for k, column in enumerate(scores.T)},
        "mean_test_score": mean,
        "std_test_score": std,
        "rank_test_score": ranks.astype(np.int32),
    }
