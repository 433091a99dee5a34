"""
On a GPU
========

The argument ``device="cuda"`` of the net moves training, curvature, posterior and
predictions to the GPU. Inputs and predictions are still numpy arrays.
"""

from time import perf_counter

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

X, y = load_digits(return_X_y=True)
X = (X / 16).astype("float32").reshape(-1, 1, 8, 8)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)


def cnn():
    convolution = nn.Conv2d(1, 32, 3, padding=1)
    layers = convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(512, 10))


# %%
# The script also runs on a machine without a GPU. The script measures the times for a
# posterior over the last layer and a posterior over all weights.
device = "cuda" if torch.cuda.is_available() else "cpu"
net = NeuralNetClassifier(cnn, criterion=nn.CrossEntropyLoss, lr=0.1, device=device)
net.set_params(verbose=0)
seconds = {}
for name, subset in [("last layer", "last_layer"), ("all weights", "all")]:
    model = LaplaceClassifier(net, subset_of_weights=subset, random_state=0)
    start = perf_counter()
    model.fit(X_train, y_train)
    fitted = perf_counter()
    model.predict_proba(X_test)
    seconds[name] = fitted - start, perf_counter() - fitted
    print(f"{name}: fit {seconds[name][0]:.2f} s, predict {seconds[name][1]:.2f} s")
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for shift, part, color in [(-0.2, "fit", "#0072B2"), (0.2, "predict", "#D55E00")]:
    places = [place + shift for place in range(len(seconds))]
    values = [value[part == "predict"] for value in seconds.values()]
    ax.bar_label(ax.bar(places, values, 0.4, color=color, label=part), fmt="%.2f")
ax.set(xticks=range(len(seconds)), xticklabels=list(seconds), ylabel="seconds")
ax.set(title=f"device={device!r}")
ax.legend(loc="upper left")
plt.show()
# %%
# Predictions are faster with a posterior over the last layer only. An estimator that
# was fitted on a GPU can be loaded and used on a machine without a GPU.
