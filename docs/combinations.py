"""Write the table of the combinations that work, by trying each of them.

Usage, from the root of a checkout::

    python docs/combinations.py [--check]

Every subset, structure, curvature and likelihood is fitted once around a small network
with a fixed prior. What is refused is listed with the message. ``--check`` fails where
the table in ``docs/combinations.inc`` is another.
"""

import argparse
import re
import sys
import warnings
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
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.likelihoods import CRITERIA

TABLE = Path(__file__).with_name("combinations.inc")
# a list of names stands beside the entries of the registry
SUBSET_CHOICES: list[Any] = [*SUBSETS, ["hidden"]]
N_ROWS, N_INPUTS = 12, 3


class Small(nn.Module):
    """One tanh layer and a head."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(N_INPUTS, 4)
        self.head = nn.Linear(4, n_outputs)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Outputs of a batch."""
        return self.head(torch.tanh(self.hidden(X)))


def criteria() -> dict[str, Any]:
    """One criterion for each likelihood, by the likelihood's name."""
    found: dict[str, Any] = {}
    for criterion, (likelihood, convention) in CRITERIA.items():
        if convention != "probabilities":
            found.setdefault(type(likelihood).__name__, criterion)
    found["MultilabelBernoulli"] = nn.BCEWithLogitsLoss
    return found


def problem(likelihood: str) -> tuple[Any, int, Any]:
    """Estimator, number of outputs and targets for a likelihood."""
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


def answer(subset: Any, structure: str, curvature: str, likelihood: str) -> str:
    """An empty string where it works, else the message."""
    kind, n_outputs, y = problem(likelihood)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = NeuralNet(Small, criteria()[likelihood], module__n_outputs=n_outputs)
        net.set_params(verbose=0, train_split=None).initialize()
    X = np.sin(np.arange(N_ROWS * N_INPUTS, dtype=np.float32)).reshape(N_ROWS, -1)
    settings: dict[str, Any] = {"prior_precision": 100.0, "random_state": 0}
    if likelihood == "Gaussian":
        settings["sigma_noise"] = 1.0
    model = kind(
        FrozenEstimator(net),
        subset_of_weights=subset,
        hessian_structure=structure,
        curvature=curvature,
        **settings,
    )
    try:
        model.fit(X, y).predict(X)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def table() -> str:
    """The table as Markdown, with the reasons below it."""
    likelihoods = list(criteria())
    reasons: list[str] = []
    # in words, so that the heads break into lines
    heads = [re.sub("(?<=[a-z])(?=[A-Z])", " ", name) for name in likelihoods]
    lines = [
        f"| subset | structure | curvature | {' | '.join(heads)} |",
        "| --- | --- | --- |" + " :-: |" * len(likelihoods),
    ]
    for subset, structure, curvature in product(SUBSET_CHOICES, STRUCTURES, CURVATURES):
        cells = []
        for likelihood in likelihoods:
            message = answer(subset, structure, curvature, likelihood)
            if message and message not in reasons:
                reasons.append(message)
            cells.append(f"({reasons.index(message) + 1})" if message else "✓")
        name = "a list of names" if isinstance(subset, list) else f"`{subset}`"
        row = [name, f"`{structure}`", f"`{curvature}`", *cells]
        lines.append(f"| {' | '.join(row)} |")
    notes = [f"({n}) {reason}" for n, reason in enumerate(reasons, 1)]
    return "\n\n".join(["\n".join(lines), *notes]) + "\n"


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description="The table of combinations.")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = table()
    if not options.check:
        TABLE.write_text(found, encoding="utf-8")
    elif TABLE.read_text(encoding="utf-8") != found:
        sys.exit("docs/combinations.inc is out of date: run docs/combinations.py.")


if __name__ == "__main__":
    main()
