"""Short training, for tests that do not depend on the quality of the network."""

import pytest

from sklaplace.estimators.training import folds
from sklaplace.networks import default

SHORT = (
    (default._LBFGS, "optimizer__max_iter", 6),
    (default._ADAM, "optimizer__n_steps", 50),
    (default._LONG_ADAM, "optimizer__n_steps", 20),
    (default._PARTS_ADAM, "optimizer__n_steps", 20),
    (vars(folds), "N_FOLDS", 2),
)
FULL = [settings[name] for settings, name, _ in SHORT]


@pytest.fixture(scope="module", autouse=True)
def short_training(request):
    """Train default networks for a few steps, and tune on two folds.

    If slow tests run, all networks are trained in full.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "not slow" in request.config.option.markexpr:
            for settings, name, value in SHORT:
                patch.setitem(settings, name, value)
        yield


@pytest.fixture
def full_training(monkeypatch):
    """Train default networks and networks of folds in full."""
    for (settings, name, _), value in zip(SHORT, FULL, strict=True):
        monkeypatch.setitem(settings, name, value)
