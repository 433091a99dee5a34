"""Labels at every position of a map, compared with dense references."""

import numpy as np
import pytest
import references
import torch
from nets import MLP, RecordTraining, classifier, initialised, seeded, twin
from refusals import refused_fit
from segmentation import HEIGHT, POSITIONS, WEIGHT, WIDTH, K, R, X, Y, fitted, net
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceClassifierCV
from sklaplace.core.random import sobol_normals
from sklaplace.dirichlet.links import LINKS

EXACT = {"rtol": 1e-8, "atol": 1e-10}

pytestmark = pytest.mark.usefixtures("rng_untouched")


@pytest.fixture(scope="module")
def trained():
    return seeded(net(), X, Y)


def dense(trained):
    """Return the Jacobian (n, r, K, P) by position, and logits (n, r, K)."""
    module = trained.module_.eval()
    f = module(torch.as_tensor(X)).movedim(1, -1).reshape(len(X), R, K)
    return references.gradient_rows(f, module.parameters()), f.detach()


def by_position(values):
    """Reshape (n, K, h, w) to (n, r, K)."""
    return np.moveaxis(values, 1, -1).reshape(len(values), R, K)


def blocks(cov):
    """Reshape (n, K, K, h, w) to (n, r, K, K)."""
    return np.moveaxis(cov.reshape(len(X), K, K, R), -1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignored", [False, True])
def test_posterior_is_that_of_the_dense_formula(trained, weight, ignored):
    """Class weights and ignored positions work as in torch's loss."""
    y = Y.copy()
    options = {"criterion__weight": weight}
    if ignored:
        y[:, 0, 1] = -7
        options["criterion__ignore_index"] = -7
    kinds = {"hessian_structure": "full", "residual": "none"}
    model = fitted(twin(net(**options), trained), y, **kinds)
    J, f = dense(trained)
    codes = torch.as_tensor(y).reshape(len(X), R)
    h = (codes >= 0).double()
    if weight is not None:
        h = h * weight[codes.clamp(min=0)]
    p = f.softmax(-1)
    L = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    H = torch.einsum("nrkp,nr,nrkj,nrjq->pq", J, h, L, J)
    identity = torch.eye(len(H), dtype=torch.float64)
    cov = torch.linalg.inv(H + identity)
    expected = torch.einsum("nrkp,pq,nrjq->nrkj", J, cov, J)
    mean, found = model.latent_mean_and_variance(X, full_cov=True)
    assert mean.shape == (len(X), K, *POSITIONS)
    assert found.shape == (len(X), K, K, *POSITIONS)
    np.testing.assert_allclose(by_position(mean), f, **EXACT)
    np.testing.assert_allclose(blocks(found), expected, **EXACT)
    variance = model.latent_mean_and_variance(X)[1]
    variances = expected.diagonal(dim1=2, dim2=3)
    np.testing.assert_allclose(by_position(variance), variances, **EXACT)
    outputs = trained.module_(torch.as_tensor(X)).detach()
    loss = nn.functional.cross_entropy(
        outputs, torch.as_tensor(y), weight, reduction="sum", ignore_index=-7
    )
    number = torch.tensor(1.0, dtype=torch.float64)
    evidence = references.evidence(
        H, model.posterior_.mean, -loss, identity.diagonal(), number, 0 * number
    )
    assert model.log_marginal_likelihood() == pytest.approx(float(evidence), rel=1e-8)
    assert float(model.posterior_.data_fit.n_targets) == pytest.approx(float(h.sum()))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("subset", ["all", ["head"]])
def test_a_position_is_a_problem_of_its_own(trained, link, subset):
    model = fitted(trained, link_approx=link, subset_of_weights=subset)
    mean, cov = model.latent_mean_and_variance(X, full_cov=True)
    proba = by_position(model.predict_proba(X))
    np.testing.assert_allclose(proba.sum(-1), 1)
    alone = LINKS[link](
        torch.as_tensor(by_position(mean)).reshape(-1, K),
        torch.as_tensor(blocks(cov)).reshape(-1, K, K),
        sobol_normals(model.n_samples, K, model._seed),
    )
    np.testing.assert_allclose(proba.reshape(-1, K), alone, **EXACT)


def test_log_probabilities_and_logits_agree(trained):
    other = twin(net(criterion=nn.NLLLoss, module__log_softmax=True), trained)
    np.testing.assert_allclose(
        fitted(other).predict_proba(X), fitted(trained).predict_proba(X), rtol=1e-8
    )


def test_training_and_rows_without_labels():
    """Rows without any labelled position are ignored."""
    y = np.concatenate([Y, np.full_like(Y[:3], -1)])
    rows = np.concatenate([X, X[:3]])
    ignoring = net(criterion__ignore_index=-1)
    model = LaplaceClassifier(
        ignoring, prior_precision=1.0, subset_of_weights="all", random_state=0
    )
    expected = clone(model).fit(X, Y).predict_proba(X)
    np.testing.assert_allclose(model.fit(rows, y).predict_proba(X), expected, rtol=1e-6)
    some = Y.copy()
    some[:, 0, 0] = -1
    weights = np.linspace(0.5, 2, len(X))
    model.fit(X, some, sample_weight=weights)
    assert (model.predict(X) == Y).mean() > 0.6
    assert model.classes_.tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [-100, 255])
@pytest.mark.parametrize("frozen", [False, True])
def test_positions_that_an_instance_of_the_criterion_ignores(index, frozen):
    y, some = Y.copy(), Y.copy()
    y[:, 0, 0], some[:, 0, 0] = index, -1
    found = []
    for criterion, labels in (
        (nn.CrossEntropyLoss(ignore_index=index), y),
        (nn.CrossEntropyLoss(ignore_index=-1), some),
    ):
        estimator = net(criterion=criterion)
        if frozen:
            estimator = FrozenEstimator(seeded(estimator, X, labels))
        settings = {"prior_precision": 1.0, "subset_of_weights": ["head"]}
        model = LaplaceClassifier(estimator, random_state=0, **settings)
        model.fit(X, labels, sample_weight=np.linspace(0.5, 2, len(X)))
        assert model.classes_.tolist() == [0, 1, 2]
        found.append([model.predict_proba(X), model.score(X, labels)])
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert found[0][1] == found[1][1]


def test_cross_validation(trained):
    search = {"prior_precisions": [0.1, 10.0], "cv": 2, "random_state": 0}
    frozen = FrozenEstimator(trained)
    chosen = LaplaceClassifierCV(frozen, subset_of_weights="all", **search).fit(X, Y)
    first = chosen.cv_results_["split0_test_score"][0]
    fold = fitted(trained, prior_precision=0.1, residual="none")
    fold.fit(X[15:], Y[15:])
    proba = np.take_along_axis(fold.predict_proba(X[:15]), Y[:15, None], 1)
    assert first == pytest.approx(np.log(proba).sum((1, 2, 3)).mean(), rel=1e-6)


# ---------------------------------------------------------------------- bad input
def recorded(**params):
    return LaplaceClassifier(
        net(callbacks=[RecordTraining()], **params), subset_of_weights="all"
    )


ONE = LaplaceClassifier(classifier(MLP, callbacks=[RecordTraining()]))
ROWS = X[:, :, 0, 0].astype(np.float32)
BALANCED = recorded().set_params(class_weight="balanced")
IGNORING = recorded(criterion__ignore_index=-1)
BAD = {
    "numbers_of_classes": (
        *(recorded(module__n_out=4), X, Y),
        *("(4, 2, 3)", "3 classes", "(3, 2, 3)"),
    ),
    "positions": (recorded(), X, Y[..., :2], "(3, 2, 3)", "(3, 2, 2)"),
    "a_network_for_one_label": (
        *(ONE, ROWS, Y[:, 0]),
        *("positions", "1d array", "BCEWithLogitsLoss"),
    ),
    "one_label_for_a_map": (recorded(), X, Y[:, 0, 0], "(3, 2, 3)", "('n', 2, 3)"),
    "no_labels": (recorded(), X, Y + 0.5, "not whole numbers"),
    "class_weight": (BALANCED, X, Y, "criterion__weight"),
    "no_network": (LaplaceClassifier(), X, Y, "matrix of labels"),
    "nothing_but_ignored_labels": (IGNORING, X, np.full_like(Y, -1), "ignores"),
    "a_channel": (recorded(), X, Y[:, None], "length one", "y.reshape(-1, 2, 3)"),
    "a_channel_last": (recorded(), X, Y[..., None], "y.reshape(-1, 2, 3)"),
    "a_class_that_a_fold_lacks": (recorded(), X, Y % 2, "stratified folds"),
    "labels_of_pixels": (
        *(recorded(criterion=nn.BCEWithLogitsLoss, module__n_out=1), X, Y[:, None] > 0),
        *("(30, 1, 2, 3)", "CrossEntropyLoss"),
    ),
    "numbers_of_rows": (recorded(), X, Y[:-1], "inconsistent"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    model, rows, y, *words = BAD[name]
    refused_fit(model, *words, data=(rows, y))


class ClassesLast(nn.Module):
    """A network from (b, *positions) to (b, *positions, K), or (b, K, *positions)."""

    def __init__(self, moves=False):
        super().__init__()
        self.moves = moves
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, K)

    def forward(self, X):
        f = self.head(self.embedding(X))
        return f.movedim(-1, 1) if self.moves else f


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("positions", "advice"),
    [((4,), "transpose(1, 2)"), ((4, 5), "movedim(-1, 1)")],
    ids=["tokens", "maps"],
)
def test_classes_last_are_refused(positions, advice, frozen):
    X = np.random.default_rng(0).integers(0, 9, (30, *positions))
    last, first = (
        net(ClassesLast, module__moves=moves, callbacks=[RecordTraining()])
        for moves in (False, True)
    )
    if frozen:
        last, first = (FrozenEstimator(initialised(net)) for net in (last, first))
    words = "classes last", f"returns logits.{advice}"
    refused_fit(LaplaceClassifier(last), *words, data=(X, X % K))
    model = LaplaceClassifier(first, prior_precision=1.0, random_state=0)
    proba = model.fit(X, X % K).predict_proba(X)
    assert proba.shape == (30, K, *positions)


def test_other_positions_to_tune_on_are_refused():
    rows = {"X_val": X, "y_val": Y[..., :2]}
    refused_fit(recorded(), "y_val has shape", data=(X, Y), **rows)


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("size", [(WIDTH, HEIGHT), (HEIGHT, WIDTH + 1), (R,)])
def test_maps_of_another_size_are_refused(size, log_softmax):
    """Maps with an equal number of positions but another shape are refused too."""
    known = {"criterion": nn.NLLLoss, "module__log_softmax": True}
    params = known if log_softmax else {}
    model = fitted(seeded(net(max_epochs=1, **params), X, Y))
    rows = np.ones((4, 2, *size)) if len(size) > 1 else np.ones((4, 2, *size, 1))
    words = r"of shape .* but returned \(3, 2, 3\) in fit\. Pass inputs of equal size"
    calls = [
        lambda: model.predict(rows),
        lambda: model.predict_proba(rows),
        lambda: model.sample_proba(rows, 2),
        lambda: model.partial_fit(rows, Y[:4]),
        lambda: model.set_params(pred_type="nn").predict_proba(rows),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call()
    model.set_params(pred_type="glm")
    model.predict(X[:4])


def test_rows_to_tune_on_have_the_size_of_the_others():
    frozen = FrozenEstimator(seeded(net(max_epochs=1), X, Y))
    model = LaplaceClassifier(frozen, subset_of_weights="all", random_state=0)
    with pytest.raises(ValueError, match="Pass inputs of equal size"):
        model.fit(X, Y, X_val=X.swapaxes(2, 3), y_val=Y)
