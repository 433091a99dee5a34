"""Cached results of memory= equal newly computed results."""

import numpy as np
import pytest
from nets import MLP, RecordTraining, TanhMLP, classifier
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from skorch.callbacks import EpochScoring

from sklaplace import LaplaceClassifier

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2)).astype("f4")
Y = np.arange(60) % 3


def fitted_net():
    return FrozenEstimator(classifier(MLP, max_epochs=1).fit(X, Y))


def model(memory=None, **params):
    settings = {"subset_of_weights": "all", "hessian_structure": "diag"}
    settings |= {"prior_precision": "marglik", "random_state": 0}
    settings |= {"estimator": classifier(MLP, max_epochs=2), **params}
    return LaplaceClassifier(memory=memory, **settings)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("first", [False, True, "auto"])
def test_every_refine_finds_what_it_needs(tmp_path, subset, first):
    values = {"subset_of_weights": subset}
    model(tmp_path, refine=first, **values).fit(X, Y)
    for refine in (False, True, "auto"):
        found = model(tmp_path, refine=refine, **values).fit(X, Y)
        wanted = clone(found).set_params(memory=None).fit(X, Y)
        np.testing.assert_array_equal(found.predict_proba(X), wanted.predict_proba(X))
        assert found.posterior_.is_refitted == wanted.posterior_.is_refitted


def test_a_grid_over_refine(tmp_path):
    grid = {"refine": ["auto", True, False]}
    search = GridSearchCV(model(tmp_path), grid, cv=2, error_score="raise")
    search.fit(X, Y)
    assert len(search.cv_results_["mean_test_score"]) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"X": X + 1},
        {"y": Y[::-1]},
        {"sample_weight": 1.0 + Y},
        {"random_state": 1},
        {"estimator": classifier(MLP, max_epochs=2, lr=0.5)},
        {"estimator": classifier(TanhMLP, max_epochs=2)},
        {"estimator": fitted_net()},
        {"curvature": "ef"},
    ],
    ids=lambda change: "-".join(change),
)
def test_whatever_the_fit_depends_on_makes_a_new_one(tmp_path, change):
    data = {"X": X, "y": Y}
    model(tmp_path).fit(**data)
    data |= {k: v for k, v in change.items() if k in ("X", "y", "sample_weight")}
    params = {k: v for k, v in change.items() if k not in data}
    changed = model(tmp_path).set_params(**params).fit(**data)
    wanted = clone(changed).set_params(memory=None).fit(**data)
    for name in ("predict_proba", "score_samples"):
        found, expected = (getattr(some, name)(X) for some in (changed, wanted))
        np.testing.assert_array_equal(found, expected)


def test_a_search_over_priors_trains_once_per_fold(tmp_path):
    grid = {"prior_precision": [0.1, 1.0, 10.0], "temperature": [0.5, 1.0]}
    net = classifier(MLP, max_epochs=2, callbacks=[RecordTraining()])
    found, expected = (
        GridSearchCV(model(memory, estimator=net), grid, cv=2, refit=False)
        for memory in (tmp_path, None)
    )
    RecordTraining.steps.clear()
    found.fit(X, Y)
    assert RecordTraining.steps == [30] * 2 * 2
    expected.fit(X, Y)
    for name in ("split0_test_score", "split1_test_score"):
        np.testing.assert_array_equal(
            found.cv_results_[name], expected.cv_results_[name]
        )


def test_what_cannot_be_pickled_is_fitted_without_memory(tmp_path):
    class Local(MLP):
        pass

    for net in (classifier(Local), classifier(callbacks=[EpochScoring(lambda *_: 0)])):
        own = model(tmp_path).set_params(estimator=net)
        with pytest.warns(UserWarning, match="memory has no effect: ") as log:
            own.fit(X, Y)
        assert len(str(log[0].message)) < 500
        wanted = clone(own).set_params(memory=None).fit(X, Y)
        np.testing.assert_array_equal(own.predict_proba(X), wanted.predict_proba(X))
    assert not list(tmp_path.rglob("output.pkl"))


def test_without_a_random_state_nothing_is_stored(tmp_path):
    with pytest.warns(UserWarning, match="memory has no effect with random_state=None"):
        model(tmp_path, random_state=None).fit(X, Y)
    assert not list(tmp_path.rglob("output.pkl"))
