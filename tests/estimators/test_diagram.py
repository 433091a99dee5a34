"""What estimators, callbacks and posteriors show in print and in a notebook."""

import html
import re

import pytest
from nets import blobs, waves
from refusals import CLASSIFIERS, REGRESSORS
from sklearn.base import is_classifier
from sklearn.pipeline import make_pipeline

import sklaplace
from sklaplace import LaplaceClassifier

X, Y = blobs()
X_REG, Y_REG = waves()


def shown(model):
    """The text of a diagram."""
    found = re.sub(r"<(script|style).*?</\1>", "", model._repr_html_(), flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]+>", " ", found)))


@pytest.fixture(scope="module")
def fitted():
    return LaplaceClassifier(random_state=0).fit(X, Y)


# one of each kind in every run
FIRST_QUICK = [
    kind if kind is kinds[0] else pytest.param(kind, marks=pytest.mark.slow)
    for kinds in (list(CLASSIFIERS), list(REGRESSORS))
    for kind in kinds
]


class TestDiagram:
    @pytest.mark.parametrize("kind", FIRST_QUICK)
    def test_says_what_was_fitted(self, kind):
        model = kind(random_state=0)
        assert re.search("(Categorical|Gaussian) likelihood", shown(model)) is None
        model.fit(*((X, Y) if is_classifier(model) else (X_REG, Y_REG)))
        assert f"{kind.__name__} {model._summary()}" in shown(model)
        assert repr(model) == f"{kind.__name__}(random_state=0)"

    def test_parameters_that_were_set_after_the_fit(self):
        model = LaplaceClassifier(random_state=0).fit(X, Y)
        found = model._summary()
        model.set_params(hessian_structure="diag", subset_of_weights="all")
        assert model._summary() == found
        assert found in shown(model)
        assert "LaplaceClassifier" in shown(make_pipeline(model))


@pytest.mark.parametrize(
    "settings", [{}, {"subset_of_weights": ["head"], "prior_precision": 0.5}]
)
def test_callbacks_can_be_evaluated(settings):
    text = repr(sklaplace.MarglikTraining(**settings))
    assert repr(eval(text, vars(sklaplace))) == text
