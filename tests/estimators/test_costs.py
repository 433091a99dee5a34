"""Fast paths stay fast: the cost of each operation, compared with a bound.

Nothing is timed. A bound is the count that the method needs, derived next to the test.
A slow path taken by mistake exceeds the bound by far.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from costs import counted
from nets import (
    binary_classifier,
    blobs,
    classifier,
    initialised,
    regressor,
    waves,
)
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor, dirichlet
from sklaplace.core.budget import CACHE
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.dirichlet import logits
from sklaplace.dirichlet.links import LINKS
from sklaplace.posterior.tuning import evidence

# held-out labels are drawn at random
pytestmark = pytest.mark.filterwarnings("ignore:No prior precision predicts")

MIB = 2**20
# At most so many rows are looked at by inspection, in some passes that no number of
# rows changes, and again of each batch.
FEW, INSPECTIONS = 16, 20
LAST, ALL = "last_layer", "all"
N, C, BATCH = 350, 6, 100
CUTS = [100, 100, 100, 50]  # batches of N rows
PASSES = {"nystrom": 2, "variational": 2}  # one that finds the points


def passes(structure):
    """Return the batch sizes of the passes of a fit."""
    return CUTS * PASSES.get(structure, 1)


class Deep(nn.Module):
    """Two tanh layers of different widths and a linear head."""

    def __init__(self, n_in=5, n_out=C, width=8, second=7):
        super().__init__()
        self.first = nn.Linear(n_in, width)
        self.second = nn.Linear(width, second)
        self.head = nn.Linear(second, n_out)

    def forward(self, X):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(X)))))


class ConvNet(nn.Module):
    """A convolution with stride one, an average and a linear head."""

    def __init__(self, channels=16, maps=3, n_out=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, maps, 3, padding=1)
        self.head = nn.Linear(maps, n_out)

    def forward(self, X):
        return self.head(torch.relu(self.conv(X)).mean((-2, -1)))


SCALAR = {"prior_precision": 1.0, "refine": False}


def frozen(module=Deep, make=classifier, **sizes):
    params = {f"module__{name}": size for name, size in sizes.items()}
    return FrozenEstimator(initialised(make(module, **params)))


def laplace(estimator=None, subset=LAST, structure="kron", **options):
    settings = {"batch_size": BATCH, "random_state": 0, "link_approx": "probit"}
    kinds = {"subset_of_weights": subset, "hessian_structure": structure}
    settings = {**settings, **SCALAR, **kinds, **options}
    return LaplaceClassifier(estimator or frozen(), **settings)


def rows(n=N, n_classes=C, n_features=5, seed=0):
    return blobs(n, n_classes, n_features, seed)


def held_out(n=150):
    return dict(zip(("X_val", "y_val"), rows(n, seed=1), strict=True))


def fitted_costs(model, data=None, **held):
    X, y = data or rows()
    with counted(type(model.estimator.estimator.module_)) as costs:
        model.fit(X, y, **held)
    return costs


# ---------------------------------------------------------------- the counting
def test_bytes_are_counted_once_until_they_are_free():
    before = torch.ones(1000)
    with counted() as costs:
        made = before + 1
        view = made[:10].reshape(2, 5)
        made.add_(1)
        _ = before[:500], before.detach()
        assert costs.alive == costs.peak == 4000
        del made
        assert costs.alive == 4000
        del view
        assert costs.alive == 0
        torch.stack([before, before]).sum()
    assert costs.peak == 8004
    assert costs.largest == 2000


# ------------------------------------------------------- passes: the last layer
KINDS = {
    "softmax": (LaplaceClassifier, classifier, C, rows()),
    "sigmoid": (LaplaceClassifier, binary_classifier, 1, rows(n_classes=2)),
    "gaussian": (LaplaceRegressor, regressor, 2, waves(N, 5, 2)),
}
NOISE = {"gaussian": {"sigma_noise": 1.0}}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_last_layer_costs_one_forward_pass(kind, structure):
    around, make, n_out, (X, y) = KINDS[kind]
    options = {"batch_size": BATCH, **SCALAR, **NOISE.get(kind, {})}
    net = frozen(make=make, n_out=n_out)
    model = around(net, hessian_structure=structure, **options)
    costs = fitted_costs(model, (X, y))
    assert costs.forward_rows(FEW) == passes(structure)
    assert len(costs.forward) <= len(passes(structure)) + INSPECTIONS
    assert costs.columns(FEW) == 0
    with counted(Deep) as costs:
        model.predict(X)
    assert costs.forward == CUTS
    assert costs.backward == []


@pytest.mark.filterwarnings("ignore:.*ignores curvature that its")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tuner", ["marglik", "validation"])
def test_tuning_a_last_layer_passes_held_out_rows_once(tuner, structure):
    model = laplace(structure=structure, prior_precision=tuner, residual="none")
    held = held_out(150) if tuner == "validation" else {}
    costs = fitted_costs(model, **held)
    assert costs.forward_rows(FEW) == passes(structure) + ([100, 50] if held else [])
    assert costs.columns(FEW) == 0


# --------------------------------------------------------- passes: all weights
@pytest.mark.parametrize("structure", STRUCTURES)
def test_all_weights_cost_one_pass_and_a_column_per_output(structure):
    model = laplace(subset=ALL, structure=structure)
    costs = fitted_costs(model)
    assert costs.forward_rows(FEW) == passes(structure)
    assert len(costs.forward) <= len(passes(structure)) + INSPECTIONS
    # the Hessian of a softmax in c logits has rank c - 1
    assert costs.columns(FEW) == sum(passes(structure)) * (C - 1)
    with counted(Deep) as costs:
        model.predict_proba(rows()[0])
    assert costs.forward_rows(FEW) == CUTS
    assert costs.columns() == N * C


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tuning_all_weights_passes_held_out_rows_twice(structure):
    options = {"prior_precision": "validation", "residual": "none"}
    model = laplace(subset=ALL, structure=structure, **options)
    costs = fitted_costs(model, **held_out(150))
    # for the scale of the path, and for the score of all its points
    assert sum(costs.forward_rows(FEW)) <= sum(passes(structure)) + 2 * 150
    assert costs.columns(FEW) <= sum(passes(structure)) * (C - 1) + 2 * 150 * C


# -------------------------------------------------------------- decompositions
# Sizes of the factors of `Deep`: inputs and outputs of each layer, the latter once
# for weight and bias.
FACTORS = {LAST: sorted([C, 7]), ALL: sorted([8, 5, 7, 8, C, 7])}
P = {LAST: C * 8, ALL: 8 * 6 + 7 * 9 + C * 8}
# those that are decomposed in the space of weights, not in that of their points
IN_WEIGHTS = ["diag", "full", "kron", "lowrank"]


def large(sizes):
    """Return sizes above one, which excludes bias inputs and Hessians in log δ."""
    return sorted(n for n in sizes if n > 1)


def assert_decomposed_once(costs, subset, structure):
    sizes = {"kron": FACTORS[subset], "full": [P[subset]], "diag": []}
    sizes["lowrank"] = [min(P[subset], 110)]
    assert large(costs.eigh) == sizes[structure]
    assert costs.cholesky == (sizes[structure] if structure == "lowrank" else [])


@pytest.mark.parametrize("structure", IN_WEIGHTS)
@pytest.mark.parametrize("subset", [LAST, ALL])
@pytest.mark.parametrize(
    "options",
    [
        {"prior_precision": "marglik"},
        {"prior_precision": "validation", "link_approx": "probit"},
        {"prior_precision": "validation", "link_approx": "mean_field"},
    ],
    ids=" ".join,
)
def test_tuning_takes_one_decomposition(options, subset, structure):
    model = laplace(None, subset, structure, residual="none", **options)
    held = held_out(150) if options["prior_precision"] == "validation" else {}
    assert_decomposed_once(fitted_costs(model, **held), subset, structure)


@pytest.mark.parametrize(
    ("structure", "n_rows"), [("full", N), ("full", 12), ("gp", 12)]
)
def test_an_evaluation_of_layerwise_evidence_writes_few_matrices(structure, n_rows):
    """Each tensor has at most a factor, its inverse and a product of its rows."""
    model = laplace(None, ALL, structure, prior_structure="layerwise")
    posterior = model.fit(*rows(n_rows)).posterior_
    assert len(posterior.structure.eigenvalues)  # of the start, computed once
    with counted() as costs:
        evidence.marglik(posterior)
    # one in each evaluation
    assert set(costs.cholesky) == {min(P[ALL], n_rows * (C - 1))}
    assert costs.eigh == []
    n_evaluations = len(costs.cholesky)
    assert 1 < n_evaluations <= 10
    assert costs.written <= 12 * 8 * P[ALL] ** 2 * n_evaluations


# --------------------------------------------------------------------- memory
@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize(
    "link", sorted(n for n, link in LINKS.items() if link.diagonal)
)
@pytest.mark.parametrize("prior", [1.0, "validation"])
def test_many_classes_make_no_matrix_per_row(structure, link, prior):
    c, b = 200, 80
    X, y = rows(5 * b, n_classes=c)
    options = {"prior_precision": prior, "link_approx": link, "batch_size": b}
    model = laplace(frozen(n_out=c), structure=structure, **options)
    held = {"X_val": X[:b], "y_val": y[:b]} if prior == "validation" else {}
    fit = fitted_costs(model, (X, y), **held)
    model.predict_proba(X[:1])  # numbers for drawing points are made once
    with counted() as predict:
        model.predict_proba(X[:b])
    # the output factor, and inspection's three rows; nodes of `gumbel` come in chunks,
    # each half of what fits into the cache
    chunk = logits._CHUNK_BYTES // 16 if link == "gumbel" else 0
    assert fit.largest <= max(FEW * c**2, chunk)
    assert predict.largest <= max(c**2, 3 * b * c, chunk)
    assert max(fit.peak, predict.peak) < b * c**2 * 4


# Of what is as large as the means, at most so many copies are alive at once: inside
# steps of Newton's method, and in the bridge.
SIMPLICES = {
    "kl_projection": (dirichlet.kl_projection, 20),
    "laplace_bridge": (dirichlet.laplace_bridge, 10),
    "laplace_bridge, norm": (partial(dirichlet.laplace_bridge, norm="guarded"), 10),
    **{name: (function, 20) for name, function in dirichlet.APPROXIMATIONS.items()},
}


@pytest.mark.parametrize("name", SIMPLICES)
@pytest.mark.parametrize(("n", "c"), [(4, 1000), (16, 1000), (20_000, 10)])
def test_distributions_make_no_matrix_per_row(name, n, c):
    """For 2,000 rows and 1,000 classes, the limit is 350 MiB instead of 8 GiB."""
    function, copies = SIMPLICES[name]
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(n, c, generator=generator)
    cov = torch.eye(c).expand(n, c, c)  # one covariance for all
    with counted() as costs:
        function(mean, cov)
    # of one row: centred, its root, and what factorising takes
    assert costs.peak <= copies * 8 * n * c + 4 * 8 * c**2 + 6 * MIB
    assert costs.peak < 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_memory_does_not_grow_with_the_number_of_rows(structure):
    peaks = []
    for n in (40_000, 160_000):
        X, y = rows(n)
        net = frozen(width=64, second=64)
        # sums of a shard, and those of all before
        model = laplace(net, ALL, structure, batch_size=None)
        fit = fitted_costs(model, (X, y))
        assert fit.forward_rows(FEW)[0] < n / 2
        with counted() as predict:
            model.predict_proba(X)
        # results of all rows, batch by batch and then in one
        peaks.append((fit.peak, predict.peak - 2 * 8 * n * C))
    (fit, predict), (fit_4, predict_4) = peaks
    assert fit_4 <= 1.02 * fit
    assert predict_4 <= 1.02 * predict


# ----------------------------------------------------------------- convolutions
def test_a_convolution_factor_unfolds_few_patches_at_a_time():
    n, channels, side = 80, 16, 16
    X = np.random.default_rng(0).normal(size=(n, channels, side, side))
    model = laplace(frozen(ConvNet), ALL, batch_size=n)
    costs = fitted_costs(model, (X.astype(np.float32), np.arange(n) % 3))
    # all patches at once would have nine entries for each entry of the images
    assert 4 * costs.largest <= CACHE // 4 < 4 * 9 * X.size
    assert math.prod(costs.forward_rows(FEW)) == n
