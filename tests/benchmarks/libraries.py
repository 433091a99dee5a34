"""Matching operations of plain torch, sklaplace and laplace-torch.

An operation is a pair of functions. The first function makes a fresh argument for each
call and is not timed; the second function is timed. Earlier steps, such as the fit
before a prediction, run while the pair is made.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from benchmarks.workloads import Workload, comparable, digits_data, digits_net, workload
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sklaplace import LaplaceClassifier, LaplaceClassifierCV, LaplaceRegressor
from sklaplace.posterior.tuning.evidence import marglik

Operation = tuple[Callable[[], Any], Callable[[Any], Any]]
PRIOR_PRECISIONS = np.logspace(-3, 3, 20)
BACKENDS = "BackPackGGN", "AsdlGGN", "CurvlinopsGGN"


@dataclass(frozen=True)
class Case:
    """The network and data of an operation."""

    workload: str  # key of `WORKLOADS`, or "digits"
    subset: str = "last_layer"
    structure: str = "kron"
    is_quick: bool = False  # tiny sizes

    def __str__(self) -> str:
        """Return a short name for titles and test names."""
        if self.workload == "digits":
            return self.workload
        subset = self.subset.replace("_layer", "")
        return f"{self.workload} {subset}/{self.structure}"

    def load(self) -> Workload:
        return workload(self.workload, is_quick=self.is_quick)

    def load_check(self) -> Workload:
        """Return the network and rows for comparing the variances of the libraries."""
        found = self.load()
        found = workload(self.workload, is_quick=self.is_quick or found.check_quick)
        is_kron = (self.subset, self.structure) == ("all", "kron")
        return comparable(found) if is_kron and found.is_convolutional else found


def nothing() -> None:
    """Prepare nothing."""


# ----------------------------------------------------------------------- plain torch
def of_torch(case: Case, name: str) -> Operation:
    """Return f_fit, f_predict or fb_fit: forward, or forward and backward passes.

    For digits, return train or train_folds.
    """
    if case.workload == "digits":
        return _training(case, name)
    work = case.load()
    if name == "f_predict":
        work = replace(work, n_fit=work.n_predict)
    return nothing, plain_passes(work, backward=name == "fb_fit")


def plain_passes(work: Workload, backward: bool) -> Callable[[None], None]:
    """Return forward passes over the fitted samples, and optionally backward passes."""
    module, (X, y) = work.module(), work.fit_data()
    loss = nn.MSELoss if work.is_regression else nn.CrossEntropyLoss
    if backward:
        return lambda _: _both(module, loss(reduction="sum"), work, X, y)
    return lambda _: _forward(module, work, X)


def _batches(work: Workload, *arrays: Any) -> Iterator[tuple[Tensor, ...]]:
    parts = (torch.as_tensor(values).split(work.batch_size) for values in arrays)
    return zip(*parts, strict=True)


@torch.inference_mode()
def _forward(module: nn.Module, work: Workload, X: Any) -> None:
    for (x,) in _batches(work, X):
        module(x)


def _both(module: nn.Module, loss: nn.Module, work: Workload, X: Any, y: Any) -> None:
    module.zero_grad()
    for x, target in _batches(work, X, y):
        loss(module(x), target).backward()


def _training(case: Case, name: str) -> Operation:
    (X, y), net = digits_data(), digits_net(2 if case.is_quick else 20)
    folds = [rows for rows, _ in StratifiedKFold(5).split(X, y)]
    parts = [np.arange(len(y))] if name == "train" else folds

    def train(_: None) -> None:
        for rows in parts:
            torch.manual_seed(0)
            clone(net).fit(X[rows], y[rows])

    return nothing, train


# ------------------------------------------------------------------------- sklaplace
def of_sklaplace(case: Case, name: str) -> Operation:
    """Return fit, fit_ready, predict, tune or fit_tune of a public estimator.

    For digits, return train, grid or cross_validate.
    """
    if case.workload == "digits":
        return _search(case, name)
    work = case.load()
    X, y = work.fit_data()
    if name.startswith("fit"):
        prior = "marglik" if name == "fit_tune" else 1.0
        make = partial(estimator, case, work, work.net(), prior_precision=prior)
        if name == "fit_ready":
            return make, lambda model: _factorise(model.fit(X, y))
        return make, lambda model: model.fit(X, y)
    model = estimator(case, work, work.net()).fit(X, y)
    if name == "tune":
        return nothing, lambda _: marglik(model.posterior_)
    new = work.predict_data()
    if work.is_regression:
        return nothing, lambda _: model.predict(new, return_std=True)
    return nothing, lambda _: model.predict_proba(new)


def estimator(case: Case, work: Workload, net: Any, **options: Any) -> Any:
    """An unfitted estimator around a network that keeps its weights."""
    options = {
        "subset_of_weights": case.subset,
        "hessian_structure": case.structure,
        "prior_precision": 1.0,
        "refine": False,
        "random_state": 0,
        **options,
    }
    if work.is_regression:
        return LaplaceRegressor(FrozenEstimator(net), sigma_noise=1.0, **options)
    return LaplaceClassifier(FrozenEstimator(net), link_approx="probit", **options)


def _factorise(model: Any) -> None:
    """Compute the eigenvectors, which are otherwise computed at first use."""
    for factor in chain.from_iterable(model.posterior_.structure.factors):
        factor.vectors(torch.float32)


def _search(case: Case, name: str) -> Operation:
    (X, y), net = digits_data(), digits_net(2 if case.is_quick else 20)
    model = LaplaceClassifier(net, random_state=0)
    if name == "cross_validate":
        grid = {"prior_precisions": PRIOR_PRECISIONS, "cv": 5, "refine": False}
        model = LaplaceClassifierCV(net, random_state=0, **grid)
    if name != "grid":
        return partial(clone, model), lambda fresh: fresh.fit(X, y)

    def search(_: None) -> None:
        """Search; the folds share all work that does not depend on the grid."""
        grid = {"prior_precision": PRIOR_PRECISIONS}
        options = {"cv": 5, "scoring": "neg_log_loss", "refit": False}
        with tempfile.TemporaryDirectory() as folder:
            shared = clone(model).set_params(memory=folder)
            GridSearchCV(shared, grid, **options).fit(X, y)

    return nothing, search


def our_covariances(case: Case) -> Any:
    """Return output covariances (n, c, c) for a few rows, in float64.

    They omit the residual, which laplace-torch does not have.
    """
    work = case.load_check()
    X, y = work.data(work.n_check, seed=1, dtype=np.float64)
    model = estimator(case, work, work.net(torch.float64), residual="none").fit(X, y)
    points, _ = work.data(3, seed=2, dtype=np.float64)
    return model.latent_mean_and_variance(points, full_cov=True)[1]


# --------------------------------------------------------------------- laplace-torch
def of_laplace_torch(case: Case, name: str, backend: str) -> Operation:
    """Return the operations of `of_sklaplace`; laplace-torch factorises in fit."""
    work = case.load()
    X, y = (torch.as_tensor(v[: work.peer_rows]) for v in work.fit_data())
    rows = DataLoader(TensorDataset(X, y), batch_size=work.batch_size)
    make = partial(_unfitted, case, work, work.module(), backend)
    if name in ("fit", "fit_ready"):
        return make, lambda la: la.fit(rows)
    if name == "fit_tune":
        return make, lambda la: (la.fit(rows), _tune(la))
    la = make()
    la.fit(rows)
    if name == "tune":
        return lambda: setattr(la, "prior_precision", 1.0), lambda _: _tune(la)
    points = torch.as_tensor(work.predict_data()[: work.peer_rows])
    options = {} if work.is_regression else {"link_approx": "probit"}

    def predict(_: None) -> None:
        for x in points.split(work.batch_size):
            la(x, pred_type="glm", **options)

    return nothing, predict


def _unfitted(case: Case, work: Workload, module: nn.Module, backend: str) -> Any:
    """Return an unfitted model of a network copy: backends leave hooks behind."""
    import laplace
    import laplace.curvature

    return laplace.Laplace(
        copy.deepcopy(module),
        "regression" if work.is_regression else "classification",
        subset_of_weights=case.subset,
        hessian_structure=case.structure,
        backend=getattr(laplace.curvature, backend),
    )


def _tune(la: Any) -> None:
    la.optimize_prior_precision(method="marglik")


def their_covariances(case: Case, backend: str) -> Any:
    """Return the covariances of `our_covariances` by laplace-torch."""
    work = case.load_check()
    X, y = work.data(work.n_check, seed=1, dtype=np.float64)
    la = _unfitted(case, work, work.module(torch.float64), backend)
    data = TensorDataset(torch.as_tensor(X), torch.as_tensor(y))
    la.fit(DataLoader(data, batch_size=work.batch_size))
    points, _ = work.data(3, seed=2, dtype=np.float64)
    return la._glm_predictive_distribution(torch.as_tensor(points))[1].detach().numpy()
