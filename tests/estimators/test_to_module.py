"""Modules from `to_module` equal their estimators, and run without sklaplace."""

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from nets import (
    MLP,
    LinearModel,
    SharpMLP,
    SoftmaxMLP,
    TinyCNN,
    binary_classifier,
    classifier,
    regressor,
)
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRanker, LaplaceRegressor
from sklaplace.likelihoods import DensityLikelihood, HeteroscedasticNLLLoss

rng = np.random.default_rng(0)
X = rng.standard_normal((200, 2)).astype("f4")
LABELS = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
TARGETS = np.sin(X[:, 0]) + np.exp(X[:, 1] / 2) * rng.standard_normal(200) / 9
FAR = np.concatenate([X[:20], 30 * X[:5]])
QUICK = {"prior_precision": 1.0, "random_state": 0}


CLASSIFIERS = {
    **{
        structure: LaplaceClassifier(classifier(), hessian_structure=structure, **QUICK)
        for structure in ("kron", "diag", "full", "lowrank", "gp", "nystrom")
    },
    **{
        link: LaplaceClassifier(classifier(), link_approx=link, **QUICK)
        for link in ("mean_field", "probit", "probit_uncentred", "sodpp")
    },
    "default": LaplaceClassifier(random_state=0),
    "no residual": LaplaceClassifier(classifier(), residual="none", **QUICK),
    "refined": LaplaceClassifier(classifier(), random_state=0),
    "scaled logits": LaplaceClassifier(classifier(SharpMLP()), **QUICK),
    "softmax": LaplaceClassifier(
        classifier(SoftmaxMLP(), criterion=nn.NLLLoss), **QUICK
    ),
    "no bias": LaplaceClassifier(
        classifier(LinearModel(n_out=3, bias=False, dtype=torch.float32)), **QUICK
    ),
}
REGRESSORS = {
    "default": LaplaceRegressor(random_state=0),
    "constant noise": LaplaceRegressor(sigma_noise="homoscedastic", random_state=0),
    "net": LaplaceRegressor(regressor(), normalize_y=True, random_state=0),
    "full": LaplaceRegressor(regressor(), hessian_structure="full", **QUICK),
}


DTYPES = dict.fromkeys(CLASSIFIERS, torch.float32) | {"default": torch.float64}


def compared(model, module, rows, **options):
    """Return pairs of results of the module and of the estimator."""
    dtype = next(model.estimator_.module_.parameters()).dtype
    found = module(torch.as_tensor(rows, dtype=dtype))
    expected = [*model.latent_mean_and_variance(rows)]
    if hasattr(model, "classes_"):
        expected.append(model.predict_proba(rows))
    elif len(found) == 3:
        expected.append(model.predict_interval(rows, **options))
    return zip(found, expected, strict=True)


def check(model, module, rows=FAR, rtol=1e-5, **options):
    for found, expected in compared(model, module, rows, **options):
        assert found.shape == expected.shape
        tolerance = rtol * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=tolerance)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_equals_classifier(name):
    model = CLASSIFIERS[name].fit(X, LABELS)
    check(model, model.to_module())


@pytest.mark.parametrize("coverage", [0.5, 0.95, None])
@pytest.mark.parametrize("name", REGRESSORS)
def test_equals_regressor(name, coverage):
    y = TARGETS if name in ("default", "constant noise") else TARGETS.astype("f4")
    model = REGRESSORS[name].fit(X, y)
    options = {} if coverage is None else {"coverage": coverage}
    check(model, model.to_module(coverage), **options)


@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_equals_estimators_of_large_columns(kind):
    """The last column has the size of times in microseconds."""
    times = 1.7e15 + 3e13 * np.random.default_rng(1).standard_normal((200, 1))
    rows = np.hstack([X, times])
    y = LABELS if kind is LaplaceClassifier else TARGETS
    model = kind(random_state=0).fit(rows, y)
    check(model, model.to_module(), rows)


def test_equals_other_targets():
    y = np.column_stack([TARGETS, 5 + X[:, 0] * TARGETS])
    model = LaplaceRegressor(random_state=0).fit(X, y).recalibrate(X[::2], y[::2])
    check(model, model.to_module())
    model = LaplaceClassifier(random_state=0).fit(X, np.column_stack([X > 0, X > 1]))
    check(model, model.to_module())
    net = regressor(MLP(n_out=2), criterion=HeteroscedasticNLLLoss)
    model = LaplaceRegressor(net, **QUICK).fit(X, TARGETS[:, None].astype("f4"))
    check(model, model.to_module(coverage=None))


@pytest.mark.parametrize("column", ["levels", "numbers", "plain"])
@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_data_frames_need_numbers_without_missing_values(kind, column):
    """Regression test: the module expected hidden columns of the encoding."""
    rows = pd.DataFrame({"a": X[:, 0], "b": X[:, 1]})
    if column == "levels":
        rows["b"] = pd.Categorical(np.array(list("xyz"))[LABELS])
    elif column == "numbers":
        rows.loc[3, "b"] = np.nan
    model = kind(random_state=0).fit(rows, LABELS)
    if column != "plain":
        with pytest.raises(ValueError, match="cannot encode the strings, categories"):
            model.to_module()
        return
    found = model.to_module()(torch.tensor(rows.to_numpy(float)))[2]
    is_classifier = kind is LaplaceClassifier
    method = model.predict_proba if is_classifier else model.predict_interval
    np.testing.assert_allclose(found, method(rows), rtol=1e-6)


class Stored(MLP):
    """A module that keeps an activation with its graph."""

    def forward(self, X):
        self.last = self.hidden(X)
        return self.head(self.last)


class Tokens(nn.Module):
    """A module with an embedding of integers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(12, 1)

    def forward(self, X):
        return self.head(self.embedding(X).flatten(1))


def test_equals_unusual_networks():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stored, embedding = Stored(), Tokens()
    model = LaplaceClassifier(classifier(stored), **QUICK).fit(X, LABELS)
    check(model, model.to_module())
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 10, size=(400, 3))
    y = tokens[:, :1].astype("f4") + rng.standard_normal((400, 1)).astype("f4")
    model = LaplaceRegressor(regressor(embedding), random_state=0).fit(tokens, y)
    assert model._noise_model is not None
    for found, expected in zip(
        model.to_module()(torch.from_numpy(tokens)),
        [*model.latent_mean_and_variance(tokens), model.predict_interval(tokens)[:, 0]],
        strict=True,
    ):
        np.testing.assert_allclose(found.squeeze(), expected.squeeze(), atol=1e-5)
    binary = binary_classifier()
    model = LaplaceClassifier(binary, **QUICK).fit(X, LABELS > 0)
    check(model, model.to_module())


@pytest.mark.parametrize("size", [8, 20])  # more than 256 pixels are hashed
def test_equals_image_classifier(size):
    images = rng.standard_normal((60, 1, size, size)).astype("f4")
    net = NeuralNetClassifier(
        TinyCNN, criterion=nn.CrossEntropyLoss, max_epochs=2, verbose=0
    )
    model = LaplaceClassifier(net, **QUICK).fit(images, np.arange(60) % 3)
    check(model, model.to_module(), images[:9])
    with pytest.raises(ValueError, match="per sample, as in fit"):
        model.to_module()(torch.from_numpy(images[:9, :, :-1]))


@pytest.fixture(scope="module")
def fitted():
    return LaplaceRegressor(random_state=0).fit(X, TARGETS)


class TestModule:
    def test_is_differentiable(self, fitted):
        module = fitted.to_module()
        x = torch.tensor(X[:3], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: module(x)[:2], x)

    def test_copies_and_casts(self, fitted):
        module, x = fitted.to_module(), torch.tensor(X[:9], dtype=torch.float64)
        expected = module(x)
        for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            for found, value in zip(same(x), expected, strict=True):
                assert torch.equal(found, value)
        emptied = copy.deepcopy(module)
        emptied.load_state_dict({k: 0 * v for k, v in module.state_dict().items()})
        emptied.load_state_dict(module.state_dict())
        for found, value in zip(emptied(x), expected, strict=True):
            assert torch.equal(found, value)

    def test_one_row_needs_an_axis(self, fitted):
        for model in (fitted, LaplaceClassifier(classifier(), **QUICK).fit(X, LABELS)):
            module = model.to_module()
            dtype = next(module.parameters()).dtype
            with pytest.raises(ValueError, match=r"x has shape \(2,\)\. .* x\[None\]"):
                module(torch.tensor(X[0], dtype=dtype))
            module(torch.tensor(X[:1], dtype=dtype))

    @pytest.mark.parametrize("unit", [100.0, 0.01])
    def test_state_contains_the_noise(self, fitted, unit):
        """Regression test: numbers of the noise model stayed behind."""
        other = LaplaceRegressor(random_state=0).fit(X, unit * TARGETS)
        module = fitted.to_module()
        module.load_state_dict(other.to_module().state_dict())
        check(other, module)

    @pytest.mark.parametrize("name", ["kron", "full", "probit", "default"])
    def test_half_precision_is_for_the_network(self, name):
        model = CLASSIFIERS[name].fit(X, LABELS)
        expected = model.to_module()(torch.tensor(X, dtype=DTYPES[name]))
        module = model.to_module().bfloat16()
        found = module(torch.tensor(X, dtype=torch.bfloat16))
        for value, other in zip(found, expected, strict=True):
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, other, rtol=0.1, atol=0.1)
        assert all(b.dtype == torch.float64 for b in module.buffers(recurse=False))

    def test_leaves_the_estimator_alone(self):
        model = LaplaceClassifier(classifier(TinyDropout()), **QUICK).fit(X, LABELS)
        expected = model.predict_proba(X)
        module = model.to_module().train()
        check(model, module)
        model.estimator_.module_.requires_grad_(True)
        assert not any(p.requires_grad for p in module.parameters())
        module.load_state_dict({k: 0 * v for k, v in module.state_dict().items()})
        np.testing.assert_array_equal(model.predict_proba(X), expected)

    def test_threads_do_not_mix_samples(self):
        module = LaplaceClassifier(classifier(), **QUICK).fit(X, LABELS).to_module()
        parts = torch.tensor(X).split(20)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda part: module(part)[2], 20 * parts))
        expected = [module(part)[2] for part in parts]
        for n, proba in enumerate(found):
            torch.testing.assert_close(proba, expected[n % len(parts)])


class TinyDropout(MLP):
    """A module with dropout, which is off in predictions."""

    def forward(self, X):
        return self.head(nn.functional.dropout(self.hidden(X), 0.5, self.training))


LOADING = """
import sys
sys.modules["sklaplace"] = sys.modules["skorch"] = sys.modules["sklearn"] = None
import torch
program, x, expected = sys.argv[1:]
for found, value in zip(
    torch.export.load(program).module()(torch.load(x)), torch.load(expected)
):
    torch.testing.assert_close(found, value)
"""


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(LaplaceClassifier(classifier(), **QUICK), id="classifier"),
        pytest.param(
            LaplaceRegressor(random_state=0), id="regressor", marks=pytest.mark.slow
        ),
    ],
)
def test_export_loads_without_this_package(model, tmp_path):
    y = LABELS if isinstance(model, LaplaceClassifier) else TARGETS
    module = model.fit(X, y).to_module()
    dtype = next(model.estimator_.module_.parameters()).dtype
    x, batch = torch.tensor(X, dtype=dtype), {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(
        module, (x[:3],), dynamic_shapes=(batch,), strict=False
    )
    paths = [tmp_path / name for name in ("model.pt2", "x.pt", "expected.pt")]
    torch.export.save(program, paths[0])
    torch.save(x, paths[1])
    torch.save(module(x), paths[2])
    arguments = [sys.executable, "-c", LOADING, *map(str, paths)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


class OwnInfer(NeuralNetClassifier):
    """A net that scales the inputs outside its module."""

    def infer(self, x, **fit_params):
        return super().infer(2 * x, **fit_params)


def test_refusals():
    net = classifier()
    for options, message in {
        ("pred_type", "nn"): "needs pred_type='glm'",
        ("subset_of_weights", "all"): "needs subset_of_weights='last_layer'",
        (
            "link_approx",
            "gumbel",
        ): "link_approx='gumbel' has no closed.*mc, mean_field, probit",
    }.items():
        model = LaplaceClassifier(net, **QUICK, **dict([options])).fit(X, LABELS)
        with pytest.raises(ValueError, match=message):
            model.to_module()
    own = OwnInfer(MLP, criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0)
    model = LaplaceClassifier(own, **QUICK).fit(X, LABELS)
    with pytest.raises(ValueError, match="OwnInfer with its own infer"):
        model.to_module()
    net = NeuralNetRegressor(MLP, module__n_out=1, criterion=nn.PoissonNLLLoss)
    net.set_params(max_epochs=1, verbose=0)
    counts = np.round(np.exp(X[:, :1]))
    model = LaplaceRegressor(net, **QUICK).fit(X, counts)
    with pytest.raises(ValueError, match="Intervals of Poisson have no closed form"):
        model.to_module()
    check(model, model.to_module(coverage=None))
    model = LaplaceRegressor(**QUICK).fit(X, TARGETS)
    for coverage in (0, 1, 1.5, "90", np.nan, [0.5, 0.9]):
        with pytest.raises((ValueError, TypeError), match="coverage"):
            model.to_module(coverage)
    # its last layer predicts two items of each sample
    pairs = rng.standard_normal((80, 2, 3)).astype("f4")
    model = LaplaceRanker(**QUICK).fit(pairs, pairs[:, 1, 0] > pairs[:, 0, 0])
    with pytest.raises(ValueError, match="outputs are the outputs of the network"):
        model.to_module()


@dataclass(frozen=True)
class Scaled(DensityLikelihood):
    """A Student's t log-density with a module as attribute."""

    layer: nn.Module

    def log_prob(self, f, y):
        scale = self.layer.bias.detach().to(f).exp()
        return torch.distributions.StudentT(4.0, f, scale).log_prob(y)


@pytest.mark.filterwarnings("ignore:The loss of the net:UserWarning")
def test_likelihood_that_holds_a_module():
    layer = nn.Linear(1, 1)
    model = LaplaceRegressor(regressor(), likelihood=Scaled(layer), **QUICK)
    model.fit(X, TARGETS)
    mean, _ = model.to_module(coverage=None)(torch.as_tensor(X))
    np.testing.assert_allclose(mean.numpy()[:, 0], model.predict(X), atol=1e-5)
