"""Random configurations: each call returns finite numbers or a clear error.

An error message names an argument of the call. An error changes nothing.
"""

import copy
import re
import warnings
from functools import cache
from inspect import signature

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import global_rng_states
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from nets import DropoutMLP, EmbeddingNet, blobs, classifier, regressor, seeded, waves
from refusals import CLASSIFIERS, REGRESSORS
from scipy import sparse
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.utils._param_validation import (
    StrOptions,
    generate_valid_param,
    make_constraint,
)
from skorch.dataset import Dataset
from torch import nn
from torch.utils.data import Subset, TensorDataset

from sklaplace import LaplaceClassifier, LaplaceRanker, LaplaceRegressor
from sklaplace.variational import POSTERIORS
from sklaplace.variational.priors import PRIORS

N, N_CONFIGURATIONS, N_PARTS = 24, 2_400, 8  # parts that workers share
# Laplace has more parameters than the others together
KINDS = [*CLASSIFIERS, *REGRESSORS, LaplaceRanker]
KINDS += [LaplaceClassifier, LaplaceRegressor] * 4
# counts that are set to two, to save time
CHEAP = "n_samples", "n_estimators", "cv", "n_snapshots", "steps_per_snapshot"


@cache
def trained(make):
    X, y = blobs(N) if make is classifier else waves(N, n_targets=1)
    return FrozenEstimator(seeded(make(max_epochs=1), X, y))


# given `classifier` or `regressor`; all but the first are out of the ordinary
NETS = {
    "mlp": lambda make: make(max_epochs=1),
    "default": lambda make: None,
    "dropout": lambda make: make(DropoutMLP, max_epochs=1),
    "frozen": trained,
    "embedding": lambda make: make(EmbeddingNet),
    "other task": lambda make: regressor() if make is classifier else classifier(),
    "other criterion": lambda make: make(criterion=nn.HuberLoss),
    "bce": lambda make: make(criterion=nn.BCEWithLogitsLoss),
    "nan step": lambda make: make(max_epochs=1, lr=float("inf")),
    "no epoch": lambda make: make(max_epochs=0),
    "other library": lambda make: LogisticRegression(),
    "number": lambda make: 3,
}
ODD = [None, True, -1, 0, 1, 2, 1.5, -0.5, 1e300, 1e-300, 2**70, 1j, "typo", ""]
ODD += [[], {}, (1, 2), [0.5], {"a": 1}, b"kron", np.float32(0.5), len, dict]
ODD += [float("nan"), float("inf"), np.array([-0.5, 1.0]), torch.tensor(0.5)]
# usual values where the constraints do not tell them
USUAL = {
    "subset_of_weights": ["all", "last_layer", "subnetwork", ["head"], ["x"]],
    "subset_params": [None, {"n_weights": 3}, {"by": "random"}, {"n": 1}],
    "structure_params": [None, {"rank": 2}, {"rank": -1}],
    "curvature_params": [None, {"n_draws": 2}, {"n_draws": 0}],
    "prior_precisions": [None, [0.1, 1.0], [-1.0]],
    "prior": [None, *PRIORS],
    "prior_params": [None, {"pi": 0.5}],
    "posterior": [*POSTERIORS],
    "posterior_params": [None, {"n_units": 2}],
    "class_weight": [None, "balanced", {0: 2.0}],
    "cv": [2, 3, 1, [([0, 1], [2, 99])]],
    "scoring": [None, "accuracy", "r2", "neg_log_loss"],
    "likelihood": [None, "categorical", "poisson"],
    "random_state": [0, 7, None],
}
# these run processes, write files or take as long as they say
PLAIN = {
    "n_jobs": [1, None, 0, "two"],
    "memory": [None, 3, []],
    "verbose": [0, None, "yes"],
    **{name: [2, 0, -1, 1.5, "two"] for name in CHEAP if name != "cv"},
}


def usual(kind, name):
    """Return allowed values of a parameter: all names, and one value per constraint."""
    if name in USUAL:
        return USUAL[name]
    found = []
    for constraint in map(make_constraint, kind._parameter_constraints[name]):
        is_names = isinstance(constraint, StrOptions)
        value = generate_valid_param(constraint)
        found += sorted(constraint.options) if is_names else [value]
    return found


def changed(values, value):
    values = values.astype(float)
    values.flat[3] = value
    return values


# functions of inputs (n, 2), of targets (n,) and of the number of samples; the first of
# each are in order
INPUTS = {
    "good": lambda X: X,
    "NaN": lambda X: changed(X, np.nan),
    "masked": lambda X: np.ma.masked_array(X, X > 1),
    "ragged": lambda X: [[1.0, 2.0], [1.0]] * (N // 2),
    "one axis": lambda X: X[:, 0],
    "more columns": lambda X: np.hstack([X, X]),
    "no samples": lambda X: X[:0],
    "one sample": lambda X: X[:1],
    "NA": lambda X: pd.DataFrame({"a": X[:, 0], "b": [pd.NA, 1.0] * (N // 2)}),
    "dates": lambda X: np.full(X.shape, "2020-01-01", "M8[D]"),
    "sparse": sparse.csr_array,
    "tensor": lambda X: torch.from_numpy(X.copy()),
    "bfloat16": lambda X: torch.from_numpy(X).bfloat16(),
    "meta": lambda X: torch.empty(X.shape, device="meta"),
    "unequal dict": lambda X: {"X": X, "b": X[:3]},
    "tuple": lambda X: (X,),
    "dataset": lambda X: Dataset(X, np.arange(N) % 3),
    "without targets": lambda X: TensorDataset(torch.from_numpy(X)),
    "subset": lambda X: Subset(Dataset(X, np.arange(N) % 3), [2, 0, 1] * 8),
    "None": lambda X: None,
}
TARGETS = {
    "good": lambda y: y,
    "column": lambda y: y.reshape(-1, 1),
    "indicators": lambda y: np.eye(3)[np.arange(N) % 3],
    "one class": lambda y: np.zeros(N, int),
    "counts": lambda y: np.arange(N) % 7,
    "NaN": lambda y: changed(y, np.nan),
    "mixed": lambda y: np.array([1, "a", None, 2.5] * 6, dtype=object),
    "categories": lambda y: pd.Series(list("abc") * 8, dtype="category"),
    "sparse": lambda y: sparse.csr_array(np.eye(3, dtype=int)[np.arange(N) % 3]),
    "tensor": lambda y: torch.from_numpy(y.copy()),
    "shorter": lambda y: y[:-1],
    "number": lambda y: 3,
    "None": lambda y: None,
}
WEIGHTS = {
    "None": None,
    "random": np.random.default_rng(0).uniform(0.5, 1.5, N),
    "some zero": np.arange(N) % 2.0,
    "all zero": np.zeros(N),
    "negative": -np.ones(N),
    "NaN": np.full(N, np.nan),
    "shorter": np.ones(N - 1),
}
# method -> values of its arguments; the first one is usual
METHODS = {
    "predict": {"return_std": [True, False], "return_cov": [True, False]},
    "predict_proba": {},
    "predict_log_proba": {},
    "predict_interval": {"coverage": [0.9, [0.5, 0.9], [], 0.0, 1.0, *ODD]},
    "predict_quantiles": {"alpha": [0.1, [0.1, 0.9], [], 0.0, 1.0, *ODD]},
    "predict_dirichlet": {"method": ["bridge", "projection", *ODD]},
    "predict_uncertainty": {"method": ["bridge", "mc", *ODD]},
    "predict_top_k": {"k": [2, *ODD]},
    "predict_set": {"q": [0.05, *ODD], "k_max": [2, 10, *ODD]},
    "sample_proba": {"n_samples": [2, *ODD], "random_state": [0, *ODD]},
    "sample_y": {"n_samples": [2, *ODD], "random_state": [0, *ODD]},
    "sample_latent": {"n_samples": [2, *ODD], "random_state": [0, *ODD]},
    "latent_mean_and_variance": {"full_cov": [True, False], "joint": [True, False]},
    "tune": {"parameters": [None, "prior_precision", [], *ODD]},
    "score": {},
    "partial_fit": {},
    "recalibrate": {},
}
WITH_TARGETS = {"fit", "score", "partial_fit", "recalibrate", "tune"}
# words that tell of the network
NET_WORDS = {"network", "net", "module", "criterion", "estimator", "layer", "skorch"}


def attributes(instance):
    return {name: id(value) for name, value in vars(instance).items()}


def surroundings(model, given):
    """Return the state that calls must not change: the net, data and global states."""
    net = getattr(model.estimator, "estimator", model.estimator)
    weights = getattr(net, "module_", nn.Module()).state_dict()
    return (
        attributes(net) if hasattr(net, "get_params") else net,
        {name: value.numpy().tobytes() for name, value in weights.items()},
        repr(given),
        global_rng_states(),
        (torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr()),
    )


def is_finite(method, answer):
    """Return whether all numbers are finite, or log-probabilities are not NaN."""
    arrays = map(np.asarray, answer if isinstance(answer, tuple) else (answer,))
    test = np.isnan if method == "predict_log_proba" else lambda a: ~np.isfinite(a)
    return not any(test(a).any() for a in arrays if a.dtype.kind in "fc")


def call(model, method, /, *data, **options):
    """Return whether the call succeeds with numbers or fails with a clear error."""
    before, own = surroundings(model, (data, options)), attributes(model)
    try:
        answer = getattr(model, method)(*data, **options)
        is_right = method in WITH_TARGETS or is_finite(method, answer)
    except (ValueError, TypeError, NotFittedError) as error:
        names = {"X", "y", *options, *model.get_params(deep=False), *NET_WORDS}
        named = rf"(?<!\w)({'|'.join(map(re.escape, names))})"
        is_right = bool(re.search(named, str(error))) and attributes(model) == own
    return is_right and surroundings(model, (data, options)) == before


class Configuration:
    """An estimator and its data, with at most two unusual parts."""

    PARTS = ("net", "params", "X", "y", "weights", "held out", "calls")

    def __init__(self, data):
        self.data = data
        self.odd = self.draw(st.lists(st.sampled_from(self.PARTS), max_size=2))
        self.kind = self.draw(st.sampled_from(KINDS))
        self.make = regressor if self.kind in REGRESSORS else classifier

    def draw(self, strategy):
        return self.data.draw(strategy)

    def some(self, values, part, n_usual=1):
        """Draw one of the first values, or any value if the part is unusual."""
        known = [*values] if part in self.odd else [*values][:n_usual]
        return self.draw(st.sampled_from(known))

    def model(self):
        names = [
            name for name in signature(self.kind).parameters if name != "estimator"
        ]
        params = {name: 2 for name in CHEAP if name in names}
        chosen = st.lists(st.sampled_from(names), max_size=4, unique=True)
        for name in self.draw(chosen):
            known = PLAIN.get(name) or usual(self.kind, name) + ODD
            params[name] = self.some(known, "params", 1 if name in PLAIN else 3)
        net = NETS[self.some(NETS, "net", 4)](self.make)
        return self.kind(net, **copy.deepcopy(params))

    def samples(self, *parts):
        X, y = blobs(N) if self.make is classifier else waves(N)
        part = next((part for part in parts if part in self.odd), None)
        inputs = INPUTS[self.some(INPUTS, part or "X")](X)
        if self.kind is LaplaceRanker:
            y = y % 2
            if type(inputs) is np.ndarray and inputs.ndim == 2:
                inputs = np.stack([inputs, inputs[::-1]], 1)
        return inputs, TARGETS[self.some(TARGETS, part or "y")](y)

    def check(self):
        """Fit the estimator and call some of its methods."""
        model = self.model()
        options = {"sample_weight": WEIGHTS[self.some(WEIGHTS, "weights")]}
        if self.draw(st.booleans()):
            held_out = self.samples("held out")
            options |= dict(zip(("X_val", "y_val"), held_out, strict=True))
        assert call(model, "fit", *self.samples(), **options)
        methods = [name for name in METHODS if hasattr(model, name)]
        for method in self.draw(st.lists(st.sampled_from(methods), max_size=5)):
            arguments = {
                name: self.some(values, "calls", 2)
                for name, values in METHODS[method].items()
                if name in signature(getattr(model, method)).parameters
            }
            X, y = self.samples("calls")
            data = [X, y] if method in WITH_TARGETS else [X]
            if hasattr(model, "estimator_"):
                assert call(model, method, *data, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(N_PARTS))
def test_every_configuration_works_or_is_refused(part):
    @seed(part)
    @settings(
        derandomize=False,
        max_examples=N_CONFIGURATIONS // N_PARTS,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", DeprecationWarning)
            warnings.simplefilter("error", FutureWarning)
            Configuration(data).check()

    run()
