"""
Several targets at once
=======================

One network predicts two targets. Each target has its own noise and its own interval.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_linnerud
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import LaplaceRegressor

# %%
# The inputs are three exercises of 20 people, and the targets are their weight and
# waist. The last three people are kept for testing.
X, y = load_linnerud(return_X_y=True)
y = y[:, :2]
names = "weight (pounds)", "waist (inches)"
model = make_pipeline(StandardScaler(), LaplaceRegressor(random_state=0))
model.fit(X[:-3], y[:-3])

mean, std = model.predict(X[-3:], return_std=True)
for number, row in enumerate(zip(mean, std, y[-3:], strict=True)):
    shown = [f"{m:.0f} ± {s:.0f} (measured {t:.0f})" for m, s, t in np.transpose(row)]
    print(f"person {number}: " + ", ".join(shown))

# %%
# ``sample_latent`` draws the noise-free outputs jointly over the targets.
laplace, scaled = model[-1], model[0].transform(X[-3:])
draws = laplace.sample_latent(scaled, n_samples=500, random_state=0)
figure, ax = plt.subplots(figsize=(5, 3.5), layout="constrained")
for number, color in enumerate(["#0072B2", "#D55E00", "#009E73"]):
    ax.scatter(*draws[number], s=4, alpha=0.3, color=color)
    ax.scatter(*y[-3 + number], marker="*", s=120, color=color, edgecolor="black")
ax.set(xlabel=names[0], ylabel=names[1], title="Draws of the means; stars are measured")
plt.show()

# %%
# The targets of the first two people are within one standard deviation of the mean. The
# third person is more than two standard deviations lighter than predicted: 17 training
# samples are too few for precise predictions.
