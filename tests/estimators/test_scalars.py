"""Numbers of NumPy, and arrays and tensors of shape (), are taken as Python numbers."""

import numpy as np
import pytest
import torch
from nets import blobs, classifier, regressor, waves

from sklaplace import (
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
    MCDropoutClassifier,
    SWAGClassifier,
    dirichlet,
    metrics,
)
from sklaplace.plotting import DirichletDisplay

(X, Y), (X_REG, T) = blobs(), waves()
# for fractions that float32 represents exactly, and for small counts
FRACTIONS = np.float64, np.float32, np.asarray, torch.tensor
COUNTS = np.int64, np.uint8, np.asarray, torch.tensor


@pytest.fixture(scope="module")
def models():
    clf = LaplaceClassifier(random_state=0).fit(X, Y).conformalize(X, Y)
    reg = LaplaceRegressor(random_state=0).fit(X_REG, T).conformalize(X_REG, T)
    ensemble = DeepEnsembleRegressor(n_estimators=2, random_state=0).fit(X_REG, T)
    dropout = MCDropoutClassifier(n_samples=5, random_state=0).fit(X, Y)
    return {"clf": clf, "reg": reg, "ensemble": ensemble, "dropout": dropout}


FIXED = {"prior_precision": 1.0, "sigma_noise": 1.0}
ALPHA = torch.tensor([[6.0, 3.0, 1.0], [600.0, 300.0, 100.0]])
OF_FRACTIONS = {
    "set": lambda m, q: m["clf"].predict_set(X, q),
    "bridge": lambda m, q: m["dropout"].predict_set(X, q, method="bridge"),
    "conformal set": lambda m, q: m["clf"].predict_set(X, q, method="conformal"),
    "plausible": lambda m, q: dirichlet.plausible_classes(ALPHA, q),
    "beta": lambda m, q: dirichlet.interval(ALPHA, q),
    "interval": lambda m, q: m["reg"].predict_interval(X_REG, q),
    "conformal": lambda m, q: m["reg"].predict_interval(X_REG, q, method="conformal"),
    "coverage": lambda m, q: m["ensemble"].predict(X_REG, coverage=q)[1],
    "quantiles": lambda m, q: m["reg"].predict_quantiles(X_REG, q),
    "module": lambda m, q: m["reg"].to_module(q)(torch.from_numpy(X_REG))[2],
    "score": lambda m, q: metrics.interval_score(T, np.c_[T, T + 1], coverage=q),
    "fpr": lambda m, q: metrics.ood_fpr(T, T - 1, tpr=q),
}
OF_COUNTS = {
    "set": lambda m, k: m["clf"].predict_set(X, 0.01, k),
    "top": lambda m, k: m["clf"].predict_top_k(X, k)[1],
    "draws": lambda m, k: m["clf"].sample_proba(X, k),
    "masks": lambda m, k: m["dropout"].sample_latent(X, k),
    "targets": lambda m, k: m["reg"].sample_y(X_REG, k),
    "members": lambda m, k: m["ensemble"].sample_y(X_REG, k),
    "seed": lambda m, k: m["clf"].sample_proba(X, 2, random_state=k),
    "folds": lambda m, k: (
        LaplaceRegressor(regressor(max_epochs=2), random_state=0, **FIXED)
        .fit(X_REG, T)
        .conformalize(X_REG, T, cv=k)
        .predict_interval(X_REG, method="conformal")
    ),
    "seed of y": lambda m, k: m["ensemble"].sample_y(X_REG, 2, random_state=k),
    "dirichlet": lambda m, k: dirichlet.sample(ALPHA, k, k),
    "bins": lambda m, k: metrics.expected_calibration_error(
        Y, m["clf"].predict_proba(X), n_bins=k
    ),
    "grid": lambda m, k: (
        DirichletDisplay.from_predictions(ALPHA[1], grid_resolution=k).proba
    ),
}


@pytest.mark.parametrize("kind", FRACTIONS)
@pytest.mark.parametrize("name", OF_FRACTIONS)
def test_fractions(name, kind, models):
    found, expected = (OF_FRACTIONS[name](models, q) for q in (kind(0.125), 0.125))
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("name", OF_COUNTS)
def test_counts(name, kind, models):
    found, expected = (OF_COUNTS[name](models, k) for k in (kind(3), 3))
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [np.True_, np.asarray(True), torch.tensor(True)])
def test_booleans_are_no_numbers(value, models):
    for call in (OF_FRACTIONS["set"], OF_COUNTS["top"], OF_COUNTS["seed"]):
        with pytest.raises(ValueError, match=r"Choose"):
            call(models, value)


SETTINGS = {
    "n_samples": (LaplaceClassifier, {"pred_type": "nn", "n_samples": 3}),
    "draws": (MCDropoutClassifier, {"n_samples": 3}),
    "batch_size": (LaplaceClassifier, {"batch_size": 16}),
    "snapshots": (SWAGClassifier, {"n_snapshots": 20, "steps_per_snapshot": 20}),
    "rank": (SWAGClassifier, {"n_snapshots": 3, "max_rank": 2, "n_samples": 3}),
    "structure": (
        LaplaceRegressor,
        {"hessian_structure": "lowrank", "structure_params": {"rank": 2}},
    ),
    "curvature": (
        LaplaceClassifier,
        {"curvature": "ggn_mc", "curvature_params": {"n_draws": 2}},
    ),
    "subset": (
        LaplaceRegressor,
        {"subset_of_weights": "subnetwork", "subset_params": {"n_weights": 5}}
        | {"hessian_structure": "full"},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_narrow_integers_in_the_constructor(name):
    """Products of them would overflow."""
    kind, options = SETTINGS[name]

    def narrow(value):
        if isinstance(value, dict):
            return {key: narrow(entry) for key, entry in value.items()}
        return np.uint8(value) if isinstance(value, int) else value

    is_regressor = kind is LaplaceRegressor
    net = None if kind is MCDropoutClassifier else classifier(max_epochs=2)
    net = regressor(max_epochs=2) if is_regressor else net
    data = (X_REG, T) if is_regressor else (X, Y)
    given = {name: FIXED[name] for name in FIXED.keys() & {*kind._get_param_names()}}
    found, expected = (
        kind(net, random_state=0, **given, **chosen).fit(*data).score_samples(data[0])
        for chosen in (narrow(options), options)
    )
    np.testing.assert_array_equal(found, expected)
