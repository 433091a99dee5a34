"""Data and estimators for plots; every figure is closed after its test."""

import displays
import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def line():
    return displays.LINE


@pytest.fixture
def ridge():
    return displays.ridge()


@pytest.fixture
def moons():
    return displays.MOONS


@pytest.fixture
def logistic():
    return displays.logistic()
