"""What estimators take from memory= is what they would compute without it."""

import os
import re

import joblib
import numpy as np
import pytest
from costs import calls
from nets import MLP, classifier
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV

from sklaplace import LaplaceClassifier
from sklaplace.estimators import trainer

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2)).astype("f4")
Y = np.arange(60) % 3


def fitted_net():
    return FrozenEstimator(classifier(MLP, max_epochs=1).fit(X, Y))


def model(memory=None, **params):
    settings = {"subset_of_weights": "all", "hessian_structure": "diag"}
    settings |= {"prior_precision": "marglik", "random_state": 0, **params}
    return LaplaceClassifier(classifier(MLP, max_epochs=2), memory=memory, **settings)


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
    ("before", "values", "message"),
    [
        ({}, {"prior_precision": [1.0, 2.0]}, "prior_precision has shape"),
        ({}, {"prior_mean": [1.0, 2.0]}, "prior_mean has shape"),
        ({}, {"refine": True, "pred_type": "nn"}, "refine=True cannot be used"),
        ({"refine": True}, {"refine": True, "pred_type": "nn"}, "refine=True cannot"),
        (
            {"prior_precision": "auto"},
            {"prior_precision": "validation"},
            "'validation' needs",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:There are no rows that the network did not")
def test_what_is_refused_without_memory_is_refused_with_it(
    tmp_path, before, values, message
):
    own = model(tmp_path)
    if "auto" in before.values():
        own.set_params(estimator=fitted_net())
    own.set_params(**before).fit(X, Y)
    for memory in (None, tmp_path):
        refused = clone(own).set_params(memory=memory, **values)
        with pytest.raises(ValueError, match=re.escape(message)):
            refused.fit(X, Y)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_folder_of_all_is_refused_before_training(tmp_path):
    tmp_path.chmod(0o777)
    for memory in (tmp_path, joblib.Memory(tmp_path, verbose=0)):
        own = model(memory)
        with (
            calls(trainer, "train") as trained,
            pytest.raises(ValueError, match=r"memory=.* run chmod go-w"),
        ):
            own.fit(X, Y)
        assert not trained
        assert not hasattr(own, "estimator_")
