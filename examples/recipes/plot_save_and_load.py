"""
Save and load
=============

``joblib`` stores a fitted estimator, network and posterior included. A file of
``skops`` runs no code when it is loaded, and the types in it are listed first; see
:ref:`saving`. A new Python process loads both and predicts the same numbers.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import joblib
import matplotlib.pyplot as plt
import numpy as np
import skops.io

from sklaplace import LaplaceRegressor
from sklaplace.plotting import PredictiveBandDisplay

rng = np.random.default_rng(0)
X = np.sort(rng.uniform(-3, 3, 80))[:, None]
y = np.sin(X[:, 0]) + 0.2 * rng.standard_normal(80)
options = {"subset_of_weights": "all", "prior_precision": "marglik"}
model = LaplaceRegressor(random_state=0, **options).fit(X, y)
X_new = np.linspace(-5, 5, 200)[:, None]

new_process = """
import joblib, numpy, skops.io, sklaplace
X = numpy.load("X.npy")
pickled = joblib.load("model.joblib")
listed = skops.io.load("model.skops", trusted=sklaplace.TRUSTED_TYPES)
found = [model.predict(X, return_std=True) for model in (pickled, listed)]
numpy.save("found.npy", found)
"""
with tempfile.TemporaryDirectory() as folder:
    joblib.dump(model, Path(folder, "model.joblib"), compress=3)
    skops.io.dump(model, Path(folder, "model.skops"))
    np.save(Path(folder, "X.npy"), X_new)
    subprocess.run([sys.executable, "-c", new_process], cwd=folder, check=True)
    found = np.load(Path(folder, "found.npy"))  # file, mean and std, sample

expected = np.array(model.predict(X_new, return_std=True))
for name, values in zip(["joblib", "skops"], found, strict=True):
    print(f"{name}: largest difference {np.abs(values - expected).max()}")

figure, axes = plt.subplots(
    1, 2, figsize=(8, 3.2), sharex=True, sharey=True, layout="constrained"
)
for ax, (mean, std), name in zip(
    axes, [expected, found[1]], ["before saving", "loaded by skops"], strict=True
):
    points = (X[:, 0], y)
    PredictiveBandDisplay(x=X_new[:, 0], mean=mean, std=std, points=points).plot(ax)
    ax.set(title=name, xlabel="x")
figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()
