"""Registries accept entries at run time, without a change of the package."""

import numpy as np
import pytest
import torch
from nets import classifier, seeded
from numpy.testing import assert_array_equal
from sklearn.datasets import load_iris
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier, VariationalClassifier, dirichlet
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.dirichlet.links import LINKS
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.posterior.tuning import TUNERS
from sklaplace.variational import POSTERIORS, PRIORS
from sklaplace.variational.elbo import KL_SCHEDULES

X, Y = load_iris(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype("f4")
OF_LAPLACE = {
    "hessian_structure": (STRUCTURES, "diag"),
    "curvature": (CURVATURES, "ef"),
    "subset_of_weights": (SUBSETS, "all"),
    "prior_precision": (TUNERS, "marglik"),
    "link_approx": (LINKS, "probit"),
    "dirichlet_approx": (dirichlet.APPROXIMATIONS, "bridge"),
    "pred_type": (OUTPUT_MODELS, "nn"),
}
OF_VARIATIONAL = {
    "posterior": (POSTERIORS, "gaussian"),
    "prior": (PRIORS, "gaussian"),
    "kl_schedule": (KL_SCHEDULES, "blundell"),
}


@pytest.fixture(scope="module")
def net():
    return FrozenEstimator(seeded(classifier(torch.nn.Linear(4, 3)), X, Y))


@pytest.mark.parametrize("option", OF_LAPLACE)
def test_laplace_accepts_new_entries(option, net, monkeypatch):
    registry, name = OF_LAPLACE[option]
    monkeypatch.setitem(registry, "of_a_user", registry[name])
    fixed = {"prior_precision": 1.0, "random_state": 0}
    expected, model = (
        LaplaceClassifier(net, **{**fixed, option: value}).fit(X, Y)
        for value in (name, "of_a_user")
    )
    assert_array_equal(model.predict_proba(X), expected.predict_proba(X))
    assert_array_equal(model.predict_dirichlet(X), expected.predict_dirichlet(X))


@pytest.mark.parametrize("option", OF_VARIATIONAL)
def test_bayes_by_backprop_accepts_new_entries(option, monkeypatch):
    registry, name = OF_VARIATIONAL[option]
    monkeypatch.setitem(registry, "of_a_user", registry[name])
    found, expected = (
        VariationalClassifier(random_state=0, **{option: value}).fit(X, Y)
        for value in ("of_a_user", name)
    )
    assert_array_equal(found.predict_proba(X), expected.predict_proba(X))


@pytest.mark.parametrize("option", sorted(OF_LAPLACE))
def test_messages_list_new_entries(option, net, monkeypatch):
    registry, name = OF_LAPLACE[option]
    monkeypatch.setitem(registry, "of_a_user", registry[name])
    with pytest.raises(ValueError, match="of_a_user"):
        LaplaceClassifier(net, **{option: "unknown"}).fit(X, Y)


def test_a_structure_of_priors(net, monkeypatch):
    def one_per_weight(layout):
        return (layout.n_parameters,)

    monkeypatch.setitem(PRIOR_STRUCTURES, "of_a_user", one_per_weight)
    options = {"hessian_structure": "diag", "prior_precision": np.arange(1.0, 16.0)}
    with pytest.raises(ValueError, match="prior_structure='of_a_user' cannot be used"):
        LaplaceClassifier(net, prior_structure="of_a_user", **options).fit(X, Y)
