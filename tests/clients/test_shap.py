"""shap: explanations of probabilities, standard deviations and epistemic entropies."""

import numpy as np
import pandas as pd
import pytest
from nets import blobs

from sklaplace import LaplaceClassifier

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


def contributions(model, background, rows):
    """Return the contributions of columns to the epistemic part, (n, n_columns)."""

    def epistemic(values):
        table = pd.DataFrame(values, columns=rows.columns)
        return model.predict_uncertainty(table)[:, 2]

    explainer = shap.KernelExplainer(epistemic, background)
    shares = explainer.shap_values(rows, silent=True)
    return pd.DataFrame(shares, rows.index, rows.columns)


def test_a_wrong_unit_explains_the_epistemic_part(figure):
    (X, y), (X_new, _) = blobs(90), blobs(5, seed=1)
    table, rows = (pd.DataFrame(values).add_prefix("x") for values in (X, X_new))
    rows["x1"] *= 100
    model = LaplaceClassifier(random_state=0).fit(table, y)
    shares = contributions(model, table[:20], rows)
    # the contributions of a row sum to the difference from the mean of the background
    mean = model.predict_uncertainty(table[:20])[:, 2].mean()
    found = model.predict_uncertainty(rows)[:, 2]
    np.testing.assert_allclose(shares.sum(axis=1), found - mean, atol=1e-6)
    assert (shares["x1"] > 0.9 * shares.abs().sum(axis=1)).all()
    figure(**shares.mean())
