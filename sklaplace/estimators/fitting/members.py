"""Members that several base classes of estimators share without inheritance.

The classes use these functions as their methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import isfunction, unwrap
from os import PathLike
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.utils._param_validation import validate_parameter_constraints
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from sklaplace.core import progress
from sklaplace.core.budget import moved_entries
from sklaplace.core.cache import fingerprint
from sklaplace.core.checks import check_arrays, naming, warn_user
from sklaplace.core.parallel import one_thread
from sklaplace.core.serialise import from_portable, pickled, to_portable, worker_state
from sklaplace.core.trees import Inputs
from sklaplace.estimators.options.given_net import check_net, inner_net, is_frozen
from sklaplace.estimators.options.laplace import check_likelihood, sibling
from sklaplace.estimators.predicting.conformal import Conformal, folds_of
from sklaplace.estimators.training.samples import (
    InputForm,
    Samples,
    as_groups,
    as_weights,
    check_loader,
    select,
    warn_of_other_ranges,
    warn_of_seen_groups,
    weighted_data,
)
from sklaplace.estimators.training.trainer import EncodedData, Trainer, check_applicable
from sklaplace.networks.data import TrainingData, is_opaque
from sklaplace.networks.trained import device_of
from sklaplace.networks.training import copied

T = TypeVar("T", bound=Trainer)

# fitted attributes that contain tensors
_WITH_TENSORS = "posterior_", "network_spec_", "_novelty"
# attributes that are not needed to compute functions of outputs
_SENT_APART = (
    *("estimator", "estimator_", "prior", "memory", "posterior_", "_novelty"),
    "_conformal",
)
# parameters that only affect predictions, and can change after fit
_PREDICTING = (
    *("pred_type", "n_samples", "batch_size", "n_jobs", "residual"),
    *("link_approx", "dirichlet_approx"),
)


def without_class(kind: type) -> type:
    """Leave a base class, which users do not know, out of Python's error messages."""
    for name, member in vars(kind).items():
        if isfunction(member) and not name.startswith("_"):
            unwrap(member).__qualname__ = name
    return kind


# ----------------------------------------------------------------------------- fit
@contextmanager
def reported(self: Any) -> Iterator[None]:
    """Report progress and a summary; restore all attributes after an error.

    Conformity scores are removed, because they refer to the earlier predictions. The
    default network gains nothing from several threads, and uses one.
    """
    limit = one_thread() if self.estimator is None else nullcontext()
    before = dict(vars(self))
    vars(self).pop("_conformal", None)
    with progress.reporting(type(self).__name__, self.verbose), limit:
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        if self.verbose:
            progress.line(self._summary())


def check_parameters(self: Any) -> None:
    """Raise an error for invalid parameters."""
    self._validate_params()
    check_net(self.estimator, self._targets_kind.example_net)
    other = sibling(type(self).__name__, is_classifier(self))
    check_likelihood(self.likelihood, is_classifier(self), other)


def check_settings(self: Any) -> None:
    """Raise an error for invalid parameters that affect predictions."""
    values = {name: getattr(self, name) for name in _PREDICTING if hasattr(self, name)}
    validate_parameter_constraints(
        self._parameter_constraints, values, type(self).__name__
    )


def new_trainer(
    self: Any, kind: type[T], validation_fraction: float | None, **options: Any
) -> T:
    """Return a trainer; ``options`` are specific to the trainer's class."""
    return kind(
        estimator=self.estimator,
        targets=self._targets,
        likelihood=self.likelihood,
        seed=self._seed,
        validation_fraction=validation_fraction,
        alternative=sibling(type(self).__name__, is_classifier(self)),
        **options,
    )


# ------------------------------------------------------------------------- samples
def encode(self: Any, samples: Samples) -> EncodedData:
    """Check and encode samples, and store the encoding for later samples."""
    self._input_type = InputForm.of(inner_net(self.estimator), samples.X)
    if (samples.X_val is None) != (samples.y_val is None):
        missing = "y_val" if samples.y_val is None else "X_val"
        raise ValueError(
            f"{missing} is missing. Pass both X_val and y_val, or neither."
        )
    if samples.X_val is None and samples.groups_val is not None:
        raise ValueError("groups_val has no samples. Pass X_val and y_val, too.")
    check_arrays(X_val=samples.X_val, y_val=samples.y_val)
    check_loader(samples.X)
    if samples.y is None:
        raise ValueError(
            f"{type(self).__name__} requires y to be passed, but the target y is "
            "None. For a torch Dataset of pairs, pass all targets as an array: "
            "fit(dataset, [y for _, y in dataset])."
        )
    X, y = self._check_samples(samples.X, samples.y, reset=True)
    if samples.sample_weight is not None:
        weights = as_weights(samples.sample_weight, y.shape[0])
        samples = replace(samples, sample_weight=weights)
    with naming(y="y"):
        targets = self._infer_targets(y, samples)
    groups = as_groups(samples.groups, y.shape[0])
    self._has_groups = groups is not None
    data = weighted_data(targets, X, y, samples.sample_weight, groups)
    if is_classifier(self):
        self._notable_loss = targets.notable_loss(data)
    if samples.X_val is None:
        return EncodedData(data, None, samples.fit_params)
    with naming(X="X_val", y="y_val"):
        X, y = self._check_samples(samples.X_val, samples.y_val, reset=False)
        groups = as_groups(samples.groups_val, y.shape[0], "groups_val")
        validation = weighted_data(targets, X, y, None, groups, name="y_val")
    if samples.X_val is samples.X and not is_frozen(self.estimator):
        raise ValueError(
            "X_val is X, so fit would tune on the rows that the network is trained on. "
            "Pass other rows. Without X_val, fit holds out rows of X itself."
        )
    warn_of_other_ranges(data.X, validation.X)
    warn_of_seen_groups(data.groups, groups)
    return EncodedData(data, validation, samples.fit_params)


def check_samples(
    self: Any, X: Inputs, y: ArrayLike, *, reset: bool
) -> tuple[Any, Any]:
    """Return validated targets, and validated and cast inputs."""
    options = {"reset": reset, "allow_nd": is_classifier(self)}
    X, y = self._input_type.check_samples(self, X, y, **options)
    if reset:
        self._input_type = self._input_type.seen(X)
    return X, y


def new_data(
    self: Any, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None
) -> TrainingData:
    """Return new samples, validated, cast and encoded for the fitted network."""
    inputs, targets = self._check_samples(X, y, reset=False)
    if is_opaque(inputs):  # arrays were already checked against the training data
        with naming(X="X"):
            check_applicable(self.estimator_, inputs)
    return weighted_data(self._targets, inputs, targets, sample_weight)


# ---------------------------------------------------------------------- conformal
def conformalize(
    self: Any,
    X: Inputs,
    y: ArrayLike,
    *,
    cv: Any = None,
    groups: ArrayLike | None = None,
) -> Any:
    """Calibrate conformal intervals and sets, which have guaranteed coverage.

    With ``method="conformal"``, `predict_interval` and `predict_set` use the conformity
    scores of X. Predictions by other methods do not change. `fit`, `partial_fit`,
    `tune` and `recalibrate` remove the conformity scores. Call `conformalize` again
    afterwards, and after changing parameters that affect predictions.

    Parameters
    ----------
    X : array-like of shape (n, ...), dict of arrays, or torch Dataset
        With ``cv=None``, samples that were not used for training or tuning. With folds,
        all available samples, including the training samples.
    y : array-like of shape (n,) or (n, n_outputs)
        Targets of the samples.
    cv : int, splitter, iterable or None, default=None
        If None, use the fitted model (split conformal prediction). Otherwise, one clone
        per fold is trained on the other folds (CV+), so that all samples can be used
        for training. With an integer, copies of a sample, and all samples of a group,
        are kept in the same fold. Clones are fitted only to X, y and groups, without
        sample weights or other arguments of ``fit``.
    groups : array-like of shape (n,), optional
        Group labels of the samples. The guarantee then holds for samples of new groups.
        All groups have the same weight, so the number of groups limits the coverage.

    Returns
    -------
    object
        The estimator.

    Raises
    ------
    ValueError
        If a network is frozen and ``cv`` is not None, if folds do not hold out each
        sample exactly once, if folds split groups, or if a sample has several labels.

    See Also
    --------
    fit : Fit the model, with held-out samples for tuning.

    Notes
    -----
    For samples that are exchangeable with the calibration samples, an interval or set
    contains the target with a probability of at least ``coverage``, on average over
    calibration samples. With ``cv`` and folds of equal size, the guaranteed probability
    is ``2 * coverage - 1 - √(2/n)``, and the actual probability is usually close to
    ``coverage``. There is no guarantee for specific inputs or groups, or if the
    distribution of the data shifts. Only the method ``"joint"`` guarantees the coverage
    of several outputs at once.

    The conformity score of a real-valued target is its distance from the mean in
    predictive standard deviations. If the noise depends on the inputs, the score is the
    absolute normal score under the predictive distribution. The conformity score of a
    label is one minus its probability. Calibration requires one prediction for X, or
    one fit per fold.

    References
    ----------
    Chernozhukov, Wüthrich and Zhu (2021), "Distributional conformal prediction";
    Sadinle, Lei and Wasserman (2019), "Least ambiguous set-valued classifiers with
    bounded error levels"; Barber, Candès, Ramdas and Tibshirani (2021), "Predictive
    inference with the jackknife+" (CV+); Lee, Barber and Willett (2023),
    "Distribution-free inference with hierarchical data" (groups).

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LaplaceClassifier(random_state=0).fit(X[::2], y[::2])
    >>> model = model.conformalize(X[1::2], y[1::2])
    >>> model.predict_set(X[[0, 77]], q=0.1, method="conformal").sum(axis=1)
    array([1, 1])
    """
    check_is_fitted(self)
    settings = _predicting(self)
    if is_classifier(self) and not self._targets.target_type.is_single:
        raise ValueError(
            "conformalize needs one label per row. Fit one estimator per label."
        )
    if groups is None and self._has_groups:
        warn_user(
            "fit received groups, but conformalize did not, so the coverage holds for "
            "the groups of X only. Pass groups=."
        )
    if cv is None:
        scores = [self._conformity(self, X, y)]
        labels = as_groups(groups, len(scores[0]))
        parts = None if labels is None else [labels]
        self._conformal = Conformal.of([], scores, settings, parts)
        return self
    if is_frozen(self.estimator):
        raise ValueError(
            "cv trains the network on folds, but this network is frozen. Use cv=None, "
            "with rows that the network was not trained on."
        )
    inputs, labels = self._check_samples(X, y, reset=False)
    codes = self._targets.encode(labels)
    data = TrainingData(inputs, codes, None, as_groups(groups, len(codes)))
    given, models, scores = replace(data, X=X, y=labels), [], []
    folds = folds_of(data, y, cv, self._seed, self._targets.stratify)
    for seen, held_out in folds:
        part, rest = select(given, seen), select(given, held_out)
        models.append(clone(self))
        with reported(models[-1]):
            models[-1]._fit(Samples(**vars(part), is_part=True))
        scores.append(self._conformity(models[-1], rest.X, rest.y))
    parts = None if data.groups is None else [data.groups[test] for _, test in folds]
    self._conformal = Conformal.of(models, scores, settings, parts)
    return self


def calibrated(self: Any) -> Conformal:
    """Return the conformity scores, or raise ValueError if there are none."""
    check_is_fitted(self)
    found = cast(Conformal | None, self._conformal)
    if found is None or found.settings != _predicting(self):
        raise ValueError(
            "method='conformal' needs conformity scores for these predictions. Call "
            "conformalize first, with rows that were not used for training or tuning."
        )
    return found


def _predicting(self: Any) -> dict[str, Any]:
    """Return the values of parameters that affect predictions."""
    names = {*_PREDICTING} - {"batch_size", "n_jobs"}
    return {name: getattr(self, name) for name in names if hasattr(self, name)}


# --------------------------------------------------------------------- persistence
# version of the file format, increased if older versions cannot read newer files
FORMAT = 1
_FORMAT = "_sklaplace_format"
# parameters of earlier versions, which files may contain
_REMOVED = {"distributed"}


def reduce_ex(self: object, protocol: object) -> Any:
    """Pickle the estimator with its tensors on the CPU; skorch pickles the networks."""
    state = _to_store(worker_state(vars(self), _SENT_APART))
    state = moved_entries(state, _WITH_TENSORS, "cpu")
    return pickled(self, state, _new, type(self), FORMAT)


def _new(kind: type, version: int) -> Any:
    """Check the version, and return an empty estimator to load the state into."""
    _check_version(version)
    made: Any = object.__new__(kind)
    vars(made)[_FORMAT] = version  # until `setstate`, which skops calls without it
    return made


def _check_version(version: int) -> None:
    """Raise ValueError if a newer version of this package wrote the file."""
    if version > FORMAT:
        raise ValueError(
            f"The file has format {version}, from a newer version of sklaplace. This "
            f"version reads formats up to {FORMAT}. Update sklaplace."
        )


def getstate(self: object) -> dict[str, Any]:
    """Return the state without tensors, for skops; see `to_portable`."""
    return {**to_portable(_to_store(vars(self))), _FORMAT: FORMAT}


def _to_store(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state, without the copy of a frozen network if it is unchanged."""
    estimator, fitted = state.get("estimator"), state.get("estimator_")
    if fitted is None or not is_frozen(estimator):
        return state
    original = getattr(inner_net(estimator), "module_", None)
    try:
        is_copy = fingerprint(fitted.module_) == fingerprint(original)
    except Exception:  # code without source, such as a lambda
        return state
    return {**state, "estimator_": None} if is_copy else state


def setstate(self: Any, state: dict[str, Any]) -> None:
    """Restore the state, with tensors on the network's device.

    Results in the folder ``memory`` are unpickled. skops asks whether to trust a
    `joblib.Memory`, but not about a path, which is not taken from a skops file.

    Raises
    ------
    ValueError
        If a newer version of this package wrote the state.
    """
    _check_version(state.get(_FORMAT, FORMAT))
    is_pickle = _FORMAT in vars(self)
    vars(self).update(from_portable(state))
    for name in {_FORMAT, *_REMOVED}.difference(type(self)._get_param_names()):
        vars(self).pop(name, None)
    if isinstance(vars(self).get("memory"), str | PathLike) and not is_pickle:
        self.memory = None
    if "estimator_" in vars(self):
        if self.estimator_ is None:
            self.estimator_ = copied(inner_net(self.estimator))
        device = device_of(vars(self)["estimator_"])
        vars(self).update(moved_entries(vars(self), _WITH_TENSORS, device))


# ------------------------------------------------------------------------- display
# fitted attributes in the summary, with their names in the summary
_SHOWN = {"elbo_": "ELBO", "kl_": "KL", "best_score_": "score", "n_splits_": "folds"}
# fitted attributes that the table in a notebook does not show
_INTERNAL = {"network_spec_"}


def summary(self: Any) -> str:
    """Return a one-line summary of the fit and of the prediction settings."""
    check_settings(self)
    likelihood = self.network_spec_.likelihood
    parts = [*self._fit_summary(), f"{type(likelihood).__name__} likelihood"]
    if likelihood.has_noise:
        low, high = np.min(self.sigma_noise_), np.max(self.sigma_noise_)
        shown = f"{low:.3g} to {high:.3g}" if high > low else f"{low:.3g}"
        parts.append(f"sigma_noise {shown}")
    if getattr(self, "pred_type", "glm") != "glm":
        parts.append(f"pred_type {self.pred_type}")
    elif hasattr(self, "_link_name"):
        parts.append(f"link_approx {self._link_name()}")
    for name, shown in _SHOWN.items():
        if hasattr(self, name):
            parts.append(f"{shown} {getattr(self, name):.4g}")
    return ", ".join(parts)


@available_if(lambda self: hasattr(self, "estimator_"))  # type: ignore[untyped-decorator]
def visual_block(self: Any) -> Any:
    """Return the diagram of a fitted estimator for notebooks, with its summary.

    Unfitted estimators have scikit-learn's default diagram.
    """
    from sklearn.utils._repr_html.estimator import _VisualBlock

    try:
        caption = self._summary()
    except ValueError:  # a parameter set after fit is invalid; predictions will raise
        caption = None
    name = type(self).__name__
    return _VisualBlock(
        "single", self, names=name, name_details=str(self), name_caption=caption
    )


def fitted_attributes(self: object, doc_link: str = "") -> Any:
    """Return scikit-learn's table of fitted attributes, without misleading attributes.

    If the prior was not chosen by the evidence and the weights were not refitted, the
    evidence says little about the model.
    """
    table = _TABLE(self, doc_link)
    hidden = set(_INTERNAL)
    if hasattr(self, "_options") and self._options.tuner != "marglik":
        hidden.add("log_marginal_likelihood_value_")
    for name in hidden & table.keys():
        del table[name]
    return table


# older versions of scikit-learn lack this attribute and do not call our function
_TABLE: Any = getattr(BaseEstimator, "_get_fitted_attr_html", None)
