import numpy as np
import pytest
from sklearn.datasets import load_iris

from sklaplace import LaplaceClassifier
from sklaplace.plotting import WeightPosteriorDisplay

draw = WeightPosteriorDisplay.from_estimator


def fitted(**options):
    model = LaplaceClassifier(prior_precision=1.0, random_state=0, **options)
    return model.fit(*load_iris(return_X_y=True))


@pytest.fixture(scope="module")
def model():
    return fitted()


def moments(model):
    posterior = model.posterior_
    return posterior.mean.numpy(), posterior.variance().sqrt().numpy()


def test_marginals_are_those_of_the_posterior(model):
    display = draw(model, weights=[5, 0])
    mean, std = moments(model)
    np.testing.assert_allclose(display.mean, mean[[5, 0]])
    np.testing.assert_allclose(display.std, std[[5, 0]])
    for row, density in enumerate(display.densities_):
        x, y = density.get_paths()[0].vertices.T
        centre, width = display.mean[row], display.std[row]
        np.testing.assert_allclose([x.min(), x.max()], centre + width * np.r_[-4, 4])
        bottom = len(display.densities_) - 1 - row  # the first on top
        assert y.min() == pytest.approx(bottom)
        # the mode is at the mean; a Gaussian falls to exp(-1/2) at one deviation
        assert x[y.argmax()] == pytest.approx(centre)
        right = x > centre
        order = np.argsort(x[right & (y > bottom)])
        height = np.interp(
            centre + width,
            x[right & (y > bottom)][order],
            (y[right & (y > bottom)] - bottom)[order],
        )
        assert height / (y.max() - bottom) == pytest.approx(np.exp(-0.5), abs=2e-3)


def assert_named(display, values):
    """Check that the names lead to the means in a dict of parameters."""
    for name, mean in zip(display.names, display.mean, strict=True):
        parameter, _, index = name.rstrip("]").partition("[")
        index = tuple(int(i) for i in index.split(","))
        assert float(values[parameter][index]) == pytest.approx(mean, rel=1e-6)


def test_names_are_those_of_the_parameters(model):
    layout = model.posterior_.layout
    n = layout.n_parameters
    display = draw(model, weights=range(n))
    assert_named(display, layout.unflatten(model.posterior_.mean))
    labels = [text.get_text() for text in display.ax_.get_yticklabels()]
    assert labels == display.names
    assert len(set(labels)) == n
    assert draw(model, weights=[-1]).names == display.names[-1:]
    for outside in (n, 0.5):
        with pytest.raises(IndexError, match=r"out of bounds|must be of integer"):
            draw(model, weights=[outside])


def test_the_default_is_weights_from_the_first_to_the_last(model):
    display = draw(model)
    mean, _ = moments(model)
    rows = np.array([np.flatnonzero(mean == value).item() for value in display.mean])
    assert (rows[0], rows[-1]) == (0, len(mean) - 1)
    steps = np.diff(rows)
    assert len(steps) == 7
    assert steps.max() - steps.min() <= 1


def test_names_of_a_subnetwork_are_those_of_the_whole_parameter():
    model = fitted(
        subset_of_weights="subnetwork",
        subset_params={"n_weights": 5},
        hessian_structure="full",
    )
    display = draw(model, weights=range(5))
    assert_named(display, model.estimator_.module_.state_dict())
