"""Short training, for tests of what holds however well a network is trained."""

import pytest

from sklaplace.estimators.training import laplace as laplace_trainer
from sklaplace.networks import default

SHORT = (
    (default._LBFGS, "optimizer__max_iter", 6),
    (default._ADAM, "optimizer__n_steps", 50),
    (default._LONG_ADAM, "optimizer__n_steps", 20),
    (vars(laplace_trainer), "N_FOLDS", 2),
)
FULL = [settings[name] for settings, name, _ in SHORT]


@pytest.fixture(scope="module", autouse=True)
def short_training(request):
    """Train default networks for a few steps, and tune on two folds.

    Unless slow tests are run: then all are as users have it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "not slow" in request.config.option.markexpr:
            for settings, name, value in SHORT:
                patch.setitem(settings, name, value)
        yield


@pytest.fixture
def full_training(monkeypatch):
    """Train default networks, and networks of folds, as users have it."""
    for (settings, name, _), value in zip(SHORT, FULL, strict=True):
        monkeypatch.setitem(settings, name, value)
