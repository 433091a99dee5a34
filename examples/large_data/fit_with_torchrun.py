"""
Fit in several processes
========================

With ``distributed=True`` each process of ``torch.distributed`` computes the curvature
of a part of the samples, and all get the same posterior. Two processes on one machine:

    torchrun --nproc-per-node 2 fit_with_torchrun.py

As a plain script it is one process, and prints the same but for rounding. On GPUs, use
the backend "nccl", and ``device=f"cuda:{os.environ['LOCAL_RANK']}"`` in the net.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

# torchrun tells each process how many there are
is_group = "WORLD_SIZE" in os.environ
if is_group:
    dist.init_process_group("gloo")
rank, size = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)

# Every process is given the same samples: files mapped to memory, if there are many.
X, y = make_classification(4000, 20, n_informative=8, n_classes=3, random_state=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# The same seeds train the same network in each. A net that is trained by several
# processes together, as by skorch's AccelerateMixin, is taken as well.
torch.manual_seed(0)
net = NeuralNetClassifier(
    nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)).double(),
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    max_epochs=10,
    lr=0.01,
    train_split=None,
    verbose=0,
)
model = LaplaceClassifier(
    net, prior_precision="marglik", distributed=is_group, batch_size=100, random_state=0
)
model.fit(X_train, y_train)

if rank == 0:
    print(f"processes {size}")
    print(f"log evidence {model.log_marginal_likelihood_value_:.6f}")
    print(f"accuracy {model.score(X_test, y_test):.4f}")
if is_group:
    dist.destroy_process_group()
