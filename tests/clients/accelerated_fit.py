"""One of two processes that train and fit: ``python accelerated_fit.py RESULT``."""

import os

os.environ["SCIPY_ARRAY_API"] = "1"  # read when scipy is first imported

import sys

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from nets import MLP, QUIET, RowsSeen, blobs
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin
from torch import nn

from sklaplace import LaplaceClassifier

X, Y = blobs()
N_EPOCHS = 5
SETTINGS = {"prior_precision": 1.0, "batch_size": 8, "random_state": 0}


class AcceleratedClassifier(AccelerateMixin, NeuralNetClassifier):
    """A classifier that all processes train jointly."""

    def _initialize_accelerator(self):
        """Do not wrap the loss: DistributedDataParallel needs parameters to train."""
        criteria, self._criteria = self._criteria, []
        super()._initialize_accelerator()
        self._criteria = criteria
        return self


def main(result):
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    options = QUIET | {"callbacks": [RowsSeen()]}
    options |= {"criterion": nn.CrossEntropyLoss, "max_epochs": N_EPOCHS}
    net = AcceleratedClassifier(
        MLP, accelerator=accelerator, batch_size=10, device=None, **options
    )
    model = LaplaceClassifier(net, **SETTINGS).fit(X, Y)
    frozen = FrozenEstimator(model.estimator_)
    alone = LaplaceClassifier(frozen, **SETTINGS).fit(X, Y)
    np.savez(
        result,
        mean=model.posterior_.mean,
        dense=model.posterior_.structure.dense(),
        proba=model.predict_proba(X),
        n_seen=len(RowsSeen.trained) / N_EPOCHS,
        **{
            "mean alone": alone.posterior_.mean,
            "dense alone": alone.posterior_.structure.dense(),
        },
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
