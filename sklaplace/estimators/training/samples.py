"""Samples: inputs, targets and weights, checked and cast for the network.

Arrays are validated as everywhere in scikit-learn; dicts of arrays and torch datasets
are passed to skorch unchanged.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from scipy.sparse import issparse
from sklearn.base import is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    validate_data,
)
from skorch.helper import SliceDataset
from torch import Tensor
from torch.utils.data import DataLoader

from sklaplace.core.checks import check_arrays, naming, warn_user
from sklaplace.core.trees import leaves, mapped
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.training.trainer import check_applicable
from sklaplace.networks.arrays import as_array, check_columns, detached
from sklaplace.networks.data import (
    TrainingData,
    as_given,
    check_length,
    count_rows,
    input_type,
    is_opaque,
)
from sklaplace.networks.stored import StoredArray, check_file, is_stored

# A mean of the positive weights below it, or above its inverse, is warned of.
SMALLEST_MEAN_WEIGHT = 0.1


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
    is_part : bool
        Whether this is one of several fits. Ctrl-C then raises.
    """

    X: Any
    y: Any
    sample_weight: Any
    X_val: Any
    y_val: Any
    fit_params: dict[str, Any]
    classes: np.ndarray | None = None
    is_part: bool = False


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
    check_arrays(X_val=samples.X_val, y_val=samples.y_val)
    check_loader(samples.X)
    if samples.y is None:
        raise ValueError(
            f"{type(model).__name__} requires y to be passed, but the target y is "
            "None. For a torch Dataset of pairs, pass all targets as an array: "
            "fit(dataset, [y for _, y in dataset])."
        )
    model._input_type = input_type(inner_net(model.estimator))
    X, y = model._check_samples(samples.X, samples.y, reset=True)
    if samples.sample_weight is not None:
        weights = as_weights(
            samples.sample_weight, y.shape[0], ensure_non_negative=True
        )
        samples = replace(samples, sample_weight=weights)
    with naming(y="y"):
        model._targets = model._infer_targets(y, samples)
    data = weighted_data(model, X, y, samples.sample_weight)
    if samples.X_val is None:
        return data, None
    with naming(X="X_val", y="y_val"):
        X, y = model._check_samples(samples.X_val, samples.y_val, reset=False)
        validation = weighted_data(model, X, y, None, name="y_val")
    _warn_of_other_ranges(data.X, validation.X)
    return data, validation


def _warn_of_other_ranges(X: Any, X_val: Any) -> None:
    """Warn of a table of held-out samples in other units than that of training samples.

    The median of a column is then beyond the range of the other by half of its width.
    """
    if not all(isinstance(x, np.ndarray) and x.ndim == 2 for x in (X, X_val)):
        return
    low, high, middle = X.min(axis=0), X.max(axis=0), np.median(X_val, axis=0)
    margin = (high - low) / 2
    is_off = (middle < low - margin) | (middle > high + margin)
    if is_off.any():
        warn_user(
            f"The median of {is_off.sum()} of {len(margin)} columns of X_val is far "
            "outside of the range of X, so that prior and noise are chosen by samples "
            "unlike those of training. A Pipeline does not transform X_val unless it "
            "is named: Pipeline(steps, transform_input=['X_val'])."
        )


def weighted_data(
    model: Any, X: Any, y: Any, sample_weight: Any, name: str = "y"
) -> TrainingData:
    """Return encoded samples with weights, if any; those of weight zero are dropped."""
    data = TrainingData(X, model._targets.encode(y, name), None)
    own = model._targets.sample_weight(data.y)
    if sample_weight is None:
        return data if own is None else data.weighted(own)
    weights = as_weights(sample_weight, len(data.y), ensure_non_negative=True)
    return data.weighted(weights if own is None else weights * own)


@naming(sample_weight="sample_weight")
def as_weights(sample_weight: Any, n: int, **options: Any) -> np.ndarray:
    """Return weights of n samples as float64; raises for others than real numbers."""
    check_arrays(sample_weight=sample_weight)
    options["dtype"] = np.float64
    weights = _check_sample_weight(detached(sample_weight), np.empty((n, 1)), **options)
    if not weights.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return cast(np.ndarray, weights)


def warn_of_weight_scale(sample_weight: Any) -> None:
    """Warn of weights whose mean is far from one, unless they are whole numbers.

    A message is shown once: AdaBoost fits its estimator many times with such weights.
    """
    if sample_weight is None:
        return
    weights = as_array(detached(sample_weight), "sample_weight")
    if weights.dtype.kind != "f" or not np.isfinite(weights).all():
        return  # counts, or refused later
    weights = weights[weights > 0]
    if (weights == np.round(weights)).all():
        return
    mean = float(weights.mean())
    if not SMALLEST_MEAN_WEIGHT <= mean <= 1 / SMALLEST_MEAN_WEIGHT:
        warn_user(
            f"The mean of sample_weight is {mean:.2g}: weights are counts, so that "
            f"{len(weights):,} samples count as {weights.sum():.3g}. Divide "
            "sample_weight by its mean, unless that is what you mean.",
            once=True,
        )


@naming(X="X", y="y")
def check_samples(model: Any, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
    """Return inputs, checked and cast, and targets, checked."""
    check_loader(X)
    check_arrays(X=X, y=y)
    check_file(y, "y")
    if is_opaque(X):
        X, y = as_given(X, model._input_type.dtype), _as_targets(y, allow_nd=True)
        check_length(X, y)
        if reset:  # set by an earlier fit on arrays
            for name in ("n_features_in_", "feature_names_in_", "_n_axes"):
                vars(model).pop(name, None)
        return X, y
    X = _cast_inputs(model, X, reset=reset)
    y = _as_targets(y, allow_nd=is_classifier(model))
    check_consistent_length(X, y)
    return X, y


@naming(X="X")
def check_inputs(model: Any, X: Any) -> Any:
    """Return inputs to predict, checked and cast."""
    check_loader(X)
    check_arrays(X=X)
    if is_opaque(X):
        X = as_given(X, model._input_type.dtype)
        count_rows(X)  # refuses streams
        return applicable(model, X)
    return _cast_inputs(model, X, reset=False)


def check_loader(X: Any, method: str = "fit") -> None:
    """Raise for a loader, and say what a method that takes targets is to be given."""
    if isinstance(X, DataLoader):
        raise TypeError(
            f"X is a DataLoader. Pass its dataset, to {method} with all targets in an "
            f"array: {method}(loader.dataset, targets); and batch_size to this "
            "estimator. For predictions, sklaplace.iter_predictions takes loaders."
        )


@naming(X="X")
def applicable(model: Any, X: Any) -> Any:
    """Return checked inputs; raises where the fitted network cannot be applied."""
    check_applicable(model.estimator_, X)
    return X


def _cast_inputs(model: Any, X: Any, *, reset: bool) -> np.ndarray | StoredArray:
    """Return array-like inputs in the dtype of the network, checked."""
    check_file(X, "X")
    if is_stored(X):
        return _stored_inputs(model, X, reset=reset)
    check_columns(X, "X")
    X = np.asarray(X) if isinstance(X, SliceDataset) else detached(X)
    n_axes = None if reset else getattr(model, "_n_axes", None)
    if getattr(X, "ndim", 0) > 1:  # before their features are compared
        _check_axes(X, n_axes)
    if reset or not _is_as_in_fit(model, X):
        # casting makes None and "nan" NaN, so that values are checked after it
        options = {"dtype": None, "allow_nd": True, "ensure_all_finite": False}
        X = validate_data(model, X, reset=reset, **options)
    _check_axes(X, n_axes)
    if reset:
        model._n_axes = X.ndim
    inputs: np.ndarray = model._input_type.inputs(X)
    return inputs


def _is_as_in_fit(model: Any, X: Any) -> bool:
    """Whether `validate_data`, which takes long, would return an array as it is."""
    is_numeric = type(X) is np.ndarray and X.dtype.kind in "fiu"
    n_features = getattr(model, "n_features_in_", None)
    names = getattr(model, "feature_names_in_", None)
    return is_numeric and names is None and X.size > 0 and X.shape[1:2] == (n_features,)


def _stored_inputs(model: Any, X: Any, *, reset: bool) -> np.ndarray | StoredArray:
    """Return inputs that are cast as they are read; those of fit are checked here.

    The default network is trained on all samples at once.
    """
    if X.ndim < 2:
        raise ValueError(
            f"X has the shape {X.shape}. Pass an array of shape (n, ...), one row per "
            "sample."
        )
    _check_axes(X, None if reset else getattr(model, "_n_axes", None))
    inputs = StoredArray(X, model._input_type.inputs)
    count_rows(inputs)
    validate_data(model, X, reset=reset, skip_check_array=True)
    if reset:
        model._n_axes = X.ndim
        if inner_net(model.estimator) is None:
            return np.asarray(inputs)
        for _ in inputs.blocks():  # raises for values that are not finite
            pass
    return inputs


def cast_tensors(model: Any, x: Any) -> Any:
    """Return tensors in the dtype of the fitted network, in their graph."""
    parts = [] if issparse(x) else list(leaves(x))
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(
            f"x is of type {type(x).__name__}; predictive needs tensors. Use "
            "torch.as_tensor(x), or latent_mean_and_variance for arrays."
        )
    if any(part.ndim == 0 or len(part) == 0 for part in parts):
        raise ValueError("x has no rows. Pass a tensor of shape (b, ...), b > 0.")
    parameters = model.estimator_.module_.parameters()
    dtype = next(p.dtype for p in parameters if p.is_floating_point())
    keeps_integers = model._input_type.keeps_integers

    def cast(leaf: Tensor) -> Tensor:
        is_index = keeps_integers and not leaf.is_floating_point()
        return leaf if is_index else leaf.to(dtype)

    return mapped(cast, x)


def _check_axes(X: Any, expected: int | None) -> None:
    """Raise for inputs with another number of axes than in fit, where that is known."""
    if expected is not None and X.ndim != expected:
        raise ValueError(
            f"X has shape {tuple(X.shape)} with {X.ndim} axes, but X in fit had "
            f"{expected}. Pass samples of the shape that they had in fit."
        )


def _as_targets(y: Any, *, allow_nd: bool) -> Any:
    """Return targets as an array or sparse matrix; values are checked in encoding."""
    options = {"dtype": None, "ensure_2d": False, "ensure_all_finite": False}
    try:
        return check_array(
            detached(y),
            accept_sparse="csr",
            allow_nd=allow_nd,
            input_name="y",
            **options,
        )
    except TypeError as error:
        raise TypeError(f"y cannot be converted to an array: {error}") from error


def draw_seed(random_state: Any) -> int:
    """Return a seed from ``random_state``, never from the global generator."""
    if random_state is None:  # entropy of the operating system
        random_state = np.random.RandomState(int.from_bytes(os.urandom(4), "little"))
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
