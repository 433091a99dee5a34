"""Models and samples shared by the client tests; other packages may warn."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nets import MLP, blobs, classifier, regressor
from sklearn.model_selection import train_test_split

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.likelihoods import HeteroscedasticNLLLoss

HERE = Path(__file__).parent
# a program that tests start, of a package that may not be there
collect_ignore = ["accelerated_fit.py"]
# of the packages themselves, about scikit-learn, pandas and Python
THEIRS = "DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"


def pytest_collection_modifyitems(items):
    """Ignore deprecation warnings raised by clients."""
    for item in items:
        if HERE in item.path.parents:
            for category in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))


@pytest.fixture
def figure(request):
    """Print the measurements of a test; run with `-n0 -s` to see them."""

    def show(**values):
        found = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        print(f"\n{request.node.name}: {found}")  # noqa: T201

    return show


def parts(X, y):
    """Return training, calibration and test samples."""
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.4, random_state=0)
    X, X_cal, y, y_cal = train_test_split(X, y, test_size=0.5, random_state=0)
    return {"train": (X, y), "cal": (X_cal, y_cal), "test": (X_test, y_test)}


@pytest.fixture(scope="session")
def numbers():
    """Return data with input-dependent noise, and a regressor that estimates it."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(1500, 1)).astype("f4")
    noise = (0.1 + 0.3 * np.abs(X[:, 0])) * rng.standard_normal(1500)
    samples = parts(X, (np.sin(X[:, 0]) + noise).astype("f4"))
    net = regressor(
        MLP,
        module__n_in=1,
        module__n_out=2,
        module__width=20,
        criterion=HeteroscedasticNLLLoss,
        max_epochs=200,
    )
    model = LaplaceRegressor(net, prior_precision=1.0, random_state=0)
    return SimpleNamespace(model=model.fit(*samples["train"]), **samples)


@pytest.fixture(scope="session")
def classes():
    """Return data of three overlapping classes."""
    samples = parts(*blobs(1500))
    model = LaplaceClassifier(classifier(), random_state=0)
    return SimpleNamespace(model=model.fit(*samples["train"]), **samples)
