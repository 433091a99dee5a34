"""Several labels per row: targets and predictions, compared with dense references."""

import numpy as np
import pytest
import references
import torch
from nets import MLP, RecordTraining, classifier, seeded, twin
from refusals import refused_fit
from scipy import sparse
from sklearn.base import clone
from sklearn.metrics import get_scorer, log_loss
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier
from tagging import N_LABELS, X, Y, fitted, net
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceClassifierCV
from sklaplace.core.random import sobol_normals
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.dirichlet.links import LINKS
from sklaplace.likelihoods import Bernoulli

pytestmark = pytest.mark.usefixtures("rng_untouched")

TARGETS = torch.as_tensor(Y, dtype=torch.float64)
EXACT = {"rtol": 1e-8, "atol": 1e-10}
POS_WEIGHT = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def trained():
    return seeded(net(), X, Y.astype(np.float64))


# ----------------------------------------------------------------- dense references
def dense(trained, pos_weight=None, subset=slice(None)):
    """Return the Jacobian (n, L, P), logits (n, L), and label weights (n, L)."""
    module = trained.module_.eval()
    f = module(torch.as_tensor(X))
    J = references.gradient_rows(f, list(module.parameters())[subset])
    h = torch.ones_like(TARGETS)
    h = h if pos_weight is None else 1 + (pos_weight - 1) * TARGETS
    return J, f.detach(), h


@pytest.mark.parametrize("pos_weight", [None, POS_WEIGHT])
@pytest.mark.parametrize(
    ("subset", "places"), [("all", slice(None)), ("last_layer", slice(-2, None))]
)
def test_posterior_and_variances_are_those_of_the_dense_formula(
    trained, pos_weight, subset, places
):
    weighted = twin(net(criterion__pos_weight=pos_weight), trained)
    chosen = {"subset_of_weights": subset, "hessian_structure": "full"}
    model = fitted(weighted, residual="none", **chosen)
    J, f, h = dense(trained, pos_weight, places)
    p = f.sigmoid()
    H = torch.einsum("nkp,nk,nkq->pq", J, h * p * (1 - p), J)
    identity = torch.eye(len(H), dtype=torch.float64)
    cov = torch.linalg.inv(H + identity)
    expected = torch.einsum("nkp,pq,njq->nkj", J, cov, J)
    mean, found = model.latent_mean_and_variance(X, full_cov=True)
    np.testing.assert_allclose(mean, f, **EXACT)
    np.testing.assert_allclose(found, expected, **EXACT)
    variance = model.latent_mean_and_variance(X)[1]
    np.testing.assert_allclose(variance, expected.diagonal(dim1=1, dim2=2), **EXACT)
    loss = nn.functional.binary_cross_entropy_with_logits(
        f, TARGETS, reduction="sum", pos_weight=pos_weight
    )
    one = torch.tensor(1.0, dtype=torch.float64)
    evidence = references.evidence(
        H, model.posterior_.mean, -loss, identity.diagonal(), one, 0 * one
    )
    assert model.log_marginal_likelihood() == pytest.approx(float(evidence), rel=1e-8)


@pytest.mark.parametrize("link", LINKS)
def test_a_label_is_a_problem_of_two_classes(trained, link):
    """Probabilities, Betas and draws equal the results for each label alone."""
    model = fitted(trained, link_approx=link, subset_of_weights="all")
    proba, alpha = model.predict_proba(X), model.predict_dirichlet(X)
    assert proba.shape == (len(X), N_LABELS)
    assert alpha.shape == (len(X), N_LABELS, 2)
    mean, variance = model.latent_mean_and_variance(X)
    for k in range(N_LABELS):
        gaussian = torch.as_tensor(mean[:, [k]]), torch.as_tensor(variance[:, k, None])
        logits = Bernoulli().class_logits(gaussian[0], gaussian[1].unsqueeze(-1))
        points = sobol_normals(model.n_samples, 2, model._seed)
        alone = LINKS[model.link_approx](*logits, points)
        np.testing.assert_allclose(proba[:, k], alone[:, 1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", ["marglik", "validation", "auto"])
def test_tuning(structure, prior):
    model = LaplaceClassifier(
        net(), hessian_structure=structure, prior_precision=prior, random_state=0
    ).fit(X, Y)
    assert np.isfinite(model.prior_precision_)
    assert log_loss(Y.ravel(), model.predict_proba(X).ravel()) < 0.6


def test_refitted_head_is_at_the_minimum(trained):
    weighted = twin(net(criterion__pos_weight=POS_WEIGHT), trained)
    model = fitted(weighted, refine=True)
    w = model.posterior_.mean.clone().requires_grad_()
    module = trained.module_
    hidden = torch.tanh(module.hidden(torch.as_tensor(X))).detach()
    weight, bias = w[:-N_LABELS].reshape(N_LABELS, -1), w[-N_LABELS:]
    f = hidden @ weight.T + bias
    loss = nn.functional.binary_cross_entropy_with_logits(
        f, TARGETS, reduction="sum", pos_weight=POS_WEIGHT
    )
    (slope,) = torch.autograd.grad(loss + (w**2).sum() / 2, w)
    assert float(slope.abs().max()) < 1e-6


# ------------------------------------------------------------------ the estimator


def test_new_rows(trained):
    model = clone(fitted(trained))
    model.partial_fit(X, Y, classes=np.arange(N_LABELS))
    with pytest.raises(ValueError, match="y has shape"):
        model.partial_fit(X, Y[:, :2])
    with pytest.raises(ValueError, match="does not match the column indices"):
        clone(model).partial_fit(X, Y, classes=[0, 1])


def test_cross_validation():
    search = {"prior_precisions": [0.1, 1.0, 10.0], "cv": 3}
    kept = {"refine": False, "residual": "none", "random_state": 0}
    model = LaplaceClassifierCV(net(), **search, **kept).fit(X, Y)
    grid = GridSearchCV(
        LaplaceClassifier(net(), **kept),
        {"prior_precision": search["prior_precisions"]},
        cv=3,
        scoring=lambda m, x, y: -log_loss(y.ravel(), m.predict_proba(x).ravel()),
    ).fit(X, Y)
    assert model.prior_precision_ == grid.best_params_["prior_precision"]
    # nats per row here, per label there
    np.testing.assert_allclose(
        model.cv_results_["mean_test_score"] / N_LABELS,
        grid.cv_results_["mean_test_score"],
        rtol=1e-8,
    )


# ---------------------------------------------------------------------- bad input
def recorded(**params):
    return LaplaceClassifier(net(callbacks=[RecordTraining()], **params))


TWO = {"criterion__pos_weight": torch.ones(2)}
MANY = Y + np.array([0, 0, 1])
WORDS = np.where(Y == 1, "yes", "no")
ONE = LaplaceClassifier(classifier(callbacks=[RecordTraining()]))
BALANCED = recorded().set_params(class_weight="balanced")
BAD = {
    "a_criterion_of_one_label": (ONE, Y, "(3,)", "1d array", "BCEWithLogitsLoss"),
    "numbers_of_outputs": (
        *(recorded(module__n_out=2), Y),
        *("2 outputs", "3 labels", "last layer to 3"),
    ),
    "several_classes": (recorded(), MANY, "3 columns", "[2]", "0 or 1"),
    "and_no_net": (LaplaceClassifier(), MANY, "3 columns", "[2]", "0 or 1"),
    "words": (recorded(), WORDS, "3 columns", "'no'", "0 or 1"),
    "more_axes": (recorded(), Y[..., None], "(90, 3, 1)", "matrix"),
    "numbers_of_rows": (recorded(), Y[:-1], "inconsistent"),
    "class_weight": (BALANCED, Y, "class_weight='balanced'", "pos_weight"),
    "weights_of_other_labels": (recorded(**TWO), Y, "2 entries", "3 labels"),
    "weights_for_one_label": (
        *(recorded(module__n_out=1, **TWO), Y[:, 0]),
        *("2 entries", "one label"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    model, y, *words = BAD[name]
    refused_fit(model, *words, data=(X, y))


# -------------------------------------------------------------------------- scores
@pytest.mark.parametrize("scoring", ["neg_log_loss", "neg_brier_score"])
def test_scores_that_take_columns_for_classes_are_refused(scoring):
    recording = net(callbacks=[RecordTraining()])
    for given in (scoring, get_scorer(scoring)):
        model = LaplaceClassifierCV(recording, scoring=given, random_state=0)
        refused_fit(model, "single label", "scoring=None", data=(X, Y))


@pytest.mark.parametrize("kind", [object, bool, float, sparse.csr_matrix, list])
def test_any_form_of_a_matrix_is_fitted_and_scored(kind, trained):
    forms = {sparse.csr_matrix: sparse.csr_matrix(Y), list: Y.tolist()}
    y = forms[kind] if kind in forms else Y.astype(kind)
    model = fitted(trained)
    proba = model.predict_proba(X)
    np.testing.assert_array_equal(model.predict(X), proba > 0.5)
    model.fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), proba)
    weights = np.arange(len(X))
    right = (model.predict(X) == Y).all(1)
    assert model.score(X, y) == pytest.approx(right.mean())
    assert model.score(X, y, weights) == pytest.approx(right @ weights / weights.sum())
    with pytest.raises(ValueError, match="inconsistent numbers"):
        model.score(X[:5], Y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NeuralNetBinaryClassifier, ["one label per row", "skorch.NeuralNet with"]),
        (NeuralNetClassifier, ["one label per row", "train_split=None"]),
    ],
)
def test_nets_that_skorch_keeps_to_one_label(make, words):
    """The error comes before training and says what to use instead."""
    params = {"module__n_out": N_LABELS, "callbacks": [RecordTraining()]}
    net = make(MLP, criterion=nn.BCEWithLogitsLoss, verbose=0, **params)
    model = LaplaceClassifier(net)
    refused_fit(model, "Use skorch.NeuralNet", *words, data=(X.astype("f4"), Y))
