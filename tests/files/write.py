"""Write files in the current format, which all later versions must load.

Run ``python tests/files/write.py``, with skops installed, after a change of
`sklaplace.estimators.fitting.members.FORMAT`. Do not change files of earlier formats.
"""

import sys
import warnings
from pathlib import Path

import joblib
import numpy as np
import torch
from sklearn.frozen import FrozenEstimator

FILES = Path(__file__).parent
sys.path.insert(0, str(FILES.parent))

from nets import MLP, classifier, regressor, seeded  # noqa: E402

import sklaplace  # noqa: E402
from sklaplace.estimators.fitting.members import FORMAT  # noqa: E402

rng = np.random.default_rng(0)
X = rng.standard_normal((60, 2))
LABELS = (X[:, 0] + X[:, 1] > 0).astype(int)
TARGETS = np.sin(X[:, :1]) + rng.standard_normal((60, 1)) / 9
FORMATS = sorted(FILES.glob("format_*"))
STRUCTURES = "diag", "full", "kron", "lowrank", "gp", "nystrom", "variational"


def net(n_out):
    make = classifier if n_out == 2 else regressor
    module = {"module__n_out": n_out, "module__dtype": torch.float64}
    return make(MLP, max_epochs=2, **module)


def models():
    """Return unfitted estimators of all kinds and structures."""
    options = {"prior_precision": 1.0, "random_state": 0}
    found = {
        f"LaplaceClassifier_{structure}": sklaplace.LaplaceClassifier(
            net(2), hessian_structure=structure, **options
        )
        for structure in STRUCTURES
    }
    found["LaplaceRegressor"] = sklaplace.LaplaceRegressor(random_state=0)
    found["LaplaceRegressor_all"] = sklaplace.LaplaceRegressor(
        net(1), subset_of_weights="all", **options
    )
    frozen = FrozenEstimator(seeded(net(2), X, LABELS))
    found["LaplaceClassifier_frozen"] = sklaplace.LaplaceClassifier(frozen, **options)
    for kind in ("LaplaceClassifierCV", "LaplaceRegressorCV"):
        cv = {"prior_precisions": [0.1, 1.0], "cv": 2, "random_state": 0}
        n_out = 2 if kind == "LaplaceClassifierCV" else 1
        found[kind] = getattr(sklaplace, kind)(net(n_out), **cv)
    for method in ("DeepEnsemble", "MCDropout", "SWAG", "Variational"):
        for n_out, suffix in ((2, "Classifier"), (1, "Regressor")):
            name = f"{method}{suffix}"
            own = {"MCDropout": None}.get(method, net(n_out))
            found[name] = getattr(sklaplace, name)(own, random_state=0)
    found["LaplaceRanker"] = sklaplace.LaplaceRanker(**options)
    return found


def inputs(model):
    """Return samples, or pairs of samples for a ranker."""
    return X.reshape(30, 2, 2) if type(model).__name__ == "LaplaceRanker" else X


def predicted(model):
    """Return predictions that a loaded file must reproduce."""
    if hasattr(model, "predict_proba"):
        return model.predict_proba(inputs(model))
    return np.stack(model.predict(X, return_std=True))


def check(model, path):
    """Compare the predictions of a loaded model with the stored predictions."""
    expected = np.load(path.parent / "expected.npz")[path.stem]
    tolerance = 1e-12 * np.abs(expected).max()
    np.testing.assert_allclose(predicted(model), expected, rtol=0, atol=tolerance)


if __name__ == "__main__":
    import skops.io

    warnings.simplefilter("ignore")
    folder, expected = FILES / f"format_{FORMAT}", {}
    folder.mkdir(exist_ok=True)
    for name, model in models().items():
        rows = inputs(model)
        y = LABELS if hasattr(model, "predict_proba") else TARGETS
        model.fit(rows, y[: len(rows)])
        joblib.dump(model, folder / f"{name}.joblib", compress=3)
        skops.io.dump(model, folder / f"{name}.skops", compression=8)
        expected[name] = predicted(model)
    np.savez_compressed(folder / "expected.npz", **expected)
