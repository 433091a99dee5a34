"""The code on the page for contributors runs, and passes the contracts."""

import re
from pathlib import Path

import contracts
import pytest
import references
import torch
from contracts import N_ROWS, assert_equal, problem
from nets import binary_classifier, blobs, classifier, seeded
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from torch import nn

import sklaplace
from sklaplace import LaplaceClassifier
from sklaplace.core.random import sobol_normals
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.dirichlet.links import LINKS
from sklaplace.posterior.tuning import TUNERS

pytestmark = pytest.mark.slow

PAGE = Path(sklaplace.__file__).parent.parent / "docs" / "contributing.md"
X, Y = blobs()


@pytest.fixture(scope="module")
def page():
    """Run the code of the page; return its names, and restore the registries."""
    registries = STRUCTURES, references.STRUCTURES, LINKS, TUNERS
    before = [dict(registry) for registry in registries]
    names = {"references": references, "__name__": "contributing"}
    blocks = re.findall("```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    try:
        for block in blocks:
            exec(block, names)
        yield names
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)


@pytest.fixture(scope="module")
def net():
    return FrozenEstimator(seeded(classifier(), X, Y))


@pytest.mark.parametrize("case", ["mlp", "cnn", "called_twice", "affine_head"])
@pytest.mark.parametrize(
    "check",
    [
        contracts.check_dense,
        contracts.check_batches,
        contracts.check_merge,
        contracts.check_scaled,
        contracts.check_product,
    ],
)
def test_structure(check, case, page):
    check(problem(case), "tied")


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize(
    "check",
    [contracts.check_questions, contracts.check_gradients, contracts.check_weights],
)
def test_structure_under_priors(check, prior, page):
    check(problem("mlp"), "tied", prior)


def test_structure_of_an_estimator(page, net):
    model = LaplaceClassifier(net, hessian_structure="tied", prior_precision=1.0)
    assert model.fit(X, Y).posterior_.structure.name == "tied"


def test_link(page, net):
    model = LaplaceClassifier(net, link_approx="shared_scale", prior_precision=1.0)
    proba = model.fit(X, Y).predict_proba(X)
    assert_allclose(proba.sum(1), 1)
    mean, cov = torch.randn(5, 3, dtype=torch.float64), torch.zeros(5, 3).double()
    points = sobol_normals(20, 3, 0)
    assert_equal(LINKS["shared_scale"](mean, cov, points), mean.softmax(-1))


# the trained weights do not maximise the tempered likelihood
@pytest.mark.filterwarnings("ignore:The loss of the net")
def test_likelihood(page):
    likelihood = page["TemperedBernoulli"](divisor=2.0)
    f = torch.linspace(-3, 3, N_ROWS, dtype=torch.float64).reshape(-1, 1)
    y, leaf = (f > 0).double(), f.clone().requires_grad_()
    loss = nn.functional.binary_cross_entropy_with_logits(leaf / 2, y, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert_equal(likelihood.gradient(f, y), gradient, 1e-12)
    S = likelihood.hessian_factor(f)
    p = (f / 2).sigmoid()
    assert_equal(S @ S.mT, (p * (1 - p) / 4).unsqueeze(-1), 1e-12)
    frozen = FrozenEstimator(seeded(binary_classifier(), X, (Y % 2).astype("f4")))
    tempered, plain = (
        LaplaceClassifier(frozen, likelihood=one, prior_precision=1e6).fit(X, Y % 2)
        for one in (likelihood, None)
    )
    logits, expected = (
        model.latent_mean_and_variance(X)[0] for model in (tempered, plain)
    )
    assert_allclose(logits, expected / 2, rtol=1e-5, atol=1e-6)


def test_tuner(page, net):
    model = LaplaceClassifier(net, prior_precision="evidence_grid", random_state=0)
    evidence = model.fit(X, Y).log_marginal_likelihood_value_
    for factor in (0.5, 2.0):
        moved = factor * model.prior_precision_
        assert model.log_marginal_likelihood(moved) <= evidence


def test_estimator(page, net):
    model = page["InputNoiseClassifier"](net, n_samples=20, random_state=0)
    proba = model.fit(X, Y).predict_proba(X)
    assert_allclose(proba.sum(1), 1)
    without_noise = clone(model).set_params(scale=1e-9).fit(X, Y).predict_proba(X)
    assert_allclose(without_noise, net.predict_proba(X), atol=1e-5)
    assert model.predict_uncertainty(X[:3]).shape == (3, 3)
