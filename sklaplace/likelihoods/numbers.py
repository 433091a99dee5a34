"""Likelihoods of numbers: real values and counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.hessians import Constant, OutputHessian
from sklaplace.likelihoods.base import Curved


@dataclass(frozen=True)
class Gaussian(Curved):
    """Normal targets around the outputs, one noise level for all of them."""

    has_noise = True

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Targets, (b, c), in the dtype of the outputs."""
        return y.reshape(f.shape).to(f)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Half the squared error per row, summed over outputs, (b,)."""
        return ((f - y) ** 2).sum(-1) / 2

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """``f - y``, (b, c)."""
        return f - y

    def hessian(self, f: Tensor) -> OutputHessian:
        """The identity."""
        return Constant(f.new_ones(len(f)), f.shape[-1])

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> u``."""
        return lambda u: u

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """``1/σ²``."""
        return sigma_noise**-2

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """``log(σ √(2π))`` per observed value."""
        return sigma_noise.log() + math.log(2 * math.pi) / 2

    def n_targets(self, n_outputs: int) -> int:
        """One observed value per output."""
        return n_outputs

    def n_draws(self, n_outputs: int) -> int:
        """One value per output."""
        return n_outputs

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Normal values around the outputs, (b, c)."""
        noise: Tensor = torch.special.ndtri(u)
        return f + noise.to(f)

    def width(self, n_targets: int) -> int:
        """One output per target column."""
        return n_targets
