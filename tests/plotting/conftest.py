"""Data and estimators to plot; every figure is closed after its test."""

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn.datasets import make_moons
from sklearn.linear_model import BayesianRidge, LogisticRegression


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def line():
    generator = np.random.default_rng(0)
    X = generator.uniform(-1, 1, (60, 1))
    return X, np.sin(2 * X[:, 0]) + 0.1 * generator.normal(size=60)


@pytest.fixture(scope="module")
def ridge(line):
    return BayesianRidge().fit(*line)


@pytest.fixture(scope="module")
def moons():
    return make_moons(60, noise=0.2, random_state=0)


@pytest.fixture(scope="module")
def logistic(moons):
    return LogisticRegression().fit(*moons)
