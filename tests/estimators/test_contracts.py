"""Contracts of every estimator; each contract is a function of estimator and data."""

import copy
import io
import itertools
import pickle
import tempfile
from contextlib import nullcontext
from functools import cached_property
from unittest import mock

import joblib
import numpy as np
import pytest
import segmentation
import tagging
import torch
from conftest import global_rng_states
from nets import (
    QUICK,
    DropoutMLP,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit, softmax
from scipy.stats import norm
from sklearn import config_context
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import r2_score
from skorch import NeuralNetBinaryClassifier
from skorch.callbacks import Callback
from torch import nn

from sklaplace import (
    BradleyTerry,
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutClassifier,
    MCDropoutRegressor,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
    dirichlet,
)
from sklaplace.data import stored
from sklaplace.likelihoods import HeteroscedasticNLLLoss

DOUBLE = {"module__dtype": torch.float64, "max_epochs": 8}
X, Y = blobs(dtype=np.float64)
X_REG, Y_REG = waves(dtype=np.float64)
TWO = waves(n_targets=2, dtype=np.float64)[1]
PAIRS = np.stack([X, X[::-1]], 1), Y % 2
FIXED = {"prior_precision": 1.0, "random_state": 0}
ALL = {"subset_of_weights": "all"}
CV = {"prior_precisions": [0.1, 1.0, 10.0], "cv": 2, "random_state": 0}
DRAWS = {"n_samples": 7, "random_state": 0}
SWAG = DRAWS | {"n_snapshots": 5, "steps_per_snapshot": 2, "lr": 0.03}
NETWORKS = {"n_estimators": 3, "random_state": 0}


OF_CLASSES, OF_NUMBERS = classifier(**DOUBLE), regressor(**DOUBLE)
OF_COUNTS = regressor(criterion=nn.PoissonNLLLoss, **DOUBLE)
OF_VARIANCES = regressor(criterion=HeteroscedasticNLLLoss, module__n_out=2, **DOUBLE)
FROZEN = FrozenEstimator(seeded(clone(OF_CLASSES), X, Y))
FROZEN_REG = FrozenEstimator(seeded(clone(OF_NUMBERS), X_REG, Y_REG[:, None]))
FROZEN_DROPOUT = FrozenEstimator(seeded(classifier(DropoutMLP, **DOUBLE), X, Y))
TAGS = FrozenEstimator(seeded(tagging.net(), tagging.X, tagging.Y.astype(float)))
SCORER = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))
SCORER = BradleyTerry(SCORER.double())
SCORES = NeuralNetBinaryClassifier(SCORER, **QUICK)
SCORES = FrozenEstimator(seeded(SCORES, PAIRS[0], PAIRS[1].astype(float)))
MAPS = FrozenEstimator(seeded(segmentation.net(), segmentation.X, segmentation.Y))


class Subject:
    """An unfitted estimator and its data."""

    def __init__(self, model, X, y):
        self.model, self.X, self.y = model, X, y

    @cached_property
    def fitted(self):
        return clone(self.model).fit(self.X, self.y)

    @cached_property
    def answers(self):
        return answers(self.fitted, self.X)


def of_classes(model, y=Y):
    return Subject(model, X, y)


def of_numbers(model, y=Y_REG):
    return Subject(model, X_REG, y)


SUBJECTS = {
    "trained": of_classes(LaplaceClassifier(OF_CLASSES, random_state=0)),
    "frozen": of_classes(LaplaceClassifier(FROZEN, **FIXED)),
    "all weights": of_classes(LaplaceClassifier(FROZEN, **FIXED, **ALL)),
    "drawn weights": of_classes(
        LaplaceClassifier(FROZEN, **FIXED, **ALL, pred_type="nn", n_samples=20)
    ),
    "one logit": of_classes(
        LaplaceClassifier(binary_classifier(**DOUBLE), **FIXED), Y % 2
    ),
    "labels": Subject(LaplaceClassifier(TAGS, **FIXED), tagging.X, tagging.Y),
    "maps": Subject(
        LaplaceClassifier(MAPS, **FIXED, **ALL), segmentation.X, segmentation.Y
    ),
    "search": of_classes(LaplaceClassifierCV(OF_CLASSES, **CV)),
    "dropout": of_classes(
        MCDropoutClassifier(classifier(DropoutMLP, **DOUBLE), **DRAWS)
    ),
    "ensemble": of_classes(DeepEnsembleClassifier(OF_CLASSES, **NETWORKS)),
    "swag": of_classes(SWAGClassifier(OF_CLASSES, **SWAG)),
    "variational": of_classes(VariationalClassifier(OF_CLASSES, **DRAWS)),
    "frozen search": of_classes(LaplaceClassifierCV(FROZEN, **CV)),
    "frozen dropout": of_classes(MCDropoutClassifier(FROZEN_DROPOUT, **DRAWS)),
    "frozen swag": of_classes(SWAGClassifier(FROZEN, **SWAG)),
    "frozen variational": of_classes(VariationalClassifier(FROZEN, **DRAWS)),
    "pairs": Subject(LaplaceRanker(random_state=0), *PAIRS),
    "frozen pairs": Subject(LaplaceRanker(SCORES, **FIXED, **ALL), *PAIRS),
    "numbers": of_numbers(LaplaceRegressor(OF_NUMBERS, random_state=0)),
    "frozen numbers": of_numbers(
        LaplaceRegressor(FROZEN_REG, sigma_noise=0.2, **FIXED, **ALL)
    ),
    "drawn numbers": of_numbers(
        LaplaceRegressor(FROZEN_REG, sigma_noise=0.2, pred_type="nn", **FIXED, **ALL)
    ),
    "two columns": of_numbers(
        LaplaceRegressor(
            regressor(**DOUBLE, module__n_out=2), normalize_y=True, **FIXED
        ),
        7 * TWO + 3,
    ),
    "counts": of_numbers(LaplaceRegressor(OF_COUNTS, **FIXED), np.exp(Y_REG).round()),
    "noise of outputs": of_numbers(LaplaceRegressor(OF_VARIANCES, **FIXED)),
    "noise levels": of_numbers(
        DeepEnsembleRegressor(
            regressor(**DOUBLE, module__n_out=2), sigma_noise=[0.1, 0.7], **NETWORKS
        ),
        TWO,
    ),
    "one column": of_numbers(LaplaceRegressor(OF_NUMBERS, **FIXED), Y_REG[:, None]),
    "search of numbers": of_numbers(LaplaceRegressorCV(OF_NUMBERS, **CV)),
    "dropout of numbers": of_numbers(
        MCDropoutRegressor(regressor(DropoutMLP, **DOUBLE), **DRAWS)
    ),
    "ensemble of numbers": of_numbers(DeepEnsembleRegressor(OF_NUMBERS, **NETWORKS)),
    "swag of numbers": of_numbers(SWAGRegressor(OF_NUMBERS, **SWAG)),
    "variational of numbers": of_numbers(VariationalRegressor(OF_NUMBERS, **DRAWS)),
}

# what is asked of rows -> keyword arguments; answers have one entry per row
QUESTIONS = [
    ("predict", {}),
    ("predict_proba", {}),
    ("predict_log_proba", {}),
    ("predict_dirichlet", {}),
    ("predict_uncertainty", {}),
    ("predict_set", {}),
    ("sample_proba", {"n_samples": 3}),
    ("predict", {"return_std": True}),
    ("predict_interval", {"coverage": [0.5, 0.9]}),
    ("predict_quantiles", {"alpha": [0.1, 0.5]}),
    ("latent_mean_and_variance", {}),
    ("latent_mean_and_variance", {"full_cov": True}),
    ("sample_latent", {"n_samples": 3}),
    ("score_samples", {}),
]


def questions(model):
    """Return the methods that the estimator has."""
    for name, options in QUESTIONS:
        takes_options = not (options.get("return_std") and is_classifier(model))
        if hasattr(model, name) and takes_options:
            yield name, options


def answers(model, X):
    found = []
    for name, options in questions(model):
        answer = getattr(model, name)(X, **options)
        found += answer if isinstance(answer, tuple) else [answer]
    return found


def assert_same(found, expected, rtol=1e-8, atol=1e-9):
    for one, other in zip(found, expected, strict=True):
        if other.dtype.kind == "f":
            assert_allclose(one, other, rtol=rtol, atol=atol)
        else:
            assert_array_equal(one, other)


def fingerprint(net):
    """Return the mutable state of a skorch net, comparable by ``==``."""
    if not getattr(net, "initialized_", False):
        return {k: repr(v) for k, v in vars(net).items()}
    module = net.module_
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"
    return {
        "attributes": sorted(vars(net)),
        "history": repr(net.history),
        "state": {k: v.numpy().tobytes() for k, v in module.state_dict().items()},
        "training": [m.training for m in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "gradients": [p.grad is None for p in module.parameters()],
        "hooks": [len(getattr(m, h)) for m in module.modules() for h in hooks],
        "criterion": (type(net.criterion_), net.criterion_.reduction),
    }


def state(subject, model):
    """Return attributes of the estimator by identity, its nets, data and generators."""
    nets = [model.estimator, getattr(model, "estimator_", None)]
    nets = [getattr(net, "estimator", net) for net in nets if net is not None]
    return (
        {name: id(value) for name, value in vars(model).items()},
        [fingerprint(net) for net in nets],
        [np.asarray(values).tobytes() for values in (subject.X, subject.y)],
        global_rng_states(),
    )


# --------------------------------------------------------------------- same answers
def neither_batches_nor_order_matter(subject):
    model, X = subject.fitted, subject.X
    for size, n in ((1, 5), (7, None)):
        other = copy.copy(model).set_params(batch_size=size)
        assert_same(answers(other, X[:n]), [found[:n] for found in subject.answers])
    order = np.random.default_rng(0).permutation(len(X))
    assert_same(answers(model, X[order]), [found[order] for found in subject.answers])
    alone = answers(model, X[3:4])
    assert_same(alone, [found[3:4] for found in subject.answers])


def samples_of_a_frozen_net_are_exchangeable(subject):
    """Batches, order, parts, and repetition instead of weights do not matter."""
    model, X, y = clone(subject.model), subject.X, subject.y
    is_frozen = isinstance(model.estimator, FrozenEstimator)
    if not is_frozen or "prior_precision" not in model.get_params():
        return
    new, expected = X[:9], [found[:9] for found in subject.answers]
    order = np.random.default_rng(1).permutation(len(X))
    model.set_params(batch_size=13).fit(X[order], y[order])
    assert_same(answers(model, new), expected, 1e-6)
    first, second = np.array_split(order, 2)
    model.fit(X[first], y[first]).partial_fit(X[second], y[second])
    assert_same(answers(model, new), expected, 1e-6)
    counts = np.random.default_rng(3).integers(0, 4, len(X))
    repeated = clone(model).fit(X.repeat(counts, 0), y.repeat(counts, 0))
    weighted = model.fit(X, y, sample_weight=counts)
    assert_same(answers(weighted, new), answers(repeated, new), 1e-6)


def contexts_of_the_caller_change_nothing(subject):
    bfloat16 = torch.autocast("cpu", dtype=torch.bfloat16)
    for outer, inner in (
        (torch.inference_mode(), nullcontext()),
        (torch.no_grad(), bfloat16),
    ):
        with outer, inner:
            assert_same(answers(subject.fitted, subject.X), subject.answers, 0, 0)


def copies_answer_alike_and_share_nothing(subject):
    model, file = subject.fitted, io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    pickled = pickle.loads(pickle.dumps(model))
    for twin in (copy.deepcopy(model), pickled, joblib.load(file)):
        assert_same(answers(twin, subject.X), subject.answers, 1e-12, 1e-12)
        for net in getattr(twin, "estimators_", [twin.estimator_]):
            for value in net.module_.state_dict().values():
                value.fill_(torch.nan)
    twin.fit(subject.X, subject.y)
    shallow = copy.copy(model).fit(subject.X[::-1][:40], subject.y[::-1][:40])
    assert shallow.estimator_ is not model.estimator_
    assert_same(answers(model, subject.X), subject.answers, 0, 0)


def a_clone_fits_alike(subject):
    twin = clone(subject.fitted)
    assert not hasattr(twin, "estimator_")
    assert_same(answers(twin.fit(subject.X, subject.y), subject.X), subject.answers)
    found = []
    for _ in range(2):
        twin.set_params(random_state=np.random.RandomState(3))
        found.append(answers(twin.fit(subject.X, subject.y), subject.X))
    assert_same(*found)


def seeds_decide(subject):
    model = clone(subject.model)
    is_frozen = isinstance(model.estimator, FrozenEstimator)
    for state in (1, None) if not is_frozen else ():
        other = model.set_params(random_state=state).fit(subject.X, subject.y)
        found = answers(other, subject.X)
        pairs = zip(found, subject.answers, strict=True)
        assert not all(np.array_equal(one, two) for one, two in pairs)
    for name in ("sample_proba", "sample_latent", "sample_y"):
        if not hasattr(subject.fitted, name):
            continue
        draw = getattr(subject.fitted, name)
        first = draw(subject.X, 6, random_state=1)
        assert_array_equal(draw(subject.X, 6, random_state=1), first)
        states = [np.random.RandomState(1) for _ in range(2)]
        assert_array_equal(*(draw(subject.X, 6, random_state=s) for s in states))
        assert not np.array_equal(draw(subject.X, 6, random_state=2), first)
        fresh = [draw(subject.X, 20, random_state=None) for _ in range(2)]
        assert not np.array_equal(*fresh)


def files_are_answered_as_arrays(subject):
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(stored, "MAX_LOADED", 0),
    ):
        np.save(f"{folder}/x.npy", subject.X)
        mapped = np.load(f"{folder}/x.npy", mmap_mode="r")
        model = clone(subject.model).fit(mapped, subject.y)
        assert_same(answers(model, mapped), subject.answers)


def workers_change_no_bit(subject):
    found = []
    for n_jobs in (1, 2) if "n_jobs" in subject.model.get_params() else ():
        model = clone(subject.model).set_params(n_jobs=n_jobs, batch_size=20)
        with joblib.parallel_config(backend="threading"):
            model.fit(subject.X, subject.y)
            before = fingerprint(model.estimator_)
            found.append(answers(model, subject.X[:25]))
        # hooks and modes belong to a module, so each thread has its own
        assert fingerprint(model.estimator_) == before
    for one, other in itertools.pairwise(found):
        assert_same(one, other, 0, 0)


def tensors_are_converted_or_refused(subject):
    data = {"X": subject.X, "y": subject.y, "sample_weight": np.ones(len(subject.X))}
    tensors = {name: torch.tensor(values) for name, values in data.items()}
    X, model = tensors["X"], clone(subject.model)
    assert_same(answers(model.fit(X, tensors["y"]), X), subject.answers)
    with config_context(array_api_dispatch=True):
        assert_same(answers(model, subject.X), subject.answers)
        for name, options in questions(model):
            with pytest.raises(TypeError, match=r"X is .*numpy\(force=True\)"):
                getattr(model, name)(X, **options)
        for name, values in tensors.items():
            with pytest.raises(TypeError, match=rf"{name} is .*array_api_dispatch=F"):
                clone(model).fit(**data | {name: values})


# ----------------------------------------------------------------------- left alone
def questions_change_nothing(subject):
    model = subject.fitted
    before = state(subject, model)
    assert_same(answers(model, subject.X), subject.answers, 0, 0)
    model.score(subject.X, subject.y)
    assert state(subject, model) == before


def questions_that_fail_change_nothing(subject):
    model, X = subject.fitted, subject.X
    before = state(subject, model)
    wrong = np.concatenate([X, X], -1) if X.ndim < 4 else X[:, :1]
    for name, options in questions(model):
        for rows in (wrong, np.where(X > 1, np.nan, X), X[:0]):
            with pytest.raises(ValueError, match=r"\w"):
                getattr(model, name)(rows, **options)
    layer = next(iter(model.estimator_.module_.children()))

    def fail(*_):
        raise RuntimeError("out of memory")

    with (
        layer.register_forward_hook(fail),
        pytest.raises(RuntimeError, match="of memory"),
    ):
        model.predict(X)
    assert state(subject, model) == before


class Fails(Callback):
    """Callback that raises in the second epoch."""

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 2:
            raise KeyError("stop")


def fits_change_nothing_but_the_estimator(subject):
    model = clone(subject.model)
    *_, before = [state(subject, model)]
    params = model.get_params(deep=False)
    model.fit(subject.X, subject.y)
    after = state(subject, model)
    assert after[1][: len(before[1])] == before[1]
    assert after[2:] == before[2:]
    assert all(params[k] is v for k, v in model.get_params(deep=False).items())


def fits_that_fail_change_nothing(subject):
    X, y, model = subject.X, subject.y, copy.copy(subject.fitted)
    before = state(subject, model)
    for rows, labels, options in (
        (X * np.nan, y, {}),
        (X, y[:-1], {}),
        (X, None, {}),
        (X, y, {"sample_weight": -np.ones(len(X))}),
    ):
        for name in ("fit", "partial_fit") if labels is not None else ("fit",):
            with pytest.raises(ValueError, match=r"\w"):
                getattr(model, name, model.fit)(rows, labels, **options)
            assert state(subject, model) == before
    net = model.estimator
    if net is not None and not isinstance(net, FrozenEstimator):
        failing = clone(net)
        failing.callbacks = [Fails()]
        model.set_params(estimator=failing)
        before = state(subject, model)
        with pytest.raises(KeyError, match="stop"):
            model.fit(X, y)
        assert state(subject, model) == before
    assert_same(answers(model, X), subject.answers, 0, 0)


def nothing_is_answered_before_fit(subject):
    model = clone(subject.model)
    words = f"This {type(model).__name__} instance"
    for name, options in questions(model):
        with pytest.raises(NotFittedError, match=words):
            getattr(model, name)(subject.X, **options)


# -------------------------------------------------------------------- parts that agree
def moments_agree(subject):
    model, X = subject.fitted, np.concatenate([subject.X[:6], 4 * subject.X[:3]])
    mean, variance = model.latent_mean_and_variance(X)
    same, cov = model.latent_mean_and_variance(X, full_cov=True)
    assert_allclose(same, mean, rtol=1e-9, atol=1e-12)
    assert_allclose(np.einsum("nkk...->nk...", cov), variance, rtol=1e-9, atol=1e-9)
    same, joint = model.latent_mean_and_variance(X, joint=True)
    assert_allclose(same, mean, rtol=1e-9, atol=1e-12)
    assert_allclose(joint, joint.T, atol=1e-12 * abs(joint).max())
    assert np.linalg.eigvalsh(joint).min() > -1e-9 * abs(joint).max()
    assert_allclose(joint.diagonal(), variance.ravel(), rtol=1e-7, atol=1e-12)
    if mean.ndim == 2:
        size = mean.shape[1]
        blocks = joint.reshape(9, size, 9, size)
        own = np.stack([blocks[n, :, n] for n in range(9)])
        assert_allclose(own, cov, rtol=1e-7, atol=1e-12)
    if getattr(model, "pred_type", "") == "glm":
        found = model.predictive(torch.as_tensor(X))
        if found[0].shape == mean.shape:  # one logit stands for two classes
            assert_allclose(found[0], mean, rtol=1e-7, atol=1e-12)
            assert_allclose(found[1], cov, rtol=1e-6, atol=1e-9)


def scores_are_finite(subject):
    for rows in (subject.X, 10 * subject.X + 10):
        scores = subject.fitted.score_samples(rows)
        assert scores.shape == (len(rows),)
        assert scores.dtype == np.float64
        assert np.isfinite(scores).all()
        assert (scores <= 0).all()


def draws_have_the_joint_moments(subject):
    if getattr(subject.model, "pred_type", "nn") == "nn":
        return  # a few networks tell no moments
    model, n_draws = subject.fitted, 4000
    mean, cov = model.latent_mean_and_variance(subject.X[:4], joint=True)
    draws = model.sample_latent(subject.X[:4], n_draws, random_state=1)
    assert draws.shape == (*mean.shape, n_draws)
    flat, std = draws.reshape(-1, n_draws), np.sqrt(cov.diagonal())
    # five standard errors of a mean; those of covariances are at most √2 times as large
    limit = 5 / np.sqrt(n_draws)
    assert (abs(flat.mean(1) - mean.ravel()) <= limit * std).all()
    scale = np.outer(std, std)
    assert (abs(np.cov(flat) - cov) <= 2**0.5 * limit * scale + 1e-12).all()


def probabilities_agree(subject):
    model, X, is_labels = subject.fitted, subject.X, subject.model.estimator is TAGS
    proba = model.predict_proba(X)
    assert proba.dtype == np.float64
    assert ((proba >= 0) & (proba <= 1)).all()
    assert_allclose(model.predict_log_proba(X), np.log(proba))
    predicted = model.predict(X)
    if is_labels:
        assert_array_equal(predicted, proba > 0.5)
    else:
        assert_allclose(proba.sum(1), 1)
        assert_array_equal(predicted, model.classes_[proba.argmax(1)])
        w = np.arange(len(X))
        right = (predicted == subject.y).reshape(len(X), -1).mean(1)
        expected = pytest.approx(np.average(right, weights=w))
        assert model.score(X, subject.y, sample_weight=w) == expected
        for k in (1, 2, len(model.classes_)):
            classes, best = model.predict_top_k(X, k)
            order = np.argsort(-proba, axis=1, kind="stable")[:, :k]
            assert_array_equal(classes, model.classes_[order])
            assert_allclose(best, np.take_along_axis(proba, order, 1), rtol=1e-9)
    drawn = model.sample_proba(X, 3, random_state=2)
    assert drawn.shape == (*proba.shape, 3)
    if hasattr(model, "sample_latent"):
        logits = model.sample_latent(X, 3, random_state=2)
        expected = expit(logits) if is_labels else softmax(logits, axis=1)
        assert_allclose(drawn, expected, rtol=1e-8)


def dirichlets_agree(subject):
    model, X = subject.fitted, subject.X
    largest = np.log(2 if subject.model.estimator is TAGS else len(model.classes_))
    for method in (None, *dirichlet.APPROXIMATIONS):
        for rows in (X, 1e6 * X):
            alpha = model.predict_dirichlet(rows, method)
            assert alpha.dtype == np.float64
            assert np.isfinite(alpha).all()
            assert (alpha > 0).all()
        found = model.predict_uncertainty(X, method)
        is_map = subject.model.estimator is MAPS
        total, *parts = np.moveaxis(found, 1 if is_map else -1, 0)
        assert_allclose(total, sum(parts), rtol=1e-12, atol=1e-12)
        assert (found >= 0).all()
        assert (total <= largest * (1 + 1e-12)).all()
        members = model.predict_set(X, method=method)
        assert members.dtype == bool
        if method is not None:
            alpha = model.predict_dirichlet(X, method)
            alpha = np.moveaxis(alpha, 1, -1) if is_map else alpha
            expected = dirichlet.plausible_classes(alpha, 0.05, 10, "top")
            expected = np.moveaxis(expected, -1, 1) if is_map else expected
            assert_array_equal(members, expected)
        assert members.any(-1 if subject.model.estimator is TAGS else 1).all()


def numbers_agree(subject):
    model, X, y = subject.fitted, subject.X, subject.y
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == y.shape
    same, cov = model.predict(X, return_cov=True)
    assert_allclose(same, mean, rtol=1e-9)
    covs = cov.reshape(len(X), len(X), -1)
    assert_allclose(np.einsum("nnk->nk", covs), std.reshape(len(X), -1) ** 2, rtol=1e-6)
    assert np.linalg.eigvalsh(covs[..., 0]).min() > 0
    interval = model.predict_interval(X, 0.9)
    both = model.predict_interval(X, [0.5, 0.9])
    assert_allclose(both[..., 1], interval, rtol=1e-12)
    quantiles = model.predict_quantiles(X, [0.05, 0.5, 0.95])
    assert_allclose(quantiles[..., [0, 2]], interval, rtol=1e-9)
    if model._noise_model is not None:
        numbers_follow_held_out_residuals(model, X, mean, std)
    elif has_noise(subject):
        half = norm.ppf(0.95) * std
        assert_allclose(interval, np.stack([mean - half, mean + half], -1), atol=1e-7)
        assert_allclose(quantiles[..., 1], mean, rtol=1e-9, atol=1e-9)
    assert model.score(X, y) == pytest.approx(r2_score(y, mean))
    if model._noise_model is None and has_noise(subject):
        _, variance = model.latent_mean_and_variance(X)
        total = variance + model.sigma_noise_**2
        assert_allclose(std**2, total.reshape(std.shape), rtol=1e-9)


def numbers_follow_held_out_residuals(model, X, mean, std):
    quantiles = model.predict_quantiles(X, np.linspace(0.001, 0.999, 999))
    assert (np.diff(quantiles, axis=-1) >= 0).all()
    latent, variance = model.latent_mean_and_variance(X)
    assert_allclose(mean.reshape(latent.shape), latent, rtol=1e-9, atol=1e-9)
    assert (std.reshape(latent.shape) ** 2 > variance).all()
    # the moments of a distribution are those of its quantiles, up to the tails
    error = abs(quantiles.mean(-1) - mean) / std
    assert error.max() < 0.05
    assert_allclose(quantiles.std(-1) / std, 1, atol=0.1)
    draws = model.sample_y(X, 2000)
    below = (draws <= model.predict_quantiles(X, 0.2)[..., None]).mean(-1)
    assert_allclose(below, 0.2, atol=5 * (0.16 / 2000) ** 0.5)


def numbers_drawn_have_the_moments(subject):
    # of few networks, or of as many as draws
    is_nn = getattr(subject.model, "pred_type", "nn") == "nn"
    n_draws = 500 if is_nn else 4000
    one = subject.fitted.predict_quantiles(subject.X, 0.3)
    assert one.shape == subject.y.shape
    draws = subject.fitted.sample_y(subject.X[:6], n_draws)
    mean, std = subject.fitted.predict(subject.X[:6], return_std=True)
    assert draws.shape == (*mean.shape, n_draws)
    if is_nn:
        # few networks tell a deviation to a third
        assert 0.6 < draws.std(-1).mean() / std.mean() < 1.5
        return
    assert (abs(draws.mean(-1) - mean) < 5 * std / n_draws**0.5).all()
    assert_allclose(draws.std(-1) / std, 1, atol=5 / (2 * n_draws) ** 0.5)


def has_noise(subject):
    return subject.model.estimator not in (OF_COUNTS, OF_VARIANCES)


def deviations_are_scaled_to_residuals(subject):
    model, (Z, y) = copy.deepcopy(subject.fitted), waves(200, dtype=np.float64)
    if not has_noise(subject):
        with pytest.raises(ValueError, match="recalibrate scales noise"):
            model.recalibrate(subject.X, subject.y)
        return
    Z, y = Z[60:], y[60:]
    if subject.y.ndim > 1:
        Z, y = subject.X, subject.y + 1
    mean, std = model.predict(Z, return_std=True)
    assert model.recalibrate(Z, y) is model
    expected = np.sqrt(np.mean(((y - mean) / std) ** 2, axis=0))
    assert_allclose(model.sigma_scaling_, np.atleast_1d(expected), rtol=1e-6)
    again, scaled = model.predict(Z, return_std=True)
    assert_array_equal(again, mean)
    assert_allclose(scaled, expected * std, rtol=1e-6)
    first = model.sigma_scaling_
    assert_allclose(model.recalibrate(Z, y).sigma_scaling_, first)
    assert (model.fit(subject.X, subject.y).sigma_scaling_ == 1).all()


def conformal_answers_contain_calibration_samples(subject):
    model, (Z, y) = copy.deepcopy(subject.fitted), (subject.X, subject.y)
    if is_classifier(model) and np.ndim(y) > 1:
        with pytest.raises(ValueError, match="needs one label per row"):
            model.conformalize(Z, y)
        return
    assert model.conformalize(Z, y) is model
    for coverage in (0.5, 0.8, 0.95):
        # rounding decides on the sample at an end
        least = np.ceil(coverage * (len(y) + 1)) - 1
        if is_classifier(model):
            members = model.predict_set(Z, q=1 - coverage, method="conformal")
            codes = np.searchsorted(model.classes_, y)
            assert members[np.arange(len(y)), codes].sum() >= least
            assert members[np.arange(len(y)), model.predict_proba(Z).argmax(1)].all()
            continue
        for method in ("conformal", "joint"):
            ends = model.predict_interval(Z, coverage, method=method)
            low, high = np.moveaxis(ends, -1, 0)
            inside = ((low <= y) & (y <= high)).reshape(len(y), -1)
            n_inside = inside.all(1).sum() if method == "joint" else inside.sum(0)
            assert (n_inside >= least).all()
            if subject.model.estimator is not OF_COUNTS:
                assert (low < high).all()
                if model._noise_model is None:  # without equal scores
                    assert (n_inside <= least + 1).all()
    pickled = pickle.loads(pickle.dumps(model))
    answer = "predict_set" if is_classifier(model) else "predict_interval"
    pair = (getattr(m, answer)(Z, method="conformal") for m in (pickled, model))
    assert_array_equal(*pair)
    assert_same(answers(model, Z), subject.answers, 0, 0)


# about training and storing, which does not depend on the kind of targets
OF_TRAINING = [
    contexts_of_the_caller_change_nothing,
    copies_answer_alike_and_share_nothing,
    a_clone_fits_alike,
    seeds_decide,
    files_are_answered_as_arrays,
    workers_change_no_bit,
    tensors_are_converted_or_refused,
    fits_change_nothing_but_the_estimator,
    fits_that_fail_change_nothing,
]
EVERY = [
    *OF_TRAINING,
    neither_batches_nor_order_matter,
    samples_of_a_frozen_net_are_exchangeable,
    questions_change_nothing,
    questions_that_fail_change_nothing,
    nothing_is_answered_before_fit,
    moments_agree,
    scores_are_finite,
    draws_have_the_joint_moments,
    conformal_answers_contain_calibration_samples,
]
OF_CLASSES_ONLY = [probabilities_agree, dirichlets_agree]
OF_NUMBERS_ONLY = [
    numbers_agree,
    numbers_drawn_have_the_moments,
    deviations_are_scaled_to_residuals,
]


# one subject of each kind of estimator, with contracts of training
FAST = {
    *("trained", "frozen", "search", "dropout", "ensemble", "swag", "variational"),
    *("pairs", "numbers"),
}


def contracts():
    """Return pairs of a contract and a subject's name, so that all pairs are tested."""
    for name, subject in SUBJECTS.items():
        some = OF_CLASSES_ONLY if is_classifier(subject.model) else OF_NUMBERS_ONLY
        for contract in EVERY + some:
            is_slow = contract in OF_TRAINING and name not in FAST
            marks = pytest.mark.slow if is_slow else ()
            id_ = f"{name}: {contract.__name__}"
            yield pytest.param((contract, name), id=id_, marks=marks)


@pytest.mark.parametrize("case", [*contracts()])
def test_contract(case):
    contract, name = case
    contract(SUBJECTS[name])


# ------------------------------------------------------ every posterior of a frozen net
def under(prior_precision, structure="kron", subset="last_layer", **settings):
    kinds = {"hessian_structure": structure, "subset_of_weights": subset}
    return {"prior_precision": prior_precision, **kinds, **settings}


NINE = {"n_weights": 9}
SETTINGS = [
    under(1.0),
    under("marglik"),
    under("marglik", refine=True),
    under("marglik", "lowrank", structure_params={"rank": 4}),
    under(1.0, "gp", "all", prior_structure="layerwise"),
    under("marglik", "nystrom"),
    under(1.0, subset="all", refine=True),
    under(1.0, "variational", "all"),
    under("marglik", curvature="ef"),
    under(1.0, subset="trainable"),
    under("marglik", "full", "subnetwork", subset_params=NINE),
    under(1.0, subset="subnetwork", subset_params=NINE | {"by": "swag"}),
    under(1.0, curvature="ggn_mc", curvature_params={"n_draws": 3}, refine=True),
    under(1e4, "full", "all", curvature="hessian"),
    under(1.0, "diag", prior_structure="diag"),
    under("marglik", prior_structure="layerwise"),
    under(1.0, subset="all"),
    under(1.0, "full", "all"),
]


def frozen(kind, settings):
    """Return an unfitted estimator and its samples."""
    if kind is LaplaceClassifier:
        return kind(FROZEN, random_state=0, **settings), X, Y
    prior = settings["prior_precision"]
    noise = prior if isinstance(prior, str) else 0.2
    return kind(FROZEN_REG, sigma_noise=noise, random_state=0, **settings), X_REG, Y_REG


def assert_same_posterior(model, other, X, tolerance):
    for found, expected in zip(
        model.latent_mean_and_variance(X, full_cov=True),
        other.latent_mean_and_variance(X, full_cov=True),
        strict=True,
    ):
        assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    evidences = [m.log_marginal_likelihood_value_ for m in (model, other)]
    assert_allclose(*evidences, rtol=tolerance)


every_setting = pytest.mark.parametrize("settings", SETTINGS)
both_kinds = pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])


@every_setting
@both_kinds
def test_neither_batches_nor_order_of_training_samples_matter(kind, settings):
    model, X, y = frozen(kind, settings)
    order = np.random.default_rng(1).permutation(len(X))
    whole = clone(model).fit(X, y)
    for batch_size, rows in ((59, ...), (1000, order)):  # one sample is left
        model.set_params(batch_size=batch_size).fit(X[rows], y[rows])
        assert_same_posterior(model, whole, X, 1e-10)
    shuffled = whole.latent_mean_and_variance(X[order])
    for there, here in zip(whole.latent_mean_and_variance(X), shuffled, strict=True):
        assert_array_equal(there[order], here)


@every_setting
@both_kinds
def test_integer_weights_are_repeated_samples(kind, settings):
    model, X, y = frozen(kind, settings)
    counts = np.random.default_rng(3).integers(0, 4, len(X))
    repeated = clone(model).fit(X.repeat(counts, 0), y.repeat(counts))
    assert_same_posterior(model.fit(X, y, counts), repeated, X, 1e-8)


@every_setting
@both_kinds
def test_workers_change_no_bit(kind, settings):
    model, X, y = frozen(kind, settings | {"batch_size": 20})
    alone = clone(model).fit(X, y)
    with joblib.parallel_config(backend="threading"):
        assert_same_posterior(model.set_params(n_jobs=2).fit(X, y), alone, X, 0)
    dense = (m.posterior_.structure.dense() for m in (model, alone))
    assert torch.equal(*dense)


@every_setting
@both_kinds
@pytest.mark.usefixtures("rng_untouched")
def test_samples_in_parts_are_one_fit(kind, settings):
    # what is tuned would be tuned on other samples
    settings = {**settings, "prior_precision": 1e4, "refine": False}
    if settings["subset_of_weights"] == "subnetwork":
        settings["subset_params"] = {"indices": [0, 3, 5, 11]}
    model, X, y = frozen(kind, settings)
    w = 0.5 + np.arange(len(X)) % 3
    whole = clone(model).fit(X, y, w)
    first, *others = np.array_split(np.random.default_rng(0).permutation(60), 3)
    model.fit(X[first], y[first], w[first])
    for rows in others:
        assert model.partial_fit(X[rows], y[rows], sample_weight=w[rows]) is model
    assert_same_posterior(model, whole, X, 1e-9)
