"""sklaplace, through its public estimators only."""

import inspect
import tempfile
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.operations import Case, NotOfferedError, Operation, nothing
from benchmarks.workloads import digits_data, digits_net
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB

import sklaplace
from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.posterior.tuning.evidence import NegativeEvidence, marglik

PRIOR_PRECISIONS = np.logspace(-3, 3, 20)
SEARCH: dict[str, Any] = {"cv": 5, "scoring": "neg_log_loss", "refit": False}


class Sklaplace:
    """Fit, predict and tune as users do."""

    versions = ("sklaplace",)

    def operation(self, case: Case, name: str) -> Operation:
        """One of fit, fit_ready, predict, tune, fit_tune, or of `DIGITS`."""
        if case.workload == "digits":
            return DIGITS[name](case)
        work = case.load()
        X, y = work.fit_data()
        if name in ("fit", "fit_ready", "fit_tune"):
            prior = "marglik" if name == "fit_tune" else 1.0
            make = partial(estimator, case, work.net(), prior_precision=prior)
            if name == "fit_ready":
                return Operation(make, lambda model: _factorise(model.fit(X, y)))
            return Operation(make, lambda model: model.fit(X, y))
        model = estimator(case, work.net()).fit(X, y)
        if name == "tune":
            return Operation(nothing, lambda _: marglik(model.posterior_))
        return Operation(nothing, partial(_predict, model, work.predict_data()))

    def moments(self, case: Case) -> Any:
        work = case.load()
        X, y = work.data(work.n_check, seed=1, dtype=np.float64)
        model = estimator(case, work.net(torch.float64)).fit(X, y)
        points, _ = work.data(3, seed=2, dtype=np.float64)
        return model.latent_mean_and_variance(points, full_cov=True)

    def evaluations(self, case: Case) -> int:
        """How often tuning asks for the evidence."""
        work = case.load()
        posterior = estimator(case, work.net()).fit(*work.fit_data()).posterior_
        original = NegativeEvidence.derivatives
        options = {"autospec": True, "side_effect": original}
        with mock.patch.object(NegativeEvidence, "derivatives", **options) as counted:
            marglik(posterior)
        return counted.call_count


def estimator(case: Case, net: Any, **options: Any) -> Any:
    """An unfitted estimator around a network that keeps its weights."""
    options = {
        "subset_of_weights": case.subset,
        "hessian_structure": case.structure,
        "prior_precision": 1.0,
        "refine": False,
        "random_state": 0,
        **options,
    }
    if case.load().is_regression:
        return LaplaceRegressor(FrozenEstimator(net), sigma_noise=1.0, **options)
    return LaplaceClassifier(FrozenEstimator(net), link_approx="probit", **options)


def _factorise(model: Any) -> None:
    """All that is made once, when a question first needs it: the eigenvectors."""
    for factor in chain.from_iterable(model.posterior_.structure.factors):
        factor.vectors(torch.float32)


def _predict(model: Any, X: Any, _: None) -> Any:
    if isinstance(model, LaplaceRegressor):
        return model.predict(X, return_std=True)
    return model.predict_proba(X)


# ---------------------------------------------------------------------- digits
def _train(case: Case) -> Operation:
    X, y = digits_data()
    net = digits_net(2 if case.is_quick else 20)
    make = partial(LaplaceClassifier, net, random_state=0)
    return Operation(make, lambda model: model.fit(X, y))


def _grid(case: Case) -> Operation:
    """A grid search whose folds share what does not depend on the grid."""
    if "memory" not in inspect.signature(LaplaceClassifier).parameters:
        raise NotOfferedError("LaplaceClassifier has no parameter memory")
    X, y = digits_data()
    net = digits_net(2 if case.is_quick else 20)

    def search(_: None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = LaplaceClassifier(net, memory=folder, random_state=0)
            grid = {"prior_precision": PRIOR_PRECISIONS}
            GridSearchCV(model, grid, **SEARCH).fit(X, y)

    return Operation(nothing, search)


def _bare_grid(case: Case) -> Operation:
    """The same search around a model that costs next to nothing: scikit-learn alone."""
    X, y = digits_data()
    grid = {"var_smoothing": 1e-9 * PRIOR_PRECISIONS}
    search = GridSearchCV(GaussianNB(), grid, **SEARCH)
    return Operation(nothing, lambda _: search.fit(X.astype(np.float64), y))


def _cross_validate(case: Case) -> Operation:
    if not hasattr(sklaplace, "LaplaceClassifierCV"):
        raise NotOfferedError("there is no LaplaceClassifierCV")
    X, y = digits_data()
    net = digits_net(2 if case.is_quick else 20)

    def fit(_: None) -> None:
        sklaplace.LaplaceClassifierCV(
            net, prior_precisions=PRIOR_PRECISIONS, cv=5, random_state=0
        ).fit(X, y)

    return Operation(nothing, fit)


DIGITS = {
    "train": _train,
    "grid": _grid,
    "bare_grid": _bare_grid,
    "cross_validate": _cross_validate,
}
