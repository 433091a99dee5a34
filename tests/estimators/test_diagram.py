"""Text and notebook displays of estimators, callbacks and posteriors."""

import html
import re
from pathlib import Path

import pytest
from nets import blobs, waves
from refusals import FIRST_QUICK
from sklearn.base import BaseEstimator, is_classifier
from sklearn.pipeline import make_pipeline

import sklaplace
from sklaplace import LaplaceClassifier, LaplaceRegressor

X, Y = blobs()
X_REG, Y_REG = waves()


def shown(model):
    """Return the text of a diagram."""
    found = re.sub(r"<(script|style).*?</\1>", "", model._repr_html_(), flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]+>", " ", found)))


def attributes(model):
    """Return names in the table of fitted attributes, if scikit-learn has the table."""
    if not hasattr(BaseEstimator, "_get_fitted_attr_html"):
        pytest.skip("this scikit-learn has no table of fitted attributes")
    return set(model._get_fitted_attr_html())


@pytest.fixture(scope="module")
def fitted():
    return LaplaceClassifier(random_state=0).fit(X, Y)


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
        model.set_params(link_approx="none")  # refused by predictions
        assert "posterior over" not in shown(model)
        assert "LaplaceClassifier" in shown(make_pipeline(model))

    def test_no_evidence_that_misleads(self, fitted):
        """The prior was not chosen by evidence, and the weights may be improbable."""
        name = "log_marginal_likelihood_value_"
        assert name not in attributes(fitted)
        model = LaplaceClassifier(prior_precision="marglik", random_state=0).fit(X, Y)
        assert name in attributes(model)
        value = f"{model.log_marginal_likelihood_value_:.1f}"
        assert f"log evidence {value}" in shown(model)
        assert hasattr(fitted, name)

    def test_attributes_are_documented(self, fitted):
        """Shown attributes are public: each is named in the docstring of the class."""
        model = LaplaceRegressor(random_state=0).fit(X_REG, Y_REG)
        for found in (fitted, model):
            documented = type(found).__doc__.partition("Attributes\n")[2]
            missing = {name for name in attributes(found) if name not in documented}
            assert missing == set()


@pytest.mark.parametrize(
    "settings", [{}, {"subset_of_weights": ["head"], "prior_precision": 0.5}]
)
def test_callbacks_can_be_evaluated(settings):
    text = repr(sklaplace.MarglikTraining(**settings))
    assert repr(eval(text, vars(sklaplace))) == text


ESTIMATORS = [
    getattr(sklaplace, name.rpartition(".")[2]) for name in sklaplace.TRUSTED_TYPES
]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
def test_a_diagram_links_to_the_page_of_the_estimator(kind):
    api = (DOCS / "api.rst").read_text(encoding="utf-8")
    link = kind()._get_doc_link()
    assert f'href="{link}"' in kind()._repr_html_()
    # the name of the page that autosummary generates
    assert link.endswith(f"/generated/sklaplace.{kind.__name__}.html")
    assert re.search(rf"^   {kind.__name__}$", api, re.M)


def test_a_subclass_of_a_user_has_no_page():
    class Own(LaplaceClassifier):
        pass

    assert Own()._get_doc_link() == ""
