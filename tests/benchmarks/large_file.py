"""Peak memory of fit and predictions on a large file.

    python tests/benchmarks/large_file.py 10

This command writes a sparse file of 10 GB to a temporary folder. A separate process
fits the posterior of a frozen network with the default options and writes the predicted
probabilities to another file. The script prints the peak memory in MiB above the peak
of the network alone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.compare import resident, say
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

N_FEATURES, N_CLASSES, N_TRAINED = 784, 10, 2000


def write(folder, gigabytes):
    """Write mostly zero samples and their classes."""
    n = int(gigabytes * 1e9 / (4 * N_FEATURES))
    rng = np.random.default_rng(0)
    X = np.memmap(folder / "X.dat", "f4", "w+", shape=(n, N_FEATURES))
    for start in range(0, n, max(1, n // 2000)):
        some = X[start : start + 50]
        some[...] = rng.standard_normal(some.shape)
    X.flush()
    weights = rng.standard_normal((N_FEATURES, N_CLASSES)).astype("f4")
    starts = range(0, n, 50_000)
    y = [(X[start : start + 50_000] @ weights).argmax(1) for start in starts]
    np.save(folder / "y.npy", np.concatenate(y))


def fit(folder):
    """Fit, predict and print the peaks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    y = np.load(folder / "y.npy")
    X = np.memmap(folder / "X.dat", "f4", "r", shape=(len(y), N_FEATURES))
    layers = nn.Linear(N_FEATURES, 64), nn.ReLU(), nn.Linear(64, N_CLASSES)
    options = {"criterion": nn.CrossEntropyLoss, "train_split": None}
    net = NeuralNetClassifier(nn.Sequential(*layers), max_epochs=1, **options)
    net.set_params(verbose=0).fit(np.array(X[:N_TRAINED]), y[:N_TRAINED])
    net.predict_proba(np.array(X[:N_TRAINED]))
    network, start = resident("VmHWM"), perf_counter()
    model = LaplaceClassifier(FrozenEstimator(net), random_state=0).fit(X, y)
    fitted, middle = resident("VmHWM"), perf_counter()
    shape, step = (len(y), N_CLASSES), 100_000
    proba = np.lib.format.open_memmap(folder / "proba.npy", "w+", "f4", shape)
    for first in range(0, len(y), step):
        proba[first : first + step] = model.predict_proba(X[first : first + step])
    predicted, end = resident("VmHWM"), perf_counter()
    say(
        f"{X.nbytes / 1e9:.1f} GB, {len(y):,} samples: fit {fitted - network:.0f} MiB "
        f"and {middle - start:.0f} s, with predictions {predicted - network:.0f} MiB "
        f"and {end - start:.0f} s"
    )


def main():
    """Write the file, then fit in another process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, float(sys.argv[1]))
        subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--fit", folder], check=True
        )


if __name__ == "__main__":
    if sys.argv[1] == "--fit":
        fit(Path(sys.argv[2]))
    else:
        main()
