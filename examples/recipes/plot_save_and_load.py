"""
Save and load
=============

Two file formats store a fitted estimator with its network and its posterior.
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
# %%
# ``joblib`` uses pickle: loading a file can run any code in it. Loading a ``skops``
# file runs no code, and allows only trusted types; see :ref:`saving`. Here, a new
# Python process loads both files.
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
# %%
# We compare the predictions of the new process with those before saving.
expected = np.array(model.predict(X_new, return_std=True))
for name, values in zip(["joblib", "skops"], found, strict=True):
    print(f"{name}: largest difference {np.abs(values - expected).max()}")
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
results = {"before saving": expected, "loaded by skops": found[1]}
for ax, (name, (mean, std)) in zip(axes, results.items(), strict=True):
    points = (X[:, 0], y)
    PredictiveBandDisplay(x=X_new[:, 0], mean=mean, std=std, points=points).plot(ax)
    ax.set(title=name, xlabel="x")
plt.show()
# %%
# The predictions from both files are exactly equal to the predictions before saving.
