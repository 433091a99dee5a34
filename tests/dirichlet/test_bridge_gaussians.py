"""Claims of the gallery about the Laplace bridge on Gaussians and moons."""

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from examples import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def rows(printed, *starts):
    """Return the printed lines that start with given words, split into words."""
    lines = [line.split() for line in printed.splitlines()]
    return [line for line in lines if line[: len(starts)] == list(starts)]


@pytest.fixture(scope="module")
def samples():
    return run_example("laplace_bridge/plot_samples.py", MOST=30_000, RUNS=3, ROWS=100)


@pytest.fixture(scope="module")
def simplex():
    return run_example("laplace_bridge/plot_simplex.py", SIDE=24, NODES=40)


@pytest.mark.parametrize("gaussian", ["small", "off-centre"])
def test_a_dirichlet_is_worth_hundreds_of_samples(samples, gaussian):
    worth, distance = samples[0]["worth"], samples[0]["distance"]
    for method in samples[0]["METHODS"]:
        assert worth[gaussian, method] >= 250
    assert distance[gaussian, "projection"] < distance[gaussian, "bridge, centred"]


def test_the_projection_is_the_closest_of_all(simplex):
    distance = simplex[0]["distance"]
    for gaussian in simplex[0]["gaussians"]:
        closest = distance[gaussian, "projection"]
        assert 0 < closest < distance[gaussian, "bridge"]
        assert closest < distance[gaussian, "bridge_norm"]


def test_the_bridge_fails_where_the_text_says(simplex):
    names = simplex[0]
    alphas, distance = names["alphas"], names["distance"]
    means = {key: alpha / alpha.sum() for key, alpha in alphas.items()}
    truth = names["true_means"]
    # not the softmax for small variances, the same mean for large ones
    assert abs(means["small", "bridge"] - truth["small"]).max() > 0.05
    assert abs(means["small", "projection"] - truth["small"]).max() < 0.005
    np.testing.assert_allclose(means["large", "bridge"], means["small", "bridge"])
    # the correction acts on large variances alone
    for gaussian in names["gaussians"]:
        gain = distance[gaussian, "bridge"] - distance[gaussian, "bridge_norm"]
        assert (gain > 0.1) if gaussian == "large" else (gain == 0)
    # sure of the class with the small variance, or with too little for a large one
    assert means["nearly singular", "bridge"][2] > 0.95
    assert truth["nearly singular"][2] < 0.3
    assert truth["correlated"][2] > 3 * means["correlated", "bridge"][2]


# ------------------------------------------------------------------------ bases
@pytest.fixture(scope="module")
def bases():
    return run_example("laplace_bridge/plot_bases.py")


def test_the_corrected_bridge_has_the_published_means(bases):
    names, printed = bases
    for gaussian, (samples, corrected) in names["PUBLISHED"].items():
        found = names["found"][gaussian]
        np.testing.assert_allclose(found["corrected, published"], corrected, atol=6e-5)
        # 10,000 draws: standard errors of at most half a hundredth
        np.testing.assert_allclose(found["truth"], samples, atol=0.015)
        (line,) = rows(printed, *gaussian.split(), "corrected,", "published")
        np.testing.assert_allclose(
            [float(p) for p in line[-len(corrected) :]], corrected
        )
