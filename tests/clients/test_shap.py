"""shap: explanations of probabilities and of standard deviations."""

import numpy as np
import pytest

shap = pytest.importorskip("shap")


def test_probabilities_add_up(classes):
    X, proba = classes.train[0][:20], classes.model.predict_proba
    explainer = shap.KernelExplainer(proba, X)
    rows = classes.test[0][:3]
    values = explainer.shap_values(rows, silent=True)
    total = values.sum(1) + explainer.expected_value
    np.testing.assert_allclose(total, proba(rows), atol=1e-6)


def test_noise_is_explained_by_the_input_it_depends_on(numbers, figure):
    def deviation(X):
        return numbers.model.predict(X[:, :1], return_std=True)[1]

    rng = np.random.default_rng(0)
    X = np.hstack([numbers.test[0][:30], rng.normal(size=(30, 1))])  # and a dummy
    explainer = shap.KernelExplainer(deviation, X)
    values = explainer.shap_values(np.array([[2.9, 0.0], [0.0, 0.0]]), silent=True)
    np.testing.assert_allclose(values[:, 1], 0, atol=1e-8)
    assert values[0, 0] > 0.1 > -0.1 > values[1, 0]
    figure(at_the_edge=values[0, 0], in_the_middle=values[1, 0])
