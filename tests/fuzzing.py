"""Random configurations of estimators, data and calls, and what must hold for each.

A `Configuration` consists of names, so that a failing one can be read and repeated;
the dictionaries below say what the names stand for. `violations` returns what went
wrong: an error of another type or that names no argument involved, results that are
not finite, or anything changed that a failed call must leave alone.
"""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import pandas as pd
import torch
from conftest import global_rng_states
from nets import MLP, EmbeddingNet, classifier, regressor, seeded
from scipy import sparse
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from sklearn.utils._param_validation import (
    StrOptions,
    generate_valid_param,
    make_constraint,
)
from skorch.dataset import Dataset
from torch import nn
from torch.utils.data import Subset, TensorDataset

import sklaplace
from sklaplace.estimators.options.constraints import CONSTRAINTS
from sklaplace.posterior.variational import POSTERIORS
from sklaplace.posterior.variational.priors import PRIORS

N, FEATURES = 24, 2
ERRORS = ValueError, TypeError, NotFittedError
CLASSIFIERS = [
    "LaplaceClassifier",
    "LaplaceClassifierCV",
    "MCDropoutClassifier",
    "DeepEnsembleClassifier",
    "VariationalClassifier",
    "SWAGClassifier",
]
REGRESSORS = [name.replace("Classifier", "Regressor") for name in CLASSIFIERS]
ESTIMATORS = [*CLASSIFIERS, *REGRESSORS, "LaplaceRanker"]
# counts that are set to two, to save time
CHEAP = "n_samples", "n_estimators", "cv", "n_snapshots", "steps_per_snapshot"
# Laplace has more parameters than the others together
WEIGHTED = [*ESTIMATORS, *["LaplaceClassifier", "LaplaceRegressor"] * 4]


# -------------------------------------------------------------------------- networks
class DropoutMLP(MLP):
    """With a dropout layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.3)

    def forward(self, X):
        return self.head(self.dropout(torch.tanh(self.hidden(X))))


class NaNWeights(MLP):
    """With a weight that is not a number."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.head.weight[0, 0] = float("nan")


def _net(kind, module=MLP, **params):
    return kind(module, max_epochs=1, **params)


def _trained(kind):
    X, y = good(kind is classifier)
    return seeded(_net(kind), X, y)


# name -> network, given `classifier` or `regressor`
NETS: dict[str, Callable[[Any], Any]] = {
    "default": lambda kind: None,
    "mlp": _net,
    "dropout": lambda kind: _net(kind, DropoutMLP),
    "no split": lambda kind: _net(kind, train_split=None),
    "frozen": lambda kind: FrozenEstimator(_trained(kind)),
    "one output": lambda kind: _net(kind, module__n_out=1),
    "embedding": lambda kind: _net(kind, EmbeddingNet),
    "other task": lambda kind: _net(regressor if kind is classifier else classifier),
    "other criterion": lambda kind: _net(kind, criterion=nn.HuberLoss),
    "bce": lambda kind: _net(kind, criterion=nn.BCEWithLogitsLoss),
    "nan weights": lambda kind: _net(kind, NaNWeights),
    "nan step": lambda kind: _net(kind, lr=float("inf")),
    "no epoch": lambda kind: kind(max_epochs=0),
    "other library": lambda kind: LogisticRegression(),
    "number": lambda kind: 3,
}
USUAL_NETS = ["default", "mlp", "dropout", "no split", "frozen"]


# ------------------------------------------------------------------------ parameters
def _values(*values: Any) -> dict[str, Any]:
    return {repr(value): value for value in values}


ODD = {
    **_values(None, True, -1, 0, 1, 2, 1.5, -0.5, 1e300, 1e-300, 2**70, 1j, "typo", ""),
    **_values([], {}, (1, 2), [0.5], {"a": 1}, b"kron", np.int64(2), np.float32(0.5)),
    **_values(float("nan"), float("inf"), float("-inf")),
    "array": np.array([0.5, 1.0]),
    "negative array": np.array([-0.5, 1.0]),
    "tensor": torch.tensor(0.5),
    "object": object(),
    "function": len,
    "class": dict,
}
# usual values where the constraints do not have them
SPECIAL = {
    "subset_of_weights": _values("all", "last_layer", "subnetwork", ["head"], ["x"]),
    "subset_params": _values(
        *[None, {"n_weights": 3}, {"by": "random"}, {"n": 1}, {"lr": 0.1}],
        {"by": "swag", "n_weights": 3, "n_snapshots": 2, "lr": 0.1},
    ),
    "structure_params": _values(None, {"rank": 2}, {"rank": -1}, {"ranks": 2}),
    "curvature_params": _values(None, {"n_draws": 2}, {"n_draws": 0}, {"n": 2}),
    "prior_precisions": _values(None, [0.1, 1.0], [1.0], [], [-1.0], "auto"),
    "prior_mean": _values(0.0, 0.3, "map"),
    "random_state": _values(None, 0, 7),
    "verbose": _values(0),
    "distributed": _values(False),
    "class_weight": _values(None, "balanced", "balance", {0: 2.0}, {"a": 1.0}),
    "cv": {**_values(2, 3, 1), "KFold": KFold(2), "pairs": [([0, 1], [2, 99])]},
    "scoring": _values(None, "accuracy", "r2", "neg_log_loss", ["r2"]),
    "n_jobs": _values(None, 1),
    "n_samples": _values(1, 2, 8),
    "posterior": _values(*POSTERIORS),
    "posterior_params": _values(None, {"n_units": 2}, {"n": 1}),
    "prior": _values(*PRIORS, None),
    "prior_params": _values(None, {"pi": 0.5}),
    "likelihood": _values(None, "categorical", "gaussian", "poisson", "ordinal"),
    "memory": _values(None),
}
# these run processes, write files or take as long as they say
PLAIN_ONLY = {
    "n_jobs": _values(0, "two", 1.5),
    "distributed": _values(True, None, "yes", 2),
    "memory": _values(3, [], 1.5),
    "verbose": _values(None, "yes", -1),
    **dict.fromkeys(
        ["n_shards", "n_snapshots", "steps_per_snapshot", "n_estimators"],
        _values(0, -1, 1.5, "two", True, float("nan")),
    ),
}


def _allowed(constraints: list[Any]) -> list[Any]:
    """Return all names, and one value of every other constraint."""
    found = []
    for constraint in map(make_constraint, constraints):
        is_names = isinstance(constraint, StrOptions)
        value = generate_valid_param(constraint)
        found += sorted(constraint.options) if is_names else [value]
    return found


USUAL = SPECIAL | {
    name: _values(*_allowed(constraints))
    for name, constraints in CONSTRAINTS.items()
    if name not in SPECIAL
}


def values(name: str) -> dict[str, Any]:
    """Return usual and odd values of a constructor parameter."""
    return USUAL.get(name, {}) | PLAIN_ONLY.get(name, ODD)


def parameters(estimator: str) -> list[str]:
    """Return the constructor parameters that configurations set, in order."""
    names = list(signature(getattr(sklaplace, estimator)).parameters)
    return [name for name in names if name != "estimator"]


# ------------------------------------------------------------------------------ data
def good(is_classifier: bool, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets that are in order."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, FEATURES)).astype(np.float32)
    if is_classifier:
        return X, np.arange(n) % 3
    return X, np.sin(X[:, :1]).astype(np.float32)


def _with(value: Any, dtype: Any = None) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that sets the fourth entry of a copy."""

    def change(values: np.ndarray) -> np.ndarray:
        changed = values.astype(dtype or values.dtype)
        changed.reshape(-1)[3] = value
        return changed

    return change


def _read_only(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


def _frame(*columns: Any) -> Callable[[np.ndarray], pd.DataFrame]:
    return lambda X: pd.DataFrame({"a": X[:, 0], "b": list(columns) * (len(X) // 2)})


# name -> function of inputs (n, 2) that are in order
INPUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "good": lambda X: X,
    "longdouble": lambda X: X.astype(np.longdouble),
    "NaN": _with(np.nan),
    "masked": lambda X: np.ma.masked_array(X, X > 1),
    "read-only": lambda X: _read_only(X.copy()),
    "ragged": lambda X: [[1.0, 2.0], [1.0]] * (len(X) // 2),
    "1-d": lambda X: X[:, 0],
    "more columns": lambda X: np.hstack([X, X]),
    "no samples": lambda X: X[:0],
    "one sample": lambda X: X[:1],
    "DataFrame with NA": _frame(pd.NA, 1.0),
    "DataFrame with dates": _frame(pd.Timestamp("2020"), pd.NaT),
    "categorical DataFrame": lambda X: pd.DataFrame(X).astype("category"),
    "sparse": lambda X: sparse.csr_array(X),
    "tensor": lambda X: torch.from_numpy(X.copy()),
    "bfloat16 tensor": lambda X: torch.from_numpy(X).bfloat16(),
    "meta tensor": lambda X: torch.empty(X.shape, device="meta"),
    "unequal dict": lambda X: {"X": X, "b": X[:3]},
    "tuple": lambda X: (X,),
    "Dataset": lambda X: Dataset(X, good(True, len(X))[1]),
    "TensorDataset": lambda X: TensorDataset(torch.from_numpy(X)),
    "Subset": lambda X: Subset(Dataset(X, good(True, len(X))[1]), [2, 0, 1] * 8),
    "None": lambda X: None,
}

# name -> function of targets that are in order, (n,) or (n, 1)
TARGETS: dict[str, Callable[[np.ndarray], Any]] = {
    "good": lambda y: y,
    "1-d": lambda y: y.reshape(-1),
    "indicators": lambda y: np.eye(3)[np.arange(len(y)) % 3],
    "two classes": lambda y: np.arange(len(y)) % 2,
    "one class": lambda y: np.zeros(len(y), int),
    "counts": lambda y: (np.arange(len(y)) % 7).reshape(-1, 1).astype(np.float32),
    "NaN": _with(np.nan, float),
    "mixed": lambda y: np.array([1, "a", None, 2.5] * 6, dtype=object),
    "masked": lambda y: np.ma.masked_array(y, np.zeros(y.shape, bool)),
    "categories": lambda y: pd.Series(list("abc") * 8, dtype="category"),
    "sparse": lambda y: sparse.csr_array(np.eye(3, dtype=int)[np.arange(len(y)) % 3]),
    "tensor": lambda y: torch.from_numpy(y.copy()),
    "shorter": lambda y: y[:-1],
    "number": lambda y: 3,
    "ragged": lambda y: [[1], [1, 2]] * (len(y) // 2),
}

# name -> function of the number of samples
WEIGHTS: dict[str, Callable[[int], Any]] = {
    "None": lambda n: None,
    "ones": lambda n: np.ones(n),
    "list": lambda n: [1.0, 2.0] * (n // 2),
    "tensor": lambda n: torch.ones(n),
    "random": lambda n: np.random.default_rng(0).uniform(0.5, 1.5, n),
    "some zero": lambda n: np.arange(n) % 2.0,
    "all zero": lambda n: np.zeros(n),
    "negative": lambda n: -np.ones(n),
    "NaN": lambda n: np.full(n, np.nan),
    "shorter": lambda n: np.ones(n - 1),
}


# ----------------------------------------------------------------------------- calls
# method -> names of its arguments beside data, with odd and usual values
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "predict": {"return_std": _values(True, False), "return_cov": _values(True, False)},
    "predict_proba": {},
    "predict_log_proba": {},
    "predict_interval": {"coverage": _values(0.9, [0.5, 0.9], [], 0.0, 1.0) | ODD},
    "predict_quantiles": {"alpha": _values(0.1, [0.1, 0.9], [], 0.0, 1.0) | ODD},
    "predict_dirichlet": {"method": _values("bridge", "projection") | ODD},
    "predict_uncertainty": {"method": _values("bridge", "mc") | ODD},
    "predict_top_k": {"k": _values(2) | ODD},
    "predict_set": {"q": _values(0.05) | ODD, "k_max": _values(2, 10) | ODD},
    "sample_proba": {"n_samples": _values(2) | ODD, "random_state": _values(0) | ODD},
    "sample_y": {"n_samples": _values(2) | ODD, "random_state": _values(0) | ODD},
    "sample_latent": {"n_samples": _values(2) | ODD, "random_state": _values(0) | ODD},
    "latent_mean_and_variance": {
        "full_cov": _values(True, False),
        "joint": _values(True, False),
    },
    "tune": {"parameters": _values(None, "prior_precision", []) | ODD},
    "log_marginal_likelihood": {},
    "predictive": {},
    "predict_score": {},
    "score": {},
    "partial_fit": {},
    "recalibrate": {},
}
WITHOUT_DATA = {"log_marginal_likelihood"}
WITH_TARGETS = {"score", "partial_fit", "recalibrate", "tune"}
# names of arguments for X, where they differ
INPUT_NAMES = {"predictive": "x", "predict_score": "items"}


@dataclass(frozen=True)
class Call:
    """A call of a method: names of its data and of its other arguments."""

    method: str
    X: str = "good"
    y: str = "good"
    sample_weight: str = "None"
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """An estimator, what it is fitted to, and what is called after that."""

    estimator: str
    net: str = "mlp"
    params: dict[str, str] = field(default_factory=dict)
    fit: Call = field(default_factory=lambda: Call("fit"))
    X_val: str | None = None
    y_val: str | None = None
    calls: tuple[Call, ...] = ()

    @property
    def is_classifier(self) -> bool:
        """Whether targets are classes."""
        return self.estimator not in REGRESSORS

    def model(self) -> Any:
        """Return the estimator."""
        params = {name: values(name)[value] for name, value in self.params.items()}
        net = NETS[self.net](classifier if self.is_classifier else regressor)
        cheap = {name: 2 for name in CHEAP if name in parameters(self.estimator)}
        return getattr(sklaplace, self.estimator)(net, **cheap | params)

    def data(self, X: str, y: str) -> tuple[Any, Any]:
        """Return inputs and targets of these names; those of a ranker are pairs."""
        good_X, good_y = good(self.is_classifier)
        made = INPUTS[X](good_X)
        if self.estimator == "LaplaceRanker":
            good_y = good_y % 2
            if type(made) is np.ndarray and made.ndim == 2:
                made = np.stack([made, made[::-1]], 1)
        return made, TARGETS[y](good_y)


# ---------------------------------------------------------------------------- checks
def _contents(value: Any) -> Any:
    """Return what data consists of, for comparison."""
    if isinstance(value, dict):
        return {name: _contents(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_contents(part) for part in value]
    if isinstance(value, torch.Tensor):
        return repr((value, value.requires_grad, value.grad))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    return repr(value)


def _net_state(net: Any) -> Any:
    """Return weights, modes, flags, hooks and attributes of a network."""
    net = getattr(net, "estimator", net)
    module = getattr(net, "module_", net)
    if not isinstance(module, nn.Module):
        return _attributes(net) if hasattr(net, "get_params") else None
    parameters = list(module.parameters())
    return (
        _attributes(net),
        [p.detach().numpy().tobytes() for p in parameters],
        [p.requires_grad for p in parameters],
        [p.grad is None for p in parameters],
        [(m.training, len(m._forward_hooks)) for m in module.modules()],
    )


def _attributes(instance: Any) -> dict[str, int]:
    return {name: id(value) for name, value in vars(instance).items()}


def _global_state() -> Any:
    return (
        global_rng_states(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        np.geterr(),
    )


def _has_numbers(method: str, result: Any) -> bool:
    """Whether all numbers are finite; probabilities of zero have logarithms, too."""
    if method == "predict_log_proba":
        return not np.isnan(result).any()
    parts = result if isinstance(result, tuple) else (result,)
    arrays = [np.asarray(p.detach() if torch.is_tensor(p) else p) for p in parts]
    return all(
        bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind in "fc"
    )


def _names_one(message: str, names: set[str]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(name)}", message) for name in names)


NET_WORDS = {"network", "net", "module", "criterion", "estimator", "layer", "skorch"}


class Run:
    """One configuration that is run, and what was found wrong."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration, self.found = configuration, list[str]()
        self.model = configuration.model()
        self.is_fitted = False

    def all(self) -> list[str]:
        """Fit, call, and return what went wrong."""
        c = self.configuration
        self._check_fit(c)
        for call in c.calls:
            self._check(call)
        return self.found

    def _check_fit(self, c: Configuration) -> None:
        X, y = c.data(c.fit.X, c.fit.y)
        options = {}
        if c.X_val is not None:
            options["X_val"] = c.data(c.X_val, "good")[0]
        if c.y_val is not None:
            options["y_val"] = c.data("good", c.y_val)[1]
        names = {*c.params, *options, *NET_WORDS, "X", "y"}
        weight = WEIGHTS[c.fit.sample_weight](N)
        if weight is not None:
            options["sample_weight"] = weight
            names.add("sample_weight")
        self.is_fitted = self._run("fit", (X, y), options, names) is not None

    def _check(self, call: Call) -> None:
        method = getattr(self.model, call.method, None)
        if method is None or not self.is_fitted:
            return
        X, y = self.configuration.data(call.X, call.y)
        data = () if call.method in WITHOUT_DATA else (X,)
        needed = {"alpha": 0.1} if call.method == "predict_quantiles" else {}
        options: dict[str, Any] = needed | {
            name: ARGUMENTS[call.method][name][value]
            for name, value in call.arguments.items()
            if name in signature(method).parameters
        }
        if call.method in WITH_TARGETS:
            data = X, y
            options["sample_weight"] = WEIGHTS[call.sample_weight](N)
        if call.method == "predictive" and isinstance(X, np.ndarray):
            is_known = X.dtype.kind in "fiub" and X.dtype != np.longdouble
            data = (torch.as_tensor(X.copy()) if is_known else X,)
        names = {"X", "y", INPUT_NAMES.get(call.method, "X"), *options}
        names |= self.configuration.params.keys()
        self._run(call.method, data, options, names)

    def _run(
        self, name: str, data: tuple[Any, ...], options: dict[str, Any], names: set[str]
    ) -> Any:
        """Call a method, and compare everything around it with how it was."""
        where, result = f"{name}{tuple(options)}", None
        before = self._state(data, options)
        kept = {"net", "data", "global"}
        try:
            result = getattr(self.model, name)(*data, **options)
        except Exception as error:
            kept = before.keys()
            if not isinstance(error, ERRORS):
                self._wrong(where, f"raised {error!r}")
            elif not (
                isinstance(error, NotFittedError) or _names_one(str(error), names)
            ):
                self._wrong(where, f"no argument named by {error!r}")
        else:
            is_fit = name in ("fit", "partial_fit", "recalibrate")
            if not is_fit and not _has_numbers(name, result):
                self._wrong(where, "returned values that are not finite")
        after = self._state(data, options)
        for part in sorted(kept):
            if after[part] != before[part]:
                self._wrong(where, f"changed {part}")
        return result

    def _state(self, data: Any, options: Any) -> dict[str, Any]:
        return {
            "estimator": _attributes(self.model),
            "net": _net_state(getattr(self.model, "estimator", None)),
            "fitted net": _net_state(getattr(self.model, "estimator_", None)),
            "data": _contents((data, options)),
            "global": _global_state(),
        }

    def _wrong(self, where: str, what: str) -> None:
        self.found.append(f"{where}: {what}")


def violations(configuration: Configuration) -> list[str]:
    """Return what is wrong in a configuration, empty where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", FutureWarning)
        return Run(copy.deepcopy(configuration)).all()
