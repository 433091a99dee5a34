"""Fits in several torch.distributed processes: the results of each process.

Run ``python group_cases.py RANK SIZE FOLDER NAME...`` once for each process. The
process writes the outcomes of the named cases to ``FOLDER/RANK.pickle``. Every case
also runs in one process without a group.
"""

import os

os.environ["SCIPY_ARRAY_API"] = "1"  # read when scipy is first imported

import pickle
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from nets import blobs, classifier, regressor, seeded, waves
from shared import HANGS
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.curvature.structures import STRUCTURES

DOUBLE = {"module__dtype": torch.float64}
METHODS = "predict_proba", "predict_dirichlet", "score_samples", "sample_latent"
METHODS_REG = "predict", "score_samples", "sample_y", "latent_mean_and_variance"
SUBSETS = "last_layer", "all"
X, Y = blobs(90, dtype=np.float64)
X_REG, Y_REG = waves(90, dtype=np.float64)
NET = FrozenEstimator(seeded(classifier(**DOUBLE), X, Y))
SMALL = {"batch_size": 8, "n_shards": 6, "random_state": 0, "prior_precision": 1.0}


@dataclass(frozen=True)
class Process:
    """One of the processes; ``is_group`` is False for a single process."""

    rank: int = 0
    size: int = 1
    is_group: bool = False
    folder: Path | None = None

    @property
    def is_last(self):
        return self.rank == self.size - 1

    def model(self, estimator=NET, **params):
        settings = SMALL | {"distributed": self.is_group} | params
        return LaplaceClassifier(estimator, **settings)


def numbers(model, X=X, methods=METHODS):
    """Return the results of a fitted estimator, as arrays."""
    posterior = model.posterior_
    found = {"evidence": model.log_marginal_likelihood_value_}
    found |= {"mean": posterior.mean, "dense": posterior.structure.dense()}
    for name in methods:
        result = getattr(model, name)(X)
        parts = result if isinstance(result, tuple) else (result,)
        for k, part in enumerate(parts):
            found[f"{name} {k}"] = getattr(part, "concentration", part)
    return {name: np.asarray(value) for name, value in found.items()}


CASES = {}


def case(name, **given):
    def added(function):
        CASES[name] = lambda process: function(process, **given)
        return function

    return added


# ------------------------------------------------------------------------- results
def of_classifier(process, **params):
    return numbers(process.model(**params).fit(X, Y))


for structure in sorted(STRUCTURES):
    for subset in SUBSETS:
        kind = {"hessian_structure": structure, "subset_of_weights": subset}
        case(f"{structure}-{subset}", **kind)(of_classifier)

case("two-workers", n_jobs=2)(of_classifier)
case("monte-carlo", curvature="ggn_mc")(of_classifier)


@case("trained")
def trained(process):
    """Train in each process with weights, and tune on held-out samples."""
    net = classifier(**DOUBLE, max_epochs=5)
    model = process.model(net, prior_precision="auto")
    return numbers(model.fit(X, Y, sample_weight=1 + Y))


@case("regression")
def regression(process):
    net = regressor(**DOUBLE, max_epochs=5)
    tuned = {"prior_precision": "marglik", "sigma_noise": "marglik"}
    params = SMALL | tuned | {"distributed": process.is_group}
    model = LaplaceRegressor(net, subset_of_weights="all", **params)
    return numbers(model.fit(X_REG, Y_REG), X_REG, METHODS_REG)


@case("further-samples")
def further_samples(process):
    model = process.model().fit(X[:50], Y[:50])
    return numbers(model.partial_fit(X[50:], Y[50:]))


@case("without-a-seed")
def without_a_seed(process):
    """Without a seed, all processes must share the draws of one process."""
    return numbers(process.model(random_state=None, curvature="ggn_mc").fit(X, Y))


# ---------------------------------------------------------------- errors of one process
class BrokenError(Exception):
    """Error raised in one process."""


class Unreadable(Dataset):
    """A dataset that raises for one sample."""

    def __getitem__(self, index):
        if index == 80:
            raise BrokenError("sample 80 is unreadable")
        return super().__getitem__(index)


@case("an-input")
def an_input(process):
    inputs = X.copy()
    inputs[3, 0] = np.nan if process.is_last else 0
    process.model().fit(inputs, Y)


@case("a-shard")
def a_shard(process):
    data = (Unreadable if process.is_last else Dataset)(X, Y)
    process.model().fit(data, Y)


@case("a-further-sample")
def a_further_sample(process):
    model = process.model().fit(X[:50], Y[:50])
    model.partial_fit(X[50:], Y[50:] if process.is_last else Y[50:] + 9)


# ------------------------------------------------------------------- other arguments
@case("targets")
def targets(process):
    process.model().fit(X, np.roll(Y, process.rank))


@case("weights")
def weights(process):
    net = seeded(classifier(**DOUBLE, max_epochs=1), X, Y, seed=process.rank)
    process.model(FrozenEstimator(net)).fit(X, Y)


@case("parameters")
def parameters(process):
    process.model(n_shards=5 + process.rank, batch_size=4 + process.rank).fit(X, Y)


# ------------------------------------------------------------------------------- run
def outcome(name, process):
    """Return the result of a case: numbers, or type and message of an error."""
    try:
        return CASES[name](process)
    except Exception as error:
        return type(error).__name__, str(error)


def main(rank, size, folder, *names):
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    process = Process(int(rank), int(size), True, Path(folder))
    dist.init_process_group(
        "gloo",
        init_method=(process.folder / "meeting").as_uri(),
        rank=process.rank,
        world_size=process.size,
        timeout=timedelta(seconds=HANGS),
    )
    found = {name: outcome(name, process) for name in names}
    (process.folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
