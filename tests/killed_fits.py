"""Fits that are killed at random moments: ``python killed_fits.py FOLDER N``.

Each is a process of its own, forked from this one, which takes no time. Writes what
became of them to ``FOLDER/killed.pickle``.
"""

import os

os.environ["SCIPY_ARRAY_API"] = "1"  # read when scipy is first imported

import hashlib
import pickle
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # by the first step of an optimizer; here, once for all processes
from nets import classifier
from skorch.dataset import Dataset

from sklaplace import LaplaceClassifier

N_ROWS, N_FEATURES, N_SHARDS = 400, 20, 20


class Slow(Dataset):
    """Samples that take some time to read."""

    def __getitem__(self, index):
        time.sleep(2e-4)
        return super().__getitem__(index)


def samples():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N_ROWS, N_FEATURES)).astype("f4")
    return X, np.arange(N_ROWS) % 3


def fitted(checkpoint=None):
    """A fit with several networks, in training for half of the time."""
    X, y = samples()
    net = classifier(module__n_in=N_FEATURES, max_epochs=4, batch_size=64)
    model = LaplaceClassifier(
        net,
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision="marglik",
        batch_size=10,
        n_shards=N_SHARDS,
        random_state=0,
    )
    return model.fit(Slow(X, y), y, checkpoint=checkpoint)


def digest(model):
    """Return a hash of all bits of posterior and predictions."""
    posterior = model.posterior_
    parts = [posterior.mean, posterior.prior_precision, posterior.structure.dense()]
    state = hashlib.sha256(repr(model.log_marginal_likelihood_value_).encode())
    for part in [*parts, model.predict_proba(samples()[0])]:
        state.update(np.asarray(part).tobytes())
    return state.hexdigest()


def child(checkpoint, result):
    torch.set_num_threads(1)
    result.write_text(digest(fitted(checkpoint)))


def run(folder, seconds=None):
    """Fit in another process; return whether it was killed, and how long it took."""
    checkpoint, result = folder / "checkpoint", folder / "result"
    begun = time.monotonic()
    process = get_context("fork").Process(target=child, args=(checkpoint, result))
    process.start()
    process.join(seconds)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0, time.monotonic() - begun


def killed(folder, seconds):
    """Return the files of a fit that was killed, and the result of the next one."""
    folder.mkdir()
    while not run(folder, seconds)[0]:  # it was faster than the one that was measured
        (folder / "result").unlink()
        seconds *= 0.8
    left = sorted(file.name for file in (folder / "checkpoint").glob("*"))
    assert not (folder / "result").exists()
    assert not run(folder)[0]
    assert not (folder / "checkpoint").exists()
    return {"left": left, "seconds": seconds, "digest": (folder / "result").read_text()}


def main(folder, n):
    folder, n = Path(folder), int(n)
    whole = folder / "whole"
    whole.mkdir()
    _, seconds = run(whole)
    moments = (np.arange(n) + np.random.default_rng(0).uniform(size=n)) / n * seconds
    found = [killed(folder / str(k), moment) for k, moment in enumerate(moments)]
    content = {"killed": found, "seconds": seconds}
    (folder / "killed.pickle").write_bytes(pickle.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
