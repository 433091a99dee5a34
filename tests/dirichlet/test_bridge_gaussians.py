"""What the gallery says of the Laplace bridge on Gaussians and on moons."""

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
    """Printed lines that start with all of some words, split into words."""
    lines = [line.split() for line in printed.splitlines()]
    return [line for line in lines if line[: len(starts)] == list(starts)]


@pytest.fixture(scope="module")
def toy():
    return run_example("laplace_bridge/plot_toy.py", EPOCHS=600, RESOLUTION=30)


def test_far_from_moons_the_bridge_is_as_sure_as_the_network(toy):
    far_away = toy[0]["far_away"]
    for prior in ("prior 5e-4", "prior 5e-4 per sample"):
        assert far_away[prior, "network"] == pytest.approx(0.99, abs=0.02)
        assert far_away[prior, "bridge"] == pytest.approx(
            far_away[prior, "network"], abs=1e-4
        )


def test_far_from_moons_the_correction_is_as_unsure_as_draws(toy):
    far_away = toy[0]["far_away"]
    assert far_away["prior 5e-4", "draws"] == pytest.approx(0.53, abs=0.03)
    assert far_away["prior 5e-4 per sample", "draws"] == pytest.approx(0.62, abs=0.03)
    for prior in ("prior 5e-4", "prior 5e-4 per sample"):
        draws = far_away[prior, "draws"]
        assert far_away[prior, "bridge_norm"] == pytest.approx(draws, abs=0.05)
        assert far_away[prior, "bridge_norm, published"] == pytest.approx(
            draws, abs=0.05
        )
        assert draws - 0.1 < far_away[prior, "projection"] < draws


@pytest.fixture(scope="module")
def samples():
    return run_example("laplace_bridge/plot_samples.py", MOST=30_000, RUNS=3, ROWS=100)


@pytest.fixture(scope="module")
def simplex():
    return run_example("laplace_bridge/plot_simplex.py", SIDE=24, NODES=40)


PUBLISHED = {
    "small": [6.667, 6.667, 6.667],
    "off-centre": [4.908, 0.561, 0.561],
    "correlated": [2.787, 1.394, 0.911],
}


@pytest.mark.parametrize("gaussian", PUBLISHED)
def test_the_concentrations_are_the_published_ones(samples, gaussian):
    names, printed = samples
    found = names["alphas"][gaussian]["bridge, published"]
    np.testing.assert_allclose(found, PUBLISHED[gaussian], atol=5e-4)
    line = rows(printed, gaussian)[0]
    assert [float(word) for word in line[1:]] == PUBLISHED[gaussian]


@pytest.mark.parametrize("gaussian", ["small", "off-centre"])
def test_a_dirichlet_is_worth_hundreds_of_samples(samples, gaussian):
    worth, distance = samples[0]["worth"], samples[0]["distance"]
    for method in samples[0]["METHODS"]:
        assert worth[gaussian, method] >= 250
    assert distance[gaussian, "projection"] < distance[gaussian, "bridge, centred"]


def test_it_is_not_for_correlated_logits(samples):
    names = samples[0]
    worth, distance, flat = names["worth"], names["distance"], names["flat"]
    assert worth["correlated", "bridge, published"] < 50
    assert 50 < worth["correlated", "projection"] < 250
    for method in ("bridge, zero sum", "bridge, centred", "bridge_norm, centred"):
        assert distance["correlated", method] > flat["correlated"] + 1
    assert distance["correlated", "projection"] < flat["correlated"] / 2


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


def test_means_of_five_gaussians_are_as_far_off_as_the_text_says(bases):
    def error(name, method):
        return abs(found[name][method] - found[name]["truth"]).sum()

    found = bases[0]["found"]
    for name in ("known image", "unequal", "large"):
        assert error(name, "corrected, published") < error(name, "bridge")
    assert error("simple", "corrected, published") > error("simple", "bridge")
    np.testing.assert_array_equal(
        found["simple"]["corrected, guarded"], found["simple"]["bridge"]
    )
    closest = [
        min(bases[0]["METHODS"], key=lambda method, n=name: error(n, method))
        for name in found
    ]
    assert closest.count("projection") == 4
