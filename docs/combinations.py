"""Try every combination of options, and write the tables of those that work.

Usage, from the root of a checkout::

    python docs/combinations.py [--check]

The script fits a small network with a fixed prior for every subset, structure,
curvature and likelihood. It also tries every feature that depends on the structure or
the likelihood. The tables list rejected combinations with their messages. ``--check``
fails if a table in one of the ``docs/*.inc`` files below is out of date.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.likelihoods import CRITERIA

HERE = Path(__file__).parent
# a list of names is allowed in addition to the entries of the registry
SUBSET_CHOICES: list[Any] = [*SUBSETS, ["hidden"]]
N_ROWS, N_INPUTS = 12, 3


class Small(nn.Module):
    """A network with one tanh layer and a head."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(N_INPUTS, 4)
        self.head = nn.Linear(4, n_outputs)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a batch."""
        return self.head(torch.tanh(self.hidden(X)))


def criteria() -> dict[str, Any]:
    """Return one criterion for each likelihood, keyed by the name of the likelihood."""
    found: dict[str, Any] = {}
    for criterion, (likelihood, convention) in CRITERIA.items():
        if convention != "probabilities":
            found.setdefault(type(likelihood).__name__, criterion)
    found["MultilabelBernoulli"] = nn.BCEWithLogitsLoss
    return found


def problem(likelihood: str) -> tuple[Any, int, Any]:
    """Return an estimator class, the number of outputs and targets for a likelihood."""
    steps = np.arange(N_ROWS)
    known: dict[str, tuple[Any, int, Any]] = {
        "Categorical": (LaplaceClassifier, 3, steps % 3),
        "Bernoulli": (LaplaceClassifier, 1, steps % 2),
        "MultilabelBernoulli": (
            LaplaceClassifier,
            2,
            (np.stack([steps, steps // 2], 1) % 2).astype(np.float32),
        ),
        "Gaussian": (LaplaceRegressor, 1, np.cos(steps).astype(np.float32)),
        "Poisson": (LaplaceRegressor, 1, (steps % 4).astype(np.float32)),
        "HeteroscedasticGaussian": (
            LaplaceRegressor,
            2,
            np.cos(steps).astype(np.float32),
        ),
    }
    return known[likelihood]


def model_of(likelihood: str, **options: Any) -> tuple[Any, np.ndarray, Any]:
    """Return an estimator around a small untrained network, and its samples."""
    kind, n_outputs, y = problem(likelihood)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = NeuralNet(Small, criteria()[likelihood], module__n_outputs=n_outputs)
        net.set_params(verbose=0, train_split=None).initialize()
    X = np.sin(np.arange(N_ROWS * N_INPUTS, dtype=np.float32)).reshape(N_ROWS, -1)
    settings: dict[str, Any] = {"prior_precision": 100.0, "random_state": 0}
    if likelihood == "Gaussian":
        settings["sigma_noise"] = 1.0
    return kind(FrozenEstimator(net), **(settings | options)), X, y


def answer(attempt: Callable[..., Any], *given: Any, **options: Any) -> str:
    """Return an empty string if the call works, else the error message."""
    try:
        attempt(*given, **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def fit(likelihood: str, **options: Any) -> Any:
    """Fit an estimator, predict with it and return it."""
    model, X, y = model_of(likelihood, **options)
    model.fit(X, y).predict(X)
    return model


class Reasons:
    """Marks in a table: a tick, or the number of a message below the table."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def mark(self, message: str) -> str:
        """Return the mark for a message; a tick if the message is empty."""
        if message and message not in self.messages:
            self.messages.append(message)
        return f"({self.messages.index(message) + 1})" if message else "✓"

    def table(self, heads: list[str], rows: Iterable[list[str]]) -> str:
        """Return a Markdown table with the messages below it."""
        lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
        lines.insert(1, "| --- |" + " :-: |" * (len(heads) - 1))
        notes = [f"({n}) {reason}" for n, reason in enumerate(self.messages, 1)]
        return "\n\n".join(["\n".join(lines), *notes]) + "\n"


def named(subset: Any) -> str:
    """Return the name of a subset in the tables."""
    return "a list of names" if isinstance(subset, list) else f"`{subset}`"


def of_curvature() -> str:
    """Return the table of structures and curvatures.

    All subsets and likelihoods must have the same result.
    """
    reasons, rows = Reasons(), []
    for structure in STRUCTURES:
        row = [f"`{structure}`"]
        for curvature in CURVATURES:
            options = {"hessian_structure": structure, "curvature": curvature}
            found = {
                answer(fit, likelihood, subset_of_weights=subset, **options)
                for subset, likelihood in product(SUBSET_CHOICES, criteria())
            }
            # otherwise the table needs more axes than structure and curvature
            assert len(found) == 1, (structure, curvature, found)
            message = found.pop().replace(repr(structure), "'…'")
            row.append(reasons.mark(message))
        rows.append(row)
    return reasons.table(["structure", *(f"`{name}`" for name in CURVATURES)], rows)


def of_structures() -> str:
    """Return the table of priors and features of a fitted posterior, by structure."""
    reasons, rows = Reasons(), []
    for structure in STRUCTURES:
        options = {"hessian_structure": structure}
        found = [
            answer(fit, "Gaussian", prior_structure=prior, **options)
            for prior in PRIOR_STRUCTURES
        ]
        attempts = next_task, added, other_levels
        found += [answer(attempt, **options) for attempt in attempts]
        marks = [reasons.mark(m.replace(repr(structure), "'…'")) for m in found]
        rows.append([f"`{structure}`", *marks])
    heads = [f'`"{name}"`' for name in PRIOR_STRUCTURES]
    others = "`prior=`", "`partial_fit`", "other levels"
    return reasons.table(["structure", *heads, *others], rows)


def next_task(**options: Any) -> None:
    """Fit a second task with the posterior of the first task as its prior."""
    earlier = fit("Gaussian", **options).posterior_
    model, X, y = model_of("Gaussian", prior=earlier, **options)
    model.set_params(prior_precision="auto").fit(X, y).predict(X)


def added(**options: Any) -> None:
    """Add samples to a posterior by ``partial_fit``."""
    _, X, y = model_of("Gaussian")
    fit("Gaussian", **options).partial_fit(X, y).predict(X)


def other_levels(**options: Any) -> None:
    """Compute the evidence for other noise levels of two target columns."""
    model, X, y = model_of("Gaussian", **options)
    model.estimator.estimator.set_params(module__n_outputs=2).initialize()
    targets = np.stack([y, y[::-1]], 1)
    model.fit(X, targets).log_marginal_likelihood(sigma_noise=np.array([1.0, 2.0]))


def of_refine() -> str:
    """Return the table of subsets and ``pred_type`` with ``refine=True``."""
    reasons, rows = Reasons(), []
    for subset, pred_type in product([*SUBSET_CHOICES, ["head"]], OUTPUT_MODELS):
        options = {"subset_of_weights": subset, "pred_type": pred_type}
        marks = [
            reasons.mark(answer(fit, likelihood, refine=True, **options))
            for likelihood in criteria()
        ]
        name = "the last layer by name" if subset == ["head"] else named(subset)
        rows.append([f"{name}, `{pred_type}`", *marks])
    # separate words, so that the headings can wrap
    heads = [re.sub("(?<=[a-z])(?=[A-Z])", " ", name) for name in criteria()]
    return reasons.table(["subset, `pred_type`", *heads], rows)


TABLES: dict[str, Callable[[], str]] = {
    "combinations.inc": of_curvature,
    "structures.inc": of_structures,
    "refine.inc": of_refine,
}


def main() -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description="Write or check the tables.")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for name, table in TABLES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = table()
        if not options.check:
            (HERE / name).write_text(found, encoding="utf-8")
        elif (HERE / name).read_text(encoding="utf-8") != found:
            sys.exit(f"docs/{name} is out of date: run docs/combinations.py.")


if __name__ == "__main__":
    main()
