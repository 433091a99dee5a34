"""NetEstimator: parameters, samples, conformal scores and files of all estimators."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import isfunction, unwrap
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.random import RandomState
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.utils._param_validation import validate_parameter_constraints
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from sklaplace.core import progress
from sklaplace.core.budget import moved_entries
from sklaplace.core.cache import fingerprint
from sklaplace.core.checks import naming, warn_user
from sklaplace.core.parallel import one_thread
from sklaplace.core.serialise import from_portable, to_portable
from sklaplace.core.trees import Inputs
from sklaplace.data.dataset import TrainingData, count_rows, is_opaque
from sklaplace.estimators.options.constraints import (
    COUNT,
    DeclaredConstraints,
    Number,
    option,
)
from sklaplace.estimators.options.given_net import check_net, inner_net, is_frozen
from sklaplace.estimators.options.laplace import check_likelihood, sibling
from sklaplace.estimators.predicting.conformal import Conformal, folds_of, parts_of
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.estimators.targets.base import Targets
from sklaplace.estimators.training.samples import (
    InputForm,
    Samples,
    as_groups,
    as_weights,
    check_loader,
    select,
    select_inputs,
    warn_of_other_ranges,
    warn_of_seen_groups,
    weighted_data,
)
from sklaplace.estimators.training.trainer import Trainer, check_applicable
from sklaplace.networks.trained import device_of
from sklaplace.networks.training import copied

T = TypeVar("T", bound=Trainer)

# fitted attributes that contain tensors
_WITH_TENSORS = "posterior_", "network_spec_", "_novelty"
# parameters that only affect predictions, and can change after fit
_PREDICTING = (
    *("pred_type", "n_samples", "batch_size", "n_jobs", "residual"),
    *("link_approx", "dirichlet_approx"),
)
# attribute of estimators between `Unpickled` and ``__setstate__``
_UNPICKLED = "_is_unpickled"
# fitted attributes in the summary, with their names in the summary
_SHOWN = {"elbo_": "ELBO", "kl_": "KL", "best_score_": "score", "n_splits_": "folds"}


class Unpickled:
    """An estimator of a pickle, before its state is restored.

    Only pickle, which runs the code that a file names, creates this class.
    """

    def __new__(cls, kind: type) -> Any:
        """Return an estimator of the given class, without attributes."""
        estimator: Any = object.__new__(kind)
        vars(estimator)[_UNPICKLED] = True
        return estimator


def without_class(kind: type) -> type:
    """Leave a base class, which users do not know, out of Python's error messages.

    Messages about wrong arguments start with a method's ``__qualname__``.
    """
    for name, member in vars(kind).items():
        if isfunction(member) and not name.startswith("_"):
            unwrap(member).__qualname__ = name
    return kind


def _as_labels(
    groups: ArrayLike | None, categories: ArrayLike | None, n: int
) -> list[np.ndarray | None]:
    """Return the group labels and the categories of n samples."""
    return [as_groups(groups, n), as_groups(categories, n, "categories")]


@without_class
@dataclass(eq=False, repr=False, kw_only=True)
class NetEstimator(BaseEstimator, ABC):
    """Base class of all estimators: a skorch net with a distribution of its outputs.

    Subclasses implement `_fit` and `_outputs`.
    """

    estimator: Any = field(default=None, kw_only=False)
    likelihood: Any = None
    batch_size: int | None = option(None, COUNT, None)
    random_state: Any = option(
        None, Number(Integral, 0, 2**32 - 1, closed="both"), RandomState, None
    )
    verbose: int = option(0, "verbose")

    _parameter_constraints: ClassVar[Any] = DeclaredConstraints()
    if TYPE_CHECKING:  # set by subclasses and by fit
        _targets_kind: ClassVar[type[Targets]]
        _targets: Any
        _input_type: InputForm
        _seed: int
        estimator_: Any
        network_spec_: Any

    # scikit-learn's diagram of an estimator links to its page
    _doc_link_module = "sklaplace"
    _doc_link_template = (
        "https://sklaplace.readthedocs.io/en/stable/generated/sklaplace.{name}.html"
    )

    def _doc_link_url_param_generator(self) -> dict[str, str]:
        return {"name": type(self).__name__}

    # conformity scores, removed by methods that change predictions
    _conformal = cast(Conformal | None, None)
    _has_groups = False

    @abstractmethod
    def _fit(self, samples: Samples) -> Any:
        """Fit to samples as passed by the user, and return the estimator."""

    @abstractmethod
    def _fit_summary(self) -> list[str]:
        """Return the parts of the summary that describe the fit."""

    @abstractmethod
    def _outputs(self) -> BatchedOutputs:
        """Distribution of the fitted network's outputs."""

    @abstractmethod
    def _infer_targets(self, y: Any, samples: Samples) -> Any:
        """Return the kind, shape and units of the targets in ``fit``, and store it."""

    @abstractmethod
    def _conformity(self, model: Any, X: Inputs, y: Any) -> np.ndarray:
        """Return conformity scores (n, c), which are larger for less likely targets."""

    # -------------------------------------------------------------- parameters
    def set_params(self, **params: Any) -> Any:
        """Set parameters of the estimator, and of its net by ``estimator__name``.

        Searches such as `GridSearchCV` set parameters by this method.

        Parameters
        ----------
        **params : dict
            New values of the parameters.

        Returns
        -------
        object
            The estimator.

        Raises
        ------
        ValueError
            If a parameter is unknown, or if it belongs to a net but ``estimator`` is
            None.

        See Also
        --------
        fit : Train the network with these parameters.

        Examples
        --------
        >>> from sklaplace import LaplaceClassifier
        >>> LaplaceClassifier().set_params(prior_precision=1.0).prior_precision
        1.0
        """
        of_net = [name for name in params if name.startswith("estimator__")]
        if of_net and params.get("estimator", self.estimator) is None:
            example = self._targets_kind.example_net.format("Module")
            raise ValueError(
                f"{of_net[0]} is a parameter of a net, but estimator=None. The default "
                "network derives its size and training from the number of samples. To "
                f"set or search them, pass a net as estimator, such as {example}."
            )
        return super().set_params(**params)

    # --------------------------------------------------------------------- fit
    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report progress and a summary; restore all attributes after an error.

        Conformity scores are removed, because they refer to the earlier predictions.
        The default network gains nothing from several threads, and uses one.
        """
        # ``estimator`` is None for the default network
        thread_limit = one_thread() if self.estimator is None else nullcontext()
        attributes = dict(self.__dict__)
        self.__dict__.pop("_conformal", None)
        with progress.reporting(type(self).__name__, self.verbose), thread_limit:
            try:
                yield
            except BaseException:  # also Ctrl-C
                self.__dict__.clear()
                self.__dict__.update(attributes)
                raise
            if self.verbose:
                progress.line(self._summary())

    def _check_parameters(self) -> None:
        """Raise an error for invalid parameters.

        ``sibling`` is the estimator for the other kind of targets, which messages
        suggest.
        """
        self._validate_params()  # scikit-learn's check against the constraints
        check_net(self.estimator, self._targets_kind.example_net)
        alternative = sibling(type(self).__name__, is_classifier(self))
        check_likelihood(self.likelihood, is_classifier(self), alternative)

    def _check_settings(self) -> None:
        """Raise an error for invalid parameters that affect predictions."""
        # each estimator has only some of these parameters
        names = [name for name in _PREDICTING if hasattr(self, name)]
        values = {name: getattr(self, name) for name in names}
        validate_parameter_constraints(
            self._parameter_constraints, values, type(self).__name__
        )

    def _new_trainer(
        self, kind: type[T], validation_fraction: float | None, **options: Any
    ) -> T:
        """Return a trainer of the given class with the parameters of this estimator.

        ``options`` are further arguments of the class. ``validation_fraction`` is None
        if nothing is tuned on held-out samples.
        """
        return kind(
            estimator=self.estimator,
            targets=self._targets,
            likelihood=self.likelihood,
            seed=self._seed,
            validation_fraction=validation_fraction,
            # the estimator for the other kind of targets, which messages suggest
            alternative=sibling(type(self).__name__, is_classifier(self)),
            **options,
        )

    # ----------------------------------------------------------------- samples
    def _encode(self, samples: Samples) -> TrainingData:
        """Return the checked and encoded samples of ``fit``, including any ``X_val``.

        Store the format of the inputs and the encoding of the targets, which later
        samples must match. Later errors refer to X and y, or to X_val and y_val, by the
        names passed to `naming`.
        """
        self._input_type = InputForm.of(inner_net(self.estimator), samples.X)
        samples.check_held_out()
        check_loader(samples.X)
        if samples.y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is "
                "None. For a torch Dataset of pairs, pass all targets as an array: "
                "fit(dataset, [y for _, y in dataset])."
            )
        X, y = self._check_samples(samples.X, samples.y, reset=True)
        weights = as_weights(samples.sample_weight, y.shape[0])
        # the encoding depends on the weights: they weight the mean of normalised y
        samples = replace(samples, sample_weight=weights)
        with naming(y="y"):
            targets = self._infer_targets(y, samples)
        groups = as_groups(samples.groups, y.shape[0])
        self._has_groups = groups is not None
        data = weighted_data(targets, X, y, weights, groups)
        data = replace(data, fit_params=samples.fit_params)
        if samples.X_val is None:
            return data
        with naming(X="X_val", y="y_val"):
            X, y = self._check_samples(samples.X_val, samples.y_val, reset=False)
            groups_val = as_groups(samples.groups_val, y.shape[0], "groups_val")
            # there is no parameter for weights of these samples
            validation = weighted_data(targets, X, y, None, groups_val, name="y_val")
        # a frozen network may have been trained on other rows than X
        if samples.X_val is samples.X and not is_frozen(self.estimator):
            raise ValueError(
                "X_val is X, so fit would tune on the rows that the network is trained "
                "on. Pass other rows. Without X_val, fit holds out rows of X itself."
            )
        warn_of_other_ranges(data.X, validation.X)
        warn_of_seen_groups(data.groups, groups_val)
        return replace(data, validation=validation)

    def _check_samples(
        self, X: Inputs, y: ArrayLike, *, reset: bool
    ) -> tuple[Any, Any]:
        """Return validated and cast inputs, and validated targets.

        With ``reset``, store the features of the inputs (number, names, keys or axes).
        Otherwise, raise an error if the inputs do not match those of ``fit``.
        """
        X, y = self._input_type.check_samples(
            self, X, y, reset=reset, allow_nd=is_classifier(self)
        )
        if reset:
            # a form that also knows the keys or axes of X
            self._input_type = self._input_type.seen(X)
        return X, y

    def _check_inputs(self, X: Inputs) -> Any:
        """Return validated and cast inputs for prediction."""
        check_is_fitted(self)
        return self._input_type.check_inputs(self, X, net=self.estimator_)

    def _new_data(
        self, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None
    ) -> TrainingData:
        """Return new samples, validated, cast and encoded for the fitted network."""
        inputs, targets = self._check_samples(X, y, reset=False)
        if is_opaque(inputs):  # arrays were already checked against the training data
            with naming(X="X"):
                check_applicable(self.estimator_, inputs)
        weights = as_weights(sample_weight, targets.shape[0])
        return weighted_data(self._targets, inputs, targets, weights)

    # --------------------------------------------------------------- conformal
    def conformalize(
        self,
        X: Inputs,
        y: ArrayLike,
        *,
        cv: Any = None,
        groups: ArrayLike | None = None,
        categories: ArrayLike | None = None,
    ) -> Any:
        """Calibrate conformal intervals and sets, which have guaranteed coverage.

        With ``method="conformal"``, `predict_interval` and `predict_set` use the
        conformity scores of X. Predictions by other methods do not change. `fit`,
        `partial_fit`, `tune` and `recalibrate` remove the conformity scores. Call
        `conformalize` again afterwards, and after changing parameters that affect
        predictions.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            With ``cv=None``, samples that were not used for training or tuning. With
            folds, all available samples, including the training samples.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets of the samples.
        cv : int, splitter, iterable or None, default=None
            If None, use the fitted model (split conformal prediction). Otherwise, one
            clone per fold is trained on the other folds (CV+), so that all samples can
            be used for training. With an integer, copies of a sample, and all samples
            of a group, are kept in the same fold. Clones are fitted only to X, y and
            groups, without sample weights or other arguments of ``fit``.
        groups : array-like of shape (n,), optional
            Group labels of the samples. The guarantee then holds for samples of new
            groups. All groups have the same weight, so the number of groups limits the
            coverage.
        categories : array-like of shape (n,), optional
            Labels of categories, such as sites, sexes or ranges of age. The guarantee
            then holds within each category, instead of on average. Conformal
            predictions require the categories of the new samples, which must be among
            these. The number of samples of a category limits the coverage.

        Returns
        -------
        object
            The estimator.

        Raises
        ------
        ValueError
            If a network is frozen and ``cv`` is not None, if folds do not hold out each
            sample exactly once, if folds split groups, or if a sample has several
            labels.

        See Also
        --------
        fit : Fit the model, with held-out samples for tuning.

        Notes
        -----
        For samples that are exchangeable with the calibration samples, an interval or
        set contains the target with a probability of at least ``coverage``, on average
        over calibration samples. With ``cv`` and folds of equal size, the guaranteed
        probability is ``2 * coverage - 1 - √(2/n)``, and the actual probability is
        usually close to ``coverage``. With ``categories``, all this holds within each
        category, with n as its number of samples. There is no guarantee for specific
        inputs, or if the distribution of the data shifts. Only the method ``"joint"``
        guarantees the coverage of several outputs at once.

        The conformity score of a real-valued target is its distance from the mean in
        predictive standard deviations. If the noise depends on the inputs, the score is
        the absolute normal score under the predictive distribution. The conformity
        score of a label is one minus its probability. Calibration requires one
        prediction for X, or one fit per fold.

        References
        ----------
        Chernozhukov, Wüthrich and Zhu (2021), "Distributional conformal prediction";
        Sadinle, Lei and Wasserman (2019), "Least ambiguous set-valued classifiers with
        bounded error levels"; Barber, Candès, Ramdas and Tibshirani (2021), "Predictive
        inference with the jackknife+" (CV+); Lee, Barber and Willett (2023),
        "Distribution-free inference with hierarchical data" (groups); Vovk, Lindsay,
        Nouretdinov and Gammerman (2003), "Mondrian confidence machine" (categories).

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
        settings = self._prediction_settings()
        if is_classifier(self) and not self._targets.target_type.is_single:
            raise ValueError(
                "conformalize needs one label per row. Fit one estimator per label."
            )
        if groups is None and self._has_groups:
            warn_user(
                "fit received groups, but conformalize did not, so the coverage holds "
                "for the groups of X only. Pass groups=."
            )
        if cv is None:
            scores = self._conformity(self, X, y)
            labels = _as_labels(groups, categories, len(scores))
            labels_of_models = [parts_of(each, [slice(None)]) for each in labels]
            # no models of folds: the estimator itself predicts
            self._conformal = Conformal.of([], [scores], settings, *labels_of_models)
            return self
        if is_frozen(self.estimator):
            raise ValueError(
                "cv trains the network on folds, but this network is frozen. Use "
                "cv=None, with rows that the network was not trained on."
            )
        inputs, targets = self._check_samples(X, y, reset=False)
        encoded = self._targets.encode(targets)
        # encoded samples show which rows are copies; clones encode the given rows anew
        labels = _as_labels(groups, categories, len(encoded))
        data = TrainingData(inputs, encoded, None, labels[0])
        rows = replace(data, X=X, y=targets)
        folds = folds_of(data, y, cv, self._seed, self._targets.stratify)
        # CV+: a clone for each fold scores the samples that it was not trained on; both
        # lists have one entry per fold
        models, fold_scores = [], []
        for train, held_out in folds:
            model = clone(self)
            with model._reported():
                seen = select(rows, train)
                # a part of several fits, so Ctrl-C ends them all
                model._fit(Samples(seen.X, seen.y, groups=seen.groups, is_part=True))
            scored = select(rows, held_out)
            fold_scores.append(self._conformity(model, scored.X, scored.y))
            models.append(model)
        held_out_rows = [held_out for _, held_out in folds]
        labels_of_models = [parts_of(each, held_out_rows) for each in labels]
        self._conformal = Conformal.of(models, fold_scores, settings, *labels_of_models)
        return self

    def _calibrated(self) -> Conformal:
        """Return the conformity scores for the current settings of predictions.

        Raise ValueError if there are none, or if the settings have changed since.
        """
        check_is_fitted(self)
        conformal = self._conformal
        if conformal is None or conformal.settings != self._prediction_settings():
            raise ValueError(
                "method='conformal' needs conformity scores for these predictions. "
                "Call conformalize first, with rows that were not used for training or "
                "tuning."
            )
        return conformal

    def _predict_conformal(
        self,
        X: Inputs,
        categories: ArrayLike | None,
        predict: Callable[[Conformal, Inputs], np.ndarray],
    ) -> np.ndarray:
        """Return conformal predictions (n, ...), for each category separately.

        ``predict`` maps conformity scores and samples to predictions.
        """
        conformal = self._calibrated()
        if categories is None and conformal.categories is None:
            return predict(conformal, X)
        labels = as_groups(categories, count_rows(X), "categories")
        scores, rows = zip(*conformal.by_category(labels), strict=True)
        samples = [select_inputs(X, indices) for indices in rows]
        predictions = np.concatenate([*map(predict, scores, samples)])
        return predictions[np.argsort(np.concatenate(rows))]

    def _prediction_settings(self) -> dict[str, Any]:
        """Return the values of parameters that affect predictions."""
        # these two affect the speed and memory of predictions, but not their values
        names = {*_PREDICTING} - {"batch_size", "n_jobs"}
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    # ------------------------------------------------------------------- files
    def __reduce_ex__(self, protocol: object) -> Any:
        """Return what pickle stores: a constructor, its arguments and the state.

        Unlike `__getstate__`, which skops uses, the state contains tensors, on the CPU
        for machines without a GPU. skorch pickles the nets.
        """
        # a user's subclass decides itself what to store
        if type(self).__getstate__ is not NetEstimator.__getstate__:
            return Unpickled, (type(self),), self.__getstate__()
        state = self._to_store(self.__dict__)
        state = moved_entries(state, _WITH_TENSORS, "cpu")
        return Unpickled, (type(self),), state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tensors, for skops; see `to_portable`."""
        return to_portable(self._to_store(self.__dict__))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, with tensors on the network's device.

        This is the inverse of `__reduce_ex__` for pickle, and of `__getstate__` for
        skops. Results in the folder ``memory`` are unpickled. skops asks whether to
        trust a `joblib.Memory`, but not about a path, which is not taken from a skops
        file.
        """
        is_pickle = self.__dict__.pop(_UNPICKLED, False)  # set by `Unpickled`
        self.__dict__.update(from_portable(state))
        if not is_pickle and isinstance(self.__dict__.get("memory"), str | PathLike):
            self.__dict__["memory"] = None
        if "estimator_" in self.__dict__:
            if self.estimator_ is None:  # the unchanged copy of a frozen net
                self.estimator_ = copied(inner_net(self.estimator))
            device = device_of(self.estimator_)
            self.__dict__.update(moved_entries(self.__dict__, _WITH_TENSORS, device))

    @staticmethod
    def _to_store(state: dict[str, Any]) -> dict[str, Any]:
        """Return the state, without the copy of a frozen net if it is unchanged.

        The fitted net ``estimator_`` is a copy of the frozen net ``estimator``. If both
        modules have the same fingerprint, ``estimator_`` becomes None, and
        `__setstate__` copies the frozen net again.
        """
        estimator, fitted = state.get("estimator"), state.get("estimator_")
        if fitted is None or not is_frozen(estimator):
            return state
        original = getattr(inner_net(estimator), "module_", None)
        try:
            is_copy = fingerprint(fitted.module_) == fingerprint(original)
        except Exception:  # no fingerprint: code without source, such as a lambda
            return state
        return {**state, "estimator_": None} if is_copy else state

    # ----------------------------------------------------------------- display
    def _summary(self) -> str:
        """Return a one-line summary of the fit and of the prediction settings."""
        self._check_settings()
        likelihood = self.network_spec_.likelihood
        phrases = [*self._fit_summary(), f"{type(likelihood).__name__} likelihood"]
        if likelihood.has_noise:
            low, high = np.min(self.sigma_noise_), np.max(self.sigma_noise_)
            levels = f"{low:.3g} to {high:.3g}" if high > low else f"{low:.3g}"
            phrases.append(f"sigma_noise {levels}")
        if getattr(self, "pred_type", "glm") != "glm":
            phrases.append(f"pred_type {self.pred_type}")
        elif hasattr(self, "_link_name"):  # a classifier
            phrases.append(f"link_approx {self._link_name()}")
        for name, label in _SHOWN.items():
            if hasattr(self, name):
                phrases.append(f"{label} {getattr(self, name):.4g}")
        return ", ".join(phrases)

    @available_if(lambda self: hasattr(self, "estimator_"))  # type: ignore[untyped-decorator]
    def _sk_visual_block_(self) -> Any:
        """Return the diagram of a fitted estimator for notebooks, with its summary.

        Unfitted estimators have scikit-learn's default diagram.
        """
        # private, and needed only in notebooks
        from sklearn.utils._repr_html.estimator import _VisualBlock

        try:
            caption = self._summary()
        except ValueError:  # a parameter set after fit is invalid; predictions raise
            caption = None
        name = type(self).__name__
        return _VisualBlock(
            "single", self, names=name, name_details=str(self), name_caption=caption
        )

    # older versions of scikit-learn do not call this method
    def _get_fitted_attr_html(self, doc_link: str = "") -> Any:
        """Return scikit-learn's table of fitted attributes for notebooks."""
        table = super()._get_fitted_attr_html(doc_link)
        # an internal object without information for users
        table.pop("network_spec_", None)
        return table
