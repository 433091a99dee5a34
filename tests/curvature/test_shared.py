"""Implicit rows of many outputs equal dense rows."""

import numpy as np
import pytest
import torch
from cases import DOUBLE, normal
from contracts import assert_equal
from costs import calls, counted
from nets import LinearModel, classifier, initialised
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier
from sklaplace.curvature import subsets, verification
from sklaplace.curvature.jacobian import Centring, Jacobian
from sklaplace.curvature.rows import Block, LayerRows
from sklaplace.curvature.shared import IdentityMap, SharedBlock, SharedColumns

N, WIDTH, C = 7, 4, 6
COLUMNS = {
    "outputs": (0, torch.eye(C, dtype=DOUBLE)),
    "centred": (1, Centring(1)(torch.zeros(1, C, dtype=DOUBLE))),
    "centred in groups": (2, Centring(2)(torch.zeros(1, C, dtype=DOUBLE))),
}


def jacobians(kind):
    """Return rows of weight and bias in implicit and dense form."""
    n_blocks, matrix = COLUMNS[kind]
    a = normal(N, 1, WIDTH)
    shared = SharedColumns(C, n_blocks, torch.zeros((), dtype=DOUBLE))
    g = matrix.reshape(1, C, 1, C)
    return (
        Jacobian([LayerRows((SharedBlock(shared, a), SharedBlock(shared)))]),
        Jacobian([LayerRows((Block(g, a), Block(g)))]),
    )


@pytest.mark.parametrize("kind", COLUMNS)
def test_rows_and_products_are_those_of_the_matrix(kind):
    found, expected = jacobians(kind)
    p = C * WIDTH + C
    v, w = normal(p, seed=1).square(), normal(p, 3, seed=2)
    assert found.n_samples == N
    assert found.n_columns == C
    assert found.samples_share_gradients
    assert_equal(found.dense(), expected.dense(), 1e-14)
    assert_equal(found.variance(v), expected.variance(v), 1e-14)
    assert_equal(found.gram(v), expected.gram(v), 1e-14)
    assert_equal(found.matmul(w), expected.matmul(w), 1e-14)
    assert_equal(found.double().variance(v), expected.variance(v), 1e-14)
    assert_equal(found.take(torch.tensor([2, 0])).dense(), expected.dense()[[2, 0]])
    some = slice(1, 4)
    assert_equal(found.columns(some).dense(), expected.columns(some).dense())


@pytest.mark.parametrize("kind", COLUMNS)
def test_variances_of_a_basis_of_the_inputs(kind):
    found, expected = jacobians(kind)
    basis, v = (
        torch.linalg.qr(normal(WIDTH, WIDTH, seed=3)).Q,
        normal(C * WIDTH, seed=4).square(),
    )
    pair = [j.layers[0].first.rotate(basis) for j in (found, expected)]
    assert_equal(*(LayerRows((block,)).variance(v) for block in pair), 1e-14)


# ------------------------------------------------------------------- the estimators
def frozen(n_in=4, n_out=C, dtype=DOUBLE):
    sizes = {"module__n_in": n_in, "module__n_out": n_out, "module__dtype": dtype}
    net = initialised(classifier(LinearModel, **sizes))
    net.classes = range(n_out)
    return FrozenEstimator(net)


X = normal(60, 4).numpy()
Y = np.arange(60) % C
NEW = 3 * normal(20, 4, seed=9).numpy()


@pytest.fixture
def few_are_many(monkeypatch):
    """Return a function that lowers the limit, so that C outputs count as many."""

    def take():
        monkeypatch.setattr(subsets, "MAX_DENSE_OUTPUTS", C - 1)

    return take


@pytest.mark.parametrize("link", ["auto", "probit", "probit_uncentred", "mc"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("prior", [2.0, "auto", "marglik"])
@pytest.mark.filterwarnings("ignore:There are no held-out", "ignore:Too few rows")
def test_predictions_are_those_with_the_matrix(few_are_many, link, structure, prior):
    options = {"hessian_structure": structure, "prior_precision": prior}
    model = LaplaceClassifier(frozen(), link_approx=link, random_state=0, **options)
    held_out = {"X_val": X[:30], "y_val": Y[:30]} if prior == "auto" else {}
    expected = model.fit(X, Y, **held_out).predict_proba(NEW)
    moments = model.latent_mean_and_variance(NEW)
    draws, scores = model.sample_proba(NEW, 3), model.score_samples(NEW)
    evidence = model.log_marginal_likelihood_value_
    few_are_many()
    model.fit(X, Y, **held_out)
    assert isinstance(model.network_spec_.layout.head.matrix, IdentityMap)
    np.testing.assert_allclose(model.predict_proba(NEW), expected, rtol=1e-9)
    for found, wanted in zip(model.latent_mean_and_variance(NEW), moments, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model.sample_proba(NEW, 3), draws, rtol=1e-9)
    np.testing.assert_allclose(model.score_samples(NEW), scores, rtol=1e-9)
    assert model.log_marginal_likelihood_value_ == pytest.approx(evidence, rel=1e-9)


@pytest.mark.slow
# a factor of so many outputs keeps its diagonal
@pytest.mark.parametrize(("structure", "c"), [("diag", 5_000), ("kron", 9_000)])
def test_no_matrix_of_outputs_is_made(structure, c):
    """The largest tensors have the size of the weights or of a batch's outputs."""
    n, width = 300, 16
    rows = np.random.default_rng(0).normal(size=(n, width)).astype("f4")
    y = 100 * (np.arange(n) % 40)
    options = {"hessian_structure": structure, "prior_precision": 10.0}
    network = frozen(width, c, torch.float32)
    model = LaplaceClassifier(network, random_state=0, **options)
    with counted() as costs:
        model.fit(rows, y)
    batch = model.network_spec_.batch_size()
    assert batch < n
    # combinations of the outputs of some samples, in inspection
    assert costs.largest <= max(2 * batch, width + 1) * c
    with counted() as costs:
        classes, proba = model.predict_top_k(rows, 3)
    assert classes.shape == proba.shape == (n, 3)
    assert costs.largest <= max(2 * batch, width + 1) * c < n * c


def test_rows_of_many_weights_are_verified_one_by_one(monkeypatch):
    model = LaplaceClassifier(frozen(), prior_precision=2.0, random_state=0)
    expected = model.fit(X, Y).predict_proba(NEW)
    monkeypatch.setattr(verification, "MAX_PARAMETERS_TOGETHER", 1)
    with calls(verification, "rows_by_loop") as verified:
        model.fit(X, Y)
    assert len(verified) == 6
    assert all(len(columns) == 1 for _, _, _, columns in verified)
    np.testing.assert_array_equal(model.predict_proba(NEW), expected)


class Scaled(LinearModel):
    """Outputs are twice the last layer's output, plus a constant."""

    def forward(self, X):
        return 2 * self.head(X) + 1


class Normalised(LinearModel):
    """Log-probabilities, each of which depends on all outputs."""

    def forward(self, X):
        return self.head(X).log_softmax(1)


@pytest.mark.parametrize("module", [Scaled, Normalised])
def test_many_outputs_of_other_networks_are_refused_before(module, monkeypatch):
    monkeypatch.setattr(verification, "BUDGET", 0)
    monkeypatch.setattr(verification, "require_bytes", no_memory)
    net = initialised(classifier(module, module__n_in=4, module__n_out=C))
    with pytest.raises(ValueError, match=r"Jacobian of .* 6 outputs each: .*\(logits"):
        LaplaceClassifier(FrozenEstimator(net), prior_precision=2.0).fit(X, Y)


def no_memory(_needed, _device, subject, advice):
    raise ValueError(f"{subject}: {advice}")
