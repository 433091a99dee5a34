"""
Fit in several processes
========================

With ``distributed=True``, each process of ``torch.distributed`` computes the curvature
on its part of the samples. All processes obtain the same posterior. This command starts
two processes on one machine:

    torchrun --nproc-per-node 2 fit_with_torchrun.py

Without torchrun, the script runs in one process and prints the same numbers up to
rounding. On GPUs, use the backend "nccl" and pass
``device=f"cuda:{os.environ['LOCAL_RANK']}"`` to the net.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

# torchrun sets the number of processes in WORLD_SIZE
is_group = "WORLD_SIZE" in os.environ
if is_group:
    dist.init_process_group("gloo")
rank, size = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)

# Every process receives the same samples. For large data, map files to memory.
X, y = make_classification(4000, 20, n_informative=8, n_classes=3, random_state=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# With the same seed, each process trains the same network. A net that the processes
# train together, for example with skorch's AccelerateMixin, also works.
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
