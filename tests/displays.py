"""A registry of displays, with estimators, samples and options to draw each display."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from sklearn.datasets import load_iris, make_moons, make_multilabel_classification
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import BayesianRidge, LogisticRegression

from sklaplace import LaplaceClassifier, LaplaceRegressor

# fixed, so that no networks are trained on folds
FIXED = {"prior_precision": 1.0, "random_state": 0}
MOONS = make_moons(60, noise=0.2, random_state=0)
IRIS = load_iris(return_X_y=True)
X = np.random.default_rng(0).uniform(-1, 1, (60, 1))
LINE = X, np.sin(2 * X[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=60)
SEVERAL = GaussianProcessRegressor(alpha=0.1).fit(X, np.c_[LINE[1], LINE[1]])
LABELS = make_multilabel_classification(60, 2, n_classes=2, n_labels=1, random_state=0)
COARSE = {"grid_resolution": 5}


@cache
def laplace(data):
    model = LaplaceClassifier(hessian_structure="diag", **FIXED)
    return model.fit(*{"moons": MOONS, "iris": IRIS, "labels": LABELS}[data])


@cache
def laplace_regressor():
    model = LaplaceRegressor(sigma_noise=0.1, residual="none", **FIXED)
    return model.fit(*LINE)


@cache
def logistic():
    return LogisticRegression().fit(*MOONS)


@cache
def ridge():
    return BayesianRidge().fit(*LINE)


@dataclass
class Case:
    """Arguments for creating a display.

    Attributes
    ----------
    estimator : callable
        Returns the fitted estimator.
    samples : tuple
        Other positional arguments of ``from_estimator``.
    styles : dict
        Keywords for matplotlib, and the attributes of the artists that they style.
    options : dict
        Keywords of ``from_estimator``.
    predict : callable, default=None
        Maps estimator and samples to arguments and keywords of ``from_predictions``.
    """

    estimator: Any
    samples: tuple[Any, ...]
    styles: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    predict: Any = None


CASES = {
    "ConfidenceDisplay": Case(
        logistic,
        MOONS[:1],
        {"surface_kw": "surface_", "boundary_kw": "boundaries_"},
        COARSE,
    ),
    "DirichletDisplay": Case(
        lambda: laplace("iris"),
        (IRIS[0][70:71],),
        {"surface_kw": "surface_", "point_kw": "mean_"},
        COARSE,
        lambda model, X: ([model.predict_dirichlet(X)[0]], {}),
    ),
    "NoveltyDisplay": Case(
        lambda: laplace("moons"),
        (MOONS[0], MOONS[0] + 3),
        {"hist_kw": "histograms_", "line_kw": "roc_"},
        {},
        lambda model, *samples: (map(model.score_samples, samples), {}),
    ),
    "PredictiveBandDisplay": Case(
        ridge,
        LINE,
        {"line_kw": "line_", "band_kw": "bands_", "points_kw": "points_"},
        COARSE,
    ),
    "PriorPathDisplay": Case(
        lambda: laplace("moons"),
        (),
        {"evidence_kw": "evidence_line_"},
        {"prior_precisions": [0.1, 1.0, 10.0]},
    ),
    "RegressionCalibrationDisplay": Case(
        ridge,
        LINE,
        {"line_kw": "line_"},
        {"kind": "quantile", "sample_weight": np.arange(60)},
        lambda model, X, y: ((y, *model.predict(X, return_std=True)), {}),
    ),
    "ReliabilityDisplay": Case(
        logistic,
        MOONS,
        {"line_kw": "lines_", "bar_kw": "bars_"},
        {"kind": "per_class", "n_bins": 5},
        lambda model, X, y: ((y, model.predict_proba(X)), {}),
    ),
    "RiskCoverageDisplay": Case(
        logistic,
        MOONS,
        {"line_kw": "line_"},
        {"sample_weight": np.arange(60)},
        lambda model, X, y: (
            (model.predict(X) != y, model.predict_proba(X).max(axis=1)),
            {"loss_name": "error"},
        ),
    ),
    "UncertaintyDisplay": Case(
        lambda: laplace("moons"), MOONS[:1], {"surface_kw": "surfaces_"}, COARSE
    ),
    "WeightPosteriorDisplay": Case(
        lambda: laplace("moons"), (), {"density_kw": "densities_"}, {"weights": [0, 3]}
    ),
}
