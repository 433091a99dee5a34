"""
Intervals with guaranteed coverage
==================================

``conformalize`` corrects intervals on held-out samples, so that at least 90 % of new
targets lie in them on average. The guarantee says nothing about single inputs: with
constant noise, intervals are equally wide everywhere, and too narrow where the targets
are noisy. With the default noise, which depends on the inputs, they follow the noise.
"""

import matplotlib.pyplot as plt
import numpy as np

from sklaplace import LaplaceRegressor

rng = np.random.default_rng(0)
X = rng.uniform(-3, 3, (1500, 1))
y = np.sin(X[:, 0]) + (0.1 + 0.3 * abs(X[:, 0])) * rng.standard_normal(1500)
X_train, X_held_out, X_test = np.split(X, 3)
y_train, y_held_out, y_test = np.split(y, 3)

order, noisy = X_test[:, 0].argsort(), np.abs(X_test[:, 0]) > 2
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
titles = {"homoscedastic": "constant noise", "auto": "noise that depends on x"}
for ax, (noise, title) in zip(axes, titles.items(), strict=True):
    model = LaplaceRegressor(sigma_noise=noise, random_state=0).fit(X_train, y_train)
    model.conformalize(X_held_out, y_held_out)
    low, high = model.predict_interval(X_test, coverage=0.9, method="conformal").T
    inside = (low <= y_test) & (y_test <= high)
    text = f"coverage {inside.mean():.1%}, {inside[noisy].mean():.1%} where |x| > 2"
    print(f"{title}: {text}")
    band = X_test[order, 0], low[order], high[order]
    ax.fill_between(*band, color="#0072B2", alpha=0.3)
    ax.scatter(X_test, y_test, s=5, color="black")
    ax.set(title=f"{title}\n{text}", xlabel="x")
plt.show()
