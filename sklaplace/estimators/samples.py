"""Samples: inputs, targets and weights, checked and cast for the network.

Arrays are validated as everywhere in scikit-learn; dicts of arrays and torch datasets
are passed to skorch unchanged.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    validate_data,
)

from sklaplace.networks.data import (
    TrainingData,
    check_length,
    count_rows,
    input_type,
    is_opaque,
)


@dataclass(frozen=True)
class Samples:
    """Arguments of ``fit``, as they were passed.

    Attributes
    ----------
    X, y, sample_weight
        Training samples.
    X_val, y_val
        Samples that the network does not see, or None.
    fit_params : dict
        For the ``fit`` of the skorch net.
    classes : ndarray or None
        All classes, where ``y`` may lack some.
    """

    X: Any
    y: Any
    sample_weight: Any
    X_val: Any
    y_val: Any
    fit_params: dict[str, Any]
    classes: np.ndarray | None = None


def encode_samples(
    model: Any, samples: Samples
) -> tuple[TrainingData, TrainingData | None]:
    """Return training and validation data, checked and encoded.

    Sets ``n_features_in_``, ``feature_names_in_`` and what targets are encoded by.
    """
    if (samples.X_val is None) != (samples.y_val is None):
        missing = "y_val" if samples.y_val is None else "X_val"
        raise ValueError(
            f"{missing} is missing: rows to tune on need inputs and targets. "
            "Pass both X_val and y_val, or neither."
        )
    if samples.y is None:
        raise ValueError(
            f"{type(model).__name__} requires y to be passed, but the target y is "
            "None. For a torch Dataset, pass its targets as an array."
        )
    model._input_type = input_type(model._net)
    X, y = model._check_samples(samples.X, samples.y, reset=True)
    model._targets = model._infer_targets(y, samples.classes)
    data = weighted_data(model, X, y, samples.sample_weight)
    if samples.X_val is None:
        return data, None
    X, y = model._check_samples(samples.X_val, samples.y_val, reset=False)
    return data, weighted_data(model, X, y, None, name="y_val")


def weighted_data(
    model: Any, X: Any, y: Any, sample_weight: Any, name: str = "y"
) -> TrainingData:
    """Return encoded samples with weights, if any; those of weight zero are dropped."""
    data = TrainingData(X, model._targets.encode(y, name), None)
    own = model._targets.sample_weight(data.y)
    if sample_weight is None:
        return data if own is None else data.weighted(own)
    weights = _check_sample_weight(
        sample_weight,
        np.empty((len(data.y), 1)),
        dtype=np.float64,
        ensure_non_negative=True,
    )
    return data.weighted(weights if own is None else weights * own)


def check_samples(model: Any, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
    """Return inputs, checked and cast, and targets, checked."""
    if is_opaque(X):
        y = np.asarray(y)
        check_length(X, y)
        if reset:  # set by an earlier fit on arrays
            for name in ("n_features_in_", "feature_names_in_"):
                vars(model).pop(name, None)
        return X, y
    options: dict[str, Any] = {"reset": reset, "dtype": None, "allow_nd": True}
    if is_classifier(model) and np.asarray(y).ndim > 2:
        X = validate_data(model, X, **options)
        y = check_array(y, dtype=None, allow_nd=True, input_name="y")
        check_consistent_length(X, y)
    else:
        y_numeric = not is_classifier(model)
        X, y = validate_data(
            model, X, y, multi_output=True, y_numeric=y_numeric, **options
        )
    return model._input_type.inputs(X), y


def check_inputs(model: Any, X: Any) -> Any:
    """Return inputs to predict, checked and cast."""
    if is_opaque(X):
        count_rows(X)
        return X
    X = validate_data(model, X, reset=False, dtype=None, allow_nd=True)
    return model._input_type.inputs(X)


def draw_seed(random_state: Any) -> int:
    """Return a seed from ``random_state``, never from the global generator."""
    if random_state is None:  # entropy of the operating system
        seed = int.from_bytes(os.urandom(4), "little")
        random_state = np.random.RandomState(seed)
    generator: np.random.RandomState = check_random_state(random_state)
    return int(generator.randint(np.iinfo(np.int32).max))


@contextmanager
def unchanged_on_error(estimator: Any) -> Iterator[None]:
    """Restore the estimator's attributes if anything raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise
