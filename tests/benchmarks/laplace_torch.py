"""laplace-torch, the yardstick and oracle; it need not be installed.

Its backends differ in speed, in what they support, and in what they get right. One
may fit and another predict, written with a plus; that is no option of laplace-torch,
but its best.
"""

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmarks.operations import Case, Operation, nothing
from benchmarks.workloads import Workload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LaplaceTorch:
    """Fit, predict and tune with one of its backends."""

    versions = ("laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch")

    def operation(self, case: Case, name: str) -> Operation:
        """One of fit, fit_ready, predict, tune, fit_tune; it factorises in fit."""
        work = case.load()
        module = work.module()
        X, y = (torch.as_tensor(v[: work.peer_rows]) for v in work.fit_data())
        rows = DataLoader(TensorDataset(X, y), batch_size=work.batch_size)
        make = partial(_unfitted, case, work, module)
        if name in ("fit", "fit_ready"):
            return Operation(make, lambda la: la.fit(rows))
        if name == "fit_tune":
            return Operation(make, lambda la: (la.fit(rows), _tune(la)))
        la = make()
        la.fit(rows)
        _use_jacobians(la, case)
        if name == "tune":
            return Operation(lambda: _reset(la), _tune)
        points = torch.as_tensor(work.predict_data()[: work.peer_rows])
        return Operation(nothing, partial(_predict, la, points, work))

    def moments(self, case: Case) -> Any:
        work = case.load()
        X, y = work.data(work.n_check, seed=1, dtype=np.float64)
        la = _unfitted(case, work, work.module(torch.float64))
        data = TensorDataset(torch.as_tensor(X), torch.as_tensor(y))
        la.fit(DataLoader(data, batch_size=work.batch_size))
        _use_jacobians(la, case)
        points, _ = work.data(3, seed=2, dtype=np.float64)
        mean, cov = la._glm_predictive_distribution(torch.as_tensor(points))
        return mean.detach().numpy(), cov.detach().numpy()


def _unfitted(case: Case, work: Workload, module: nn.Module) -> Any:
    """Around a copy of the network, since backends leave hooks behind."""
    import laplace

    return laplace.Laplace(
        copy.deepcopy(module),
        "regression" if work.is_regression else "classification",
        subset_of_weights=case.subset,
        hessian_structure=case.structure,
        backend=_backends(case)[0],
    )


def _backends(case: Case) -> list[Any]:
    """Backends for the curvature and, where there are two, for predictions."""
    import laplace.curvature

    names = (case.backend or "CurvlinopsGGN").split("+")
    return [getattr(laplace.curvature, name) for name in names]


def _use_jacobians(la: Any, case: Case) -> None:
    """Predict with another backend than the one that was right for fitting."""
    _, *others = _backends(case)
    if others:
        la._backend, la._backend_cls = None, others[0]


def _predict(la: Any, points: Any, work: Workload, _: None) -> None:
    options = {} if work.is_regression else {"link_approx": "probit"}
    for x in points.split(work.batch_size):
        la(x, pred_type="glm", **options)


def _reset(la: Any) -> Any:
    la.prior_precision = 1.0
    return la


def _tune(la: Any) -> None:
    la.optimize_prior_precision(method="marglik")
