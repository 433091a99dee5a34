"""CosineAdam: Adam with cosine annealing and many steps per batch.

skorch iterates over the data set once per epoch. For a small network, this iteration
costs more than a step. With many steps per batch, full-batch training needs a single
epoch. Step t of T has the size ``lr (1 + cos(π t / T)) / 2``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class CosineAdam(torch.optim.Adam):
    """Adam with a cosine schedule over ``n_steps`` steps on each batch.

    Parameters
    ----------
    params : iterable
        Parameters or parameter groups.
    lr : float, default=0.01
        Size of the first step. The last step size is close to zero.
    n_steps : int, default=500
        Number of steps per batch.
    **options
        Options of `torch.optim.Adam`.

    References
    ----------
    Kingma and Ba (2015), "Adam: a method for stochastic optimization"; Loshchilov and
    Hutter (2017), "SGDR: stochastic gradient descent with warm restarts", eq. (5).
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, n_steps: int = 500, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, **options)
        self.n_steps = n_steps

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Take ``n_steps`` steps with decreasing step sizes, then restore the first.

        Parameters
        ----------
        closure : callable
            Function that computes gradients and returns the loss.

        Returns
        -------
        Tensor of shape ()
            Loss before the first step.
        """
        initial_rates = [group["lr"] for group in self.param_groups]
        losses = []
        for step in range(self.n_steps):
            factor = (1 + math.cos(math.pi * step / self.n_steps)) / 2
            for group, lr in zip(self.param_groups, initial_rates, strict=True):
                group["lr"] = factor * lr
            with torch.enable_grad():
                losses.append(closure().detach())
            super().step()
        for group, lr in zip(self.param_groups, initial_rates, strict=True):
            group["lr"] = lr
        return losses[0]
