"""imbalanced-learn: resampling before a classifier."""

import numpy as np
import pytest
from nets import classifier
from sklearn.base import clone
from sklearn.metrics import balanced_accuracy_score

from sklaplace import LaplaceClassifier

pipeline = pytest.importorskip("imblearn.pipeline")
sampling = pytest.importorskip("imblearn.over_sampling")
ensemble = pytest.importorskip("imblearn.ensemble")


@pytest.fixture(scope="module")
def rare():
    """Return training data with 5 % of the second class, and balanced test data."""
    rng = np.random.default_rng(0)

    def draw(n_first, n_second):
        y = np.repeat([0, 1], [n_first, n_second])
        X = rng.normal(size=(len(y), 2)) + 1.5 * y[:, None]
        return X.astype("f4"), y

    return draw(380, 20), draw(300, 300)


@pytest.mark.parametrize("name", ["RandomOverSampler", "SMOTE"])
def test_over_sampling_finds_the_rare_class(name, rare, figure):
    (X, y), (X_test, y_test) = rare
    model = LaplaceClassifier(classifier(module__n_out=2), random_state=0)
    sampler = getattr(sampling, name)(random_state=0)
    found = pipeline.make_pipeline(sampler, clone(model)).fit(X, y)
    plain = balanced_accuracy_score(y_test, model.fit(X, y).predict(X_test))
    balanced = balanced_accuracy_score(y_test, found.predict(X_test))
    assert balanced > plain + 0.1
    figure(balanced_accuracy=balanced, plain=plain)


def test_balanced_bagging(rare):
    (X, y), (X_test, y_test) = rare
    net = classifier(module__n_out=2, max_epochs=10)
    bagging = ensemble.BalancedBaggingClassifier(
        LaplaceClassifier(net, random_state=0), n_estimators=3, random_state=0
    )
    found = bagging.fit(X, y).predict(X_test)
    assert balanced_accuracy_score(y_test, found) > 0.75
