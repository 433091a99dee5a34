"""Test cases for every device, made from the registries.

A `Case` is a function of a device that returns arrays. `CASES` lists the cases by name.
New registry entries are covered automatically. Some samples are equal, with equal and
with different targets. Weights are trained once on the CPU and copied to every device.
The exceptions are cases with ``trained_there``, because rounding and the random
generators of a GPU change the weights.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import segmentation
import tagging
import torch
from dirichlets import FUNCTIONS
from nets import (
    MLP,
    BatchNormMLP,
    SigmoidMLP,
    SoftmaxMLP,
    TinyCNN,
    binary_classifier,
    classifier,
    initialised,
    regressor,
    seeded,
    twin,
)
from sklearn.base import is_classifier
from sklearn.frozen import FrozenEstimator
from torch import nn

import sklaplace
from sklaplace import dirichlet
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.patches import LAYER_INPUTS
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subnetwork import SCORES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.dirichlet.links import LINKS
from sklaplace.estimators.dropout import DROPOUTS
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.likelihoods import CRITERIA
from sklaplace.posterior.tuning import TUNERS
from sklaplace.variational import POSTERIORS, PRIORS
from sklaplace.variational.elbo import KL_SCHEDULES

Arrays = list[np.ndarray]
N = 24
FIXED = {"prior_precision": 1.0, "random_state": 0}
ALL = FIXED | {"subset_of_weights": "all"}


@dataclass(frozen=True)
class Case:
    """A function from a device to arrays, and whether it trains on the device."""

    run: Callable[[str], Arrays]
    trained_there: bool = False


# ----------------------------------------------------------------------- data and nets
def samples(*shape: int) -> np.ndarray:
    """Return inputs (24, ...); the first, the fourth and the last are equal."""
    X = np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32)
    X[[3, -1]] = X[0]
    return X


def numbers(X: np.ndarray) -> np.ndarray:
    """Return targets (24,), which differ between equal samples."""
    return np.sin(X.reshape(N, -1)[:, 0] + np.arange(N) // 20).astype(np.float32)


# of three classes, the first and the fourth sample have the same, the last another
CLASSES = np.arange(N) % 3


SOFTMAX = nn.CrossEntropyLoss, nn.NLLLoss
SIGMOID = nn.BCEWithLogitsLoss, nn.BCELoss


def targets(criterion: Any, X: np.ndarray) -> np.ndarray:
    """Return targets that a criterion accepts."""
    if criterion in SOFTMAX:
        return CLASSES
    if criterion in SIGMOID:
        return CLASSES % 2
    counts = np.exp(numbers(X)).round()
    return counts if criterion is nn.PoissonNLLLoss else numbers(X)


def net_of(criterion: Any, module: Any = None, **params: Any) -> Any:
    """Return an untrained net for a criterion of the registry."""
    likelihood, convention = CRITERIA[criterion]
    if convention == "probabilities":
        module = SigmoidMLP if criterion in SIGMOID else SoftmaxMLP
    n_outputs = 3 if criterion in SOFTMAX else likelihood.n_outputs(1)
    kind = classifier if criterion in SOFTMAX else regressor
    kind = binary_classifier if criterion in SIGMOID else kind
    params = {"module__n_out": n_outputs, "max_epochs": 10, **params}
    return kind(module or MLP, criterion=criterion, **params)


@lru_cache
def trained(criterion: Any = nn.CrossEntropyLoss, module: Any = MLP) -> Any:
    """Return a net that was trained on the CPU."""
    X = samples(*SHAPES.get(module, (2,)))
    y = targets(criterion, X)
    y = y if criterion in SOFTMAX else y.astype(np.float32)
    net = net_of(criterion, module)
    return seeded(net, X, y if criterion in SOFTMAX + SIGMOID else y[:, None])


def on(net: Any, device: str, **params: Any) -> FrozenEstimator:
    """Return a net with the same weights on a device."""
    other = type(net)(**{**net.get_params(deep=False), "device": device, **params})
    return FrozenEstimator(twin(other, net))


def model_of(criterion: Any) -> Any:
    """Return the estimator class for a criterion."""
    classifies = CRITERIA[criterion][0].is_classification
    return sklaplace.LaplaceClassifier if classifies else sklaplace.LaplaceRegressor


def fitted(
    device: str,
    criterion: Any = nn.CrossEntropyLoss,
    module: Any = MLP,
    **settings: Any,
) -> tuple[Any, np.ndarray]:
    """Return an estimator around a trained net on a device, and the samples."""
    X = samples(*SHAPES.get(module, (2,)))
    net, y = on(trained(criterion, module), device), targets(criterion, X)
    model = model_of(criterion)(net, **FIXED | settings)
    if criterion is nn.MSELoss and "sigma_noise" not in settings:
        model.set_params(sigma_noise=0.3)
    is_held_out = {"auto", "validation"} & set(map(str, settings.values()))
    held_out = {"X_val": X[::2], "y_val": y[::2]} if is_held_out else {}
    return model.fit(X, y, **held_out), X


# ----------------------------------------------------------------------- architectures
def convolution(kind: Any, n_out: int = 3) -> nn.Module:
    """A layer for inputs with axes, and a head on the average over the axes."""
    average = getattr(nn, f"AdaptiveAvgPool{kind.__name__[-2:]}")(1)
    head = nn.Linear(4, n_out)
    return nn.Sequential(kind(2, 4, 2), nn.Tanh(), average, nn.Flatten(), head)


def dropping(kind: Any = nn.Dropout, n_out: int = 3) -> nn.Module:
    """A dropout layer between two linear layers, on two channels."""
    axes = 4, *[1] * ({nn.Dropout2d: 2, nn.Dropout3d: 3}.get(kind, 1) - 1)
    dropout = nn.Unflatten(1, (2, *axes)), kind(0.3), nn.Flatten()
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), *dropout, nn.Linear(8, n_out))


def pairs(n_out: int = 1) -> nn.Module:
    """Return scores of two items."""
    layers = nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, n_out, bias=False)
    return sklaplace.BradleyTerry(nn.Sequential(*layers))


SHAPES: dict[Any, tuple[int, ...]] = {
    partial(convolution, kind): (2, *[3] * int(kind.__name__[-2]))
    for kind in LAYER_INPUTS
    if kind is not nn.Linear
} | {TinyCNN: (1, 4, 4)}


# ---------------------------------------------------------------------- what is asked
# method -> keyword arguments of its calls
CALLS: dict[str, list[dict[str, Any]]] = {
    "latent_mean_and_variance": [{}, {"full_cov": True}, {"joint": True}],
    "sample_latent": [{"n_samples": 3, "random_state": 1}],
    "score_samples": [{}],
    "predict": [{}],
    "predict_proba": [{}],
    "predict_log_proba": [{}],
    "predict_dirichlet": [{"method": name} for name in dirichlet.APPROXIMATIONS],
    "predict_uncertainty": [
        {"method": name} for name in [None, "mc", *dirichlet.APPROXIMATIONS]
    ],
    "predict_set": [{"k_max": 2}],
    "sample_proba": [{"n_samples": 3, "random_state": 1}],
    "predict_quantiles": [{"alpha": [0.1, 0.6]}],
    "predict_interval": [{"coverage": 0.8}],
    "sample_y": [{"n_samples": 3, "random_state": 1}],
}


def brief(model: Any, X: np.ndarray) -> Arrays:
    """Return predictions and their Gaussian."""
    found = [*model.latent_mean_and_variance(X)]
    found.append((model.predict_proba if is_classifier(model) else model.predict)(X))
    if hasattr(model, "log_marginal_likelihood_value_"):
        found.append(np.asarray(model.log_marginal_likelihood_value_))
    return found


def every_method(model: Any, X: np.ndarray, device: str) -> Arrays:
    """Return the results of all methods that the estimator has."""
    found: list[Any] = []
    for method, calls in CALLS.items():
        for arguments in calls if hasattr(model, method) else ():
            found.append(getattr(model, method)(X, **arguments))
    if hasattr(model, "predict_quantiles"):
        found += model.predict(X, return_std=True)
        if model.n_targets_ == 1 if hasattr(model, "n_targets_") else True:
            found += model.predict(X, return_cov=True)
    if hasattr(model, "predictive"):
        found += differentiated(model, X, device)
        found.append(model.log_marginal_likelihood(2.0))
    if hasattr(model, "predict_score"):
        found += model.predict_score(X[:, 0], return_cov=True)
    return flat(found)


def differentiated(model: Any, X: np.ndarray, device: str) -> Arrays:
    """Return gradients of `predictive` and of the evidence."""
    found = []
    for joint in (False, True):
        rows = X[:4][:, None] if joint else X[:4]
        x = torch.tensor(rows, device=device, requires_grad=True)
        total = sum(part.sum() for part in model.predictive(x, joint=joint))
        found.append(torch.autograd.grad(total, x)[0].cpu().numpy())
    delta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = model.log_marginal_likelihood(delta)
    (gradient,) = torch.autograd.grad(value, delta)
    return [*found, value.detach().cpu().numpy(), gradient.numpy()]


def flat(values: Any) -> Arrays:
    """Yield the arrays in nested sequences."""
    if isinstance(values, list | tuple):
        return [array for value in values for array in flat(value)]
    return [np.asarray(values)]


# ---------------------------------------------------------------- cases, by registries
Cases = Iterator[tuple[str, Case]]


def case_of(*args: Any, **settings: Any) -> Case:
    """Return the case of a trained net with some settings."""
    return Case(lambda device: brief(*fitted(device, *args, **settings)))


def structures() -> Cases:
    """Return cases of structures with curvatures, subsets and their options."""
    for structure, curvature in product(STRUCTURES, CURVATURES):
        if CURVATURES[curvature].is_exact and structure != "full":
            continue  # refused
        settings = ALL | {"hessian_structure": structure, "curvature": curvature}
        # large enough for the exact Hessian to be positive definite
        settings["prior_precision"] = 100.0
        yield f"{structure}-{curvature}", case_of(**settings)
    for structure, subset in product(STRUCTURES, [*SUBSETS, ["hidden"]]):
        settings = {"subset_of_weights": subset, "hessian_structure": structure}
        yield f"{structure}-{subset}", case_of(**settings)


def scores() -> Cases:
    """Return cases of subnetworks, one for each score."""
    for by in SCORES:
        params = {"by": by, "n_weights": 9}
        yield by, case_of(subset_of_weights="subnetwork", subset_params=params)


def likelihoods() -> Cases:
    """Return cases of likelihoods with all methods."""
    for criterion, subset in product(CRITERIA, ["last_layer", "all"]):
        settings = {"subset_of_weights": subset}

        def run(device: str, criterion: Any = criterion, **chosen: Any) -> Arrays:
            return every_method(*fitted(device, criterion, **chosen), device)

        yield f"{criterion.__name__}-{subset}", Case(partial(run, **settings))
        for tuner in TUNERS:
            prior = {"prior_precision": tuner, **settings}
            yield f"{criterion.__name__}-{subset}-{tuner}", case_of(criterion, **prior)
    yield "MultilabelBernoulli", Case(partial(several, tagging))
    yield "CategoricalMap", Case(partial(several, segmentation, **ALL))


def several(source: Any, device: str, **settings: Any) -> Arrays:
    """Return cases of several labels per sample, or one label per position."""
    X, Y = source.X[:N].copy(), source.Y[:N]
    X[3] = X[0]
    net = on(initialised(source.net()), device)
    model = sklaplace.LaplaceClassifier(net, **FIXED | settings).fit(X, Y)
    return [*brief(model, X), model.sample_proba(X, 2, random_state=1)]


def tuning() -> Cases:
    """Return cases of tuners, priors, noise and tuning after a fit."""
    for tuner, prior in product(TUNERS, PRIOR_STRUCTURES):
        for criterion in (nn.CrossEntropyLoss, nn.MSELoss):
            settings = {"prior_precision": tuner, "prior_structure": prior}
            if criterion is nn.MSELoss:
                settings["sigma_noise"] = tuner
            settings |= {"subset_of_weights": "all", "hessian_structure": "diag"}
            yield (
                f"{tuner}-{prior}-{criterion.__name__}",
                case_of(criterion, **settings),
            )
    for tuner in TUNERS:
        yield f"columns-{tuner}", Case(partial(columns, tuner))
    for name, settings in {
        "refine": {"refine": True},
        "refine-marglik": {"refine": True, "prior_precision": "marglik"},
        "prior_mean": {"prior_mean": 0.3},
        "temperature": {"temperature": 0.5},
        "batch_size": {"batch_size": 5},
        "class_weight": {"class_weight": "balanced"},
    }.items():
        yield name, case_of(**settings)


def columns(tuner: str, device: str) -> Arrays:
    """Return cases of several target columns, whose noise levels are tuned again."""
    X, y = samples(2), numbers(samples(2))
    Y = np.stack([y, 5 * y[::-1]], 1)
    net = seeded(regressor(MLP, module__n_out=2, max_epochs=5), X, Y)
    tuned = {"prior_precision": tuner, "sigma_noise": tuner, "random_state": 0}
    held_out = {} if tuner == "marglik" else {"X_val": X[::2], "y_val": Y[::2]}
    model = sklaplace.LaplaceRegressor(on(net, device), **tuned)
    model.fit(X, Y, **held_out).tune(X, Y).recalibrate(X, Y)
    return every_method(model, X, device)


def links() -> Cases:
    """Return cases of links, Dirichlet approximations and predictive distributions."""
    for link in LINKS:
        yield link, case_of(link_approx=link)
    for name, function in dirichlet.APPROXIMATIONS.items():
        yield name, Case(partial(dirichlet_of_tensors, function))
    for kind, criterion in product(OUTPUT_MODELS, [nn.CrossEntropyLoss, nn.MSELoss]):
        name = f"{kind}-{criterion.__name__}"
        yield name, case_of(criterion, pred_type=kind, n_samples=4)


def dirichlet_of_tensors(approximation: Any, device: str) -> Arrays:
    """Return functions of a Dirichlet distribution, applied to tensors."""
    mean, root = (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator()).to(device)
        for shape in ((5, 3), (5, 3, 3))
    )
    alpha = approximation(mean, root @ root.mT)
    found = [alpha, *dirichlet.inverse_bridge(alpha)]
    found += [function(alpha) for function in FUNCTIONS.values()]
    return [part.cpu().numpy() for part in found]


def architectures() -> Cases:
    """Return cases of all layers, and of networks with several inputs or buffers."""
    for module, structure in product(SHAPES, STRUCTURES):
        settings = ALL | {"hessian_structure": structure}
        kind = module.args[0] if isinstance(module, partial) else module
        yield f"{kind.__name__}-{structure}", case_of(module=module, **settings)
    yield "BatchNorm", case_of(module=BatchNormMLP, **ALL)


def variational() -> Cases:
    """Return cases of Bayes by Backprop: posteriors, priors, schedules."""
    bound = {"uniform": {"prior_params": None}}
    for posterior, prior in product(POSTERIORS, PRIORS):
        settings = {"posterior": posterior, "prior": prior, **bound.get(prior, {})}
        if prior == "uniform" and posterior != "kumaraswamy":
            continue  # refused: their support is larger
        yield f"{posterior}-{prior}", learner("VariationalClassifier", **settings)
    for schedule in KL_SCHEDULES:
        yield schedule, learner("VariationalRegressor", kl_schedule=schedule)


def learner(name: str, module: Any = MLP, **settings: Any) -> Case:
    """Return results of an estimator that trains its net on the device."""

    def run(device: str) -> Arrays:
        return every_method(*trained_there(name, device, module, **settings), device)

    return Case(run, trained_there=True)


def trained_there(
    name: str, device: str, module: Any = MLP, **settings: Any
) -> tuple[Any, np.ndarray]:
    """Return a public estimator that trained its net on a device, and the samples."""
    kind, X = getattr(sklaplace, name), samples(2)
    criterion = nn.CrossEntropyLoss if is_classifier(kind()) else nn.MSELoss
    if name == "LaplaceRanker":
        X, criterion = np.stack([X, X[::-1]], 1), nn.BCEWithLogitsLoss
        module = pairs
    net = net_of(criterion, module, device=device, max_epochs=3)
    cheap = {"n_samples": 8, "n_estimators": 2, "cv": 2}
    cheap = {k: v for k, v in cheap.items() if k in kind().get_params()}
    model = kind(net, random_state=0, **{**cheap, **settings})
    return model.fit(X, targets(criterion, X)), X


def estimators() -> Cases:
    """Return cases of all public estimators with all methods."""
    for name in sklaplace.__all__:
        kind = getattr(sklaplace, name)
        if isinstance(kind, type) and hasattr(kind, "latent_mean_and_variance"):
            yield name, learner(name, dropping if "Dropout" in name else MLP)
    for layer in DROPOUTS:
        module = partial(dropping, layer)
        yield layer.__name__, learner("MCDropoutClassifier", module)


def callbacks() -> Cases:
    """Return cases of training callbacks."""
    for structure in STRUCTURES:
        run = partial(marglik_training, structure)
        yield structure, Case(run, trained_there=True)
    for structure in ("diag", "full", "kron"):
        run = partial(prior_training, structure)
        yield f"prior-{structure}", Case(run, trained_there=True)


def marglik_training(structure: str, device: str) -> Arrays:
    """Return results with hyperparameters that change during training."""
    callback = sklaplace.MarglikTraining(
        hessian_structure=structure, prior_structure="scalar"
    )
    net = net_of(nn.CrossEntropyLoss, device=device, callbacks=[callback], max_epochs=3)
    X = samples(2)
    return [seeded(net, X, CLASSES).predict_proba(X)]


def prior_training(structure: str, device: str) -> Arrays:
    """Return results of training and fitting with a posterior as prior."""
    first, X = fitted(device, **ALL, hessian_structure=structure)
    callback = sklaplace.PriorTraining(first.posterior_)
    net = net_of(nn.CrossEntropyLoss, device=device, callbacks=[callback], max_epochs=3)
    settings = {"hessian_structure": structure, "subset_of_weights": "all"}
    model = sklaplace.LaplaceClassifier(
        net, prior=first.posterior_, random_state=0, **settings
    )
    return brief(model.fit(X, CLASSES), X)


def later() -> Cases:
    """Return cases of operations on a fitted estimator."""
    for structure in STRUCTURES:
        yield f"partial_fit-{structure}", Case(partial(continued, structure))
    for structure, (_, kind) in STRUCTURES.items():
        if kind.is_additive:  # else refused
            yield f"prior-{structure}", Case(partial(second_task, structure))
            yield (
                f"prior-from-cpu-{structure}",
                Case(partial(second_task, structure, first="cpu")),
            )
    yield "shards", case_of(batch_size=2)
    yield "memory", Case(cached)


def continued(structure: str, device: str) -> Arrays:
    """Return results after adding samples."""
    model, X = fitted(device, **ALL, hessian_structure=structure)
    return brief(model.partial_fit(X[::2], CLASSES[::2]), X)


def second_task(structure: str, device: str, first: str | None = None) -> Arrays:
    """Return results with a posterior as prior, from the same or another device."""
    settings = {"hessian_structure": structure, "subset_of_weights": "all"}
    earlier, X = fitted(first or device, **FIXED | settings)
    model = sklaplace.LaplaceClassifier(
        on(trained(), device), prior=earlier.posterior_, random_state=0, **settings
    )
    return brief(model.fit(X, CLASSES), X)


def cached(device: str) -> Arrays:
    """Return results of a second fit, which is read from the cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            model, X = fitted(device, memory=folder)
    return brief(model, X)


GROUPS: dict[str, Callable[[], Cases]] = {
    group.__name__: group
    for group in (
        structures,
        scores,
        likelihoods,
        tuning,
        links,
        architectures,
        variational,
        estimators,
        callbacks,
        later,
    )
}
CASES: dict[str, Case] = {
    f"{group}/{name}": case for group, cases in GROUPS.items() for name, case in cases()
}
