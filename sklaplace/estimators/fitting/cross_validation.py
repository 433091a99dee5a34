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

        Splits and scorer are checked before any training. Each split must train on all
        classes.

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
        classes = targets if isinstance(targets, ClassTargets) else None
        row_splits = _row_splits(cv, data, classes)
        if classes is not None and not classes.target_type.is_single:
            _check_scores_columns(scorer)
        # a scorer of the user may need more than constant predictions
        elif isinstance(scoring, str):
            _check_score(owner, scoring, scorer, y, row_splits[0])
        # samples without weight are not encoded; row numbers as inputs show which are
        encoded = weighted_data(targets, np.arange(len(y)), y, data.sample_weight).X
        places = np.full(len(y), -1)
        places[encoded] = np.arange(len(encoded))
        splits = []
        for number, (train, test) in enumerate(row_splits):
            splits.append(_among_encoded(number, (train, test), places))
            if classes is None:
                continue
            lacking = classes.missing_classes(y[train])
            if len(lacking):
                raise ValueError(
                    f"Split {number} of cv has no rows of the classes "
                    f"{lacking[:5].tolist()} to train on. {_advice(data, lacking)}, or "
                    "leave these classes out."
                )
        return cls(splits, data, [test for _, test in row_splits], scorer)

    def scored(self, fold: int) -> TrainingData:
        """Return the scored samples of a split, as passed to ``fit``."""
        return select(self.data, self.scored_rows[fold])


def _row_splits(
    cv: Any, data: TrainingData, classes: ClassTargets | None
) -> list[Split]:
    """Return the splits by ``cv``, as row numbers of the samples passed to ``fit``.

    ``classes`` is the encoder of class labels, or None for regression. Rows whose
    labels are all ignored are in no split.
    """
    scorable, by_class = np.arange(len(data.y)), classes is not None
    if classes is not None:  # labels that the criterion ignores have no score
        ignored = classes.is_ignored(data.y).reshape(len(scorable), -1).all(1)
        scorable = scorable[~ignored]
    scored = select(data, scorable)
    splitter = _splitter(cv, scored, by_class)
    try:
        with private_rng(None):
            # scikit-learn cannot index other inputs, but most splits only need a length
            X = scorable.reshape(-1, 1) if is_opaque(scored.X) else scored.X
            pairs = splitter.split(X, scored.y, scored.groups)
            splits = [(scorable[train], scorable[test]) for train, test in pairs]
    except (IndexError, TypeError, ValueError) as error:
        advice = (
            "Use fewer folds, leave out classes of y with few samples, or pass pairs "
            "(train, test) of row indices."
        )
        if scored.groups is None and "group" in f"{splitter}{error}".lower():
            advice = "Pass groups= to fit, with the group of each row."
        raise ValueError(
            f"cv={cv!r} cannot split {len(scorable)} samples: "
            f"{str(error).rstrip('.')}. {advice}"
        ) from error
    if not splits:
        raise ValueError("cv has no splits. Pass at least one pair (train, test).")
    return splits


def _splitter(cv: Any, data: TrainingData, by_class: bool) -> Any:
    """Return the splitter for a value of ``cv`` and samples, which may have groups.

    Scikit-learn's default and a number of folds split within groups, so a splitter that
    keeps groups together replaces them.
    """
    has_number, has_groups = isinstance(cv, Integral | None), data.groups is not None
    # unlike those of KFold, hashed folds do not depend on the order of the samples;
    # five folds are scikit-learn's default
    if cv is None and not (has_groups or by_class):
        cv = hash_folds(sample_keys(data.X, data.y, 0, None), data.y, 5, stratify=False)
    with naming(cv="cv"):
        cv = check_cv(cv, data.y, classifier=by_class)
    if not (has_groups and has_number):
        return cv
    group_class = GroupKFold if isinstance(cv, KFold) else StratifiedGroupKFold
    return group_class(cv.n_splits)


def _advice(data: TrainingData, lacking: np.ndarray) -> str:
    """Return what to do about classes that are missing from a part of the samples."""
    noun = "row" if data.groups is None else "group"
    rows = np.isin(data.y, lacking).reshape(len(data.y), -1).any(1)
    units = np.arange(len(data.y)) if data.groups is None else data.groups
    # a class in a single unit is missing whenever this unit is scored
    if len(np.unique(units[rows])) <= len(lacking):
        return f"A class needs more than one {noun}. Pass more {noun}s"
    return "Use shuffled or stratified folds (StratifiedKFold)"


def _among_encoded(number: int, split: Split, places: np.ndarray) -> Split:
    """Return a split of the encoded samples; raise ValueError if a part is empty.

    ``split`` contains row numbers of the samples passed to ``fit``, of which those
    without weight are not encoded. ``places`` contains the index of each row among the
    encoded samples, or -1. ``number`` is that of the split, for messages.
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
    """Raise ValueError, before training, if constant predictions cannot be scored.

    A dummy that predicts a constant is fitted to the targets ``y`` of one split, and
    stands for the estimator ``owner``.
    """
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
    """Return the score of a fitted estimator; raise ValueError if it is no number.

    The scorer receives the weights of the samples, if there are any and it accepts
    them.
    """
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
    """Return ``cv_results_`` as in scikit-learn, from scores (candidates, folds).

    ``params`` contains one dict per candidate, all with the same keys. Candidates with
    a score that is not finite have the last rank.
    """
    mean = scores.mean(1)
    is_finite = np.isfinite(mean)
    if not is_finite.any():
        raise ValueError(
            f"No prior precision has a finite score: {mean}. Check what scoring "
            "returns for rows of a fold, or use scoring=None."
        )
    if not is_finite.all():
        warn_user(f"Some scores are not finite, and count as the worst: {mean}.")
    with np.errstate(invalid="ignore"):  # infinite scores
        std = scores.std(1)
    # rank 1 is the best, and equal scores share the better rank
    ranks = rankdata(-np.where(is_finite, mean, -np.inf), method="min")
    return {
        **{f"param_{k}": np.array([p[k] for p in params]) for k in params[0]},
        "params": params,
        **{f"split{k}_test_score": column for k, column in enumerate(scores.T)},
        "mean_test_score": mean,
        "std_test_score": std,
        "rank_test_score": ranks.astype(np.int32),
    }
