"""OutputPredictor: what networks that differ in their weights say of rows.

Batch by batch, outputs are drawn: those of one network under many weights, or of many
networks. A Gaussian with their moments, or the posterior's own where it has one,
answers what is asked of means and variances.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from sklaplace.core.budget import move, require_bytes
from sklaplace.core.checks import as_seed, check_count
from sklaplace.core.linalg import all_finite
from sklaplace.networks.data import Batches, count_rows, is_opaque
from sklaplace.networks.forward import Forward
from sklaplace.networks.inputs import InputType
from sklaplace.networks.outputs import OutputSpec, as_forward
from sklaplace.networks.training import private_rng
from sklaplace.posterior.predictive import WeightDistribution, moments, network_draws

# (network, batch of b rows) -> outputs (b, c, s) in float64
Draws = Callable[[Forward, Any], Tensor]
# mean (b, c) and covariance (b, c, c), or variances (b, c) -> answers (b, ...)
Question = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained net, how it is read, and the rows it has and has not seen."""

    net: Any
    inspected: Any
    train: Any
    held_out: Any

    def forward(self) -> Forward:
        """The network as a function to differentiate."""
        known = self.inspected
        return as_forward(
            self.net, known.output_map, known.logit_layer, known.output_shape
        )


class OutputPredictor(BaseEstimator, ABC):  # type: ignore[misc]
    """Draws of outputs, and Gaussians over them; not for direct use."""

    batch_size: int | None
    n_samples: int
    estimator_: Any
    network_spec_: Any
    _input_type: InputType
    _seed: int

    # -------------------------------------------------------------------- draws
    @abstractmethod
    def _drawn(self, n_samples: int, seed: int) -> Draws:
        """Joint draws of the outputs; refuses more than memory holds."""

    def _own_draws(self) -> Draws:
        """Those that predictions are made of: the same in every call."""
        return self._drawn(self.n_samples, self._seed)

    @property
    def _n_draws(self) -> int:
        """Their number."""
        return self.n_samples

    @property
    def _has_gaussian(self) -> bool:
        """Whether outputs are Gaussian, so that predictions need no draws."""
        return False

    def _of_own_draws(self, X: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the outputs (b, c, s) that predictions are made of."""
        return self._of_draws(X, self._own_draws(), self._n_draws, function)

    def _of_draws(
        self, X: Any, draws: Draws, n: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """A function of n drawn outputs (b, c, s), for all rows."""

        def ask(forward: Forward, x: Any) -> Tensor:
            return function(draws(forward, x)).cpu()

        return torch.cat(self._each_batch(X, ask, n_draws=n))

    def _sample_outputs(self, X: Any, n_samples: int, random_state: Any) -> np.ndarray:
        """Joint draws of the outputs, (n, c, n_samples)."""
        check_is_fitted(self)
        check_count("n_samples", n_samples)
        seed = as_seed("random_state", random_state)
        outputs = n_rows(X) * self.network_spec_.n_outputs
        require_bytes(
            16 * n_samples * outputs,
            "cpu",
            f"n_samples={n_samples:,} draws of {outputs:,} outputs",
            "draw fewer at a time, each with a random_state of its own",
        )
        draws = self._drawn(n_samples, seed)
        return self._of_draws(X, draws, n_samples, lambda found: found).numpy()

    def _check_draws(self, smallest: int = 1) -> None:
        """Refuse a number of draws, which may have been set after fit."""
        check_count("n_samples", self.n_samples, smallest)

    def _require_variance(self) -> None:
        """Refuse a single draw where a variance is made of draws."""
        if self.n_samples == 1:
            raise ValueError(
                "n_samples=1 has no variance, and there is no other than that of the "
                "draws. Use 2 or more, such as 100."
            )

    # ------------------------------------------------------------------ batches
    def _row_elements(self, inspected: Any) -> int:
        """Numbers in float64 that are made of each row."""
        return 0

    def _batches(
        self,
        fitted: TrainedNetwork,
        dataset: Any,
        *,
        with_covariance: bool = False,
        n_draws: int = 0,
    ) -> Batches:
        inspected: OutputSpec = fitted.inspected
        elements = self._row_elements(inspected)
        # outputs under each draw, and what is made of them
        elements += 3 * n_draws * inspected.n_outputs
        fitting = inspected.batch_size(
            row_elements=elements, with_covariance=with_covariance
        )
        return Batches(fitted.net, dataset, self.batch_size or fitting)

    def _each_batch(
        self,
        X: Any,
        function: Callable[..., Any],
        *,
        with_covariance: bool = False,
        n_draws: int = 0,
    ) -> list[Any]:
        """``function(forward, x)`` of every batch of X, the network frozen."""
        X = self._rows(X)
        net = self.estimator_
        fitted = TrainedNetwork(net, self.network_spec_, None, None)
        batches = self._batches(
            fitted,
            net.get_dataset(X),
            with_covariance=with_covariance,
            n_draws=n_draws,
        )
        with private_rng(None), torch.inference_mode(False):
            forward = fitted.forward()
            with forward.frozen():
                return [function(forward, x) for x, _, _ in batches]

    def _rows(self, X: Any) -> Any:
        """Rows to predict, checked and as the network takes them."""
        if is_opaque(X):
            count_rows(X)
            return X
        X = validate_data(self, X, reset=False, dtype=None, allow_nd=True)
        return self._input_type.inputs(X)

    # ---------------------------------------------------------------- Gaussians
    def _collect(
        self,
        X: Any,
        function: Question,
        *,
        diagonal: bool = False,
        centred: bool = False,
    ) -> list[np.ndarray]:
        """Functions of each row's Gaussian over outputs, for all rows, as arrays.

        ``diagonal`` asks for variances alone; ``centred`` takes the mean over outputs
        off each output, which a softmax does not see.
        """
        check_is_fitted(self)
        if not diagonal:
            self._check_covariances()

        def checked(mean: Tensor, spread: Tensor) -> tuple[Tensor, ...]:
            return function(*require_finite(mean, spread))

        parts = self._answers(X, checked, diagonal=diagonal, centred=centred)
        # one batch alone is copied, too: it may be a view of what is remembered
        return [torch.cat(pieces).cpu().numpy() for pieces in zip(*parts, strict=True)]

    def _answers(
        self, X: Any, function: Question, *, diagonal: bool, centred: bool
    ) -> Iterable[tuple[Tensor, ...]]:
        """The same of each batch, of a Gaussian with the moments of the draws."""
        self._require_variance()
        draws = self._own_draws()
        n_blocks = self.network_spec_.likelihood.n_blocks

        def ask(forward: Forward, x: Any) -> tuple[Tensor, ...]:
            found = draws(forward, x)
            return function(
                *moments(found, n_blocks=n_blocks, diagonal=diagonal, centred=centred)
            )

        return self._each_batch(
            X, ask, with_covariance=not diagonal, n_draws=self._n_draws
        )

    def _moments(self, X: Any, function: Question, full_cov: bool) -> list[np.ndarray]:
        """`_collect` of means and of covariances, which all stay, or variances."""
        check_is_fitted(self)
        if full_cov:
            c = self.network_spec_.n_outputs
            require_bytes(
                2 * 8 * n_rows(X) * self.network_spec_.covariance_size,
                "cpu",
                f"full_cov=True for {n_rows(X):,} rows of {c:,} outputs",
                "use full_cov=False, or fewer rows at a time",
            )
        return self._collect(X, function, diagonal=not full_cov)

    def _latent(self, X: Any) -> list[np.ndarray]:
        """Means and variances of the outputs, (n, c) each."""
        return self._collect(X, lambda mean, variance: (mean, variance), diagonal=True)

    def _check_covariances(self) -> None:
        """Refuse covariances between outputs of which not even one row's fits."""
        c = self.network_spec_.n_outputs
        require_bytes(
            4 * 8 * self.network_spec_.covariance_size,
            "cpu",
            f"a covariance between {c:,} outputs",
            "use link_approx='probit' and dirichlet_approx='bridge', which need "
            "variances alone",
        )

    def _joint(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean (n, c) and covariance (n, n, c) of each output across rows."""
        check_is_fitted(self)
        self._require_variance()
        n, c = n_rows(X), self.network_spec_.n_outputs
        require_bytes(
            8 * n * c * (2 * n + 3 * self._n_draws),
            "cpu",
            f"the joint covariance of {n:,} rows",
            "use return_std=True, or fewer rows at a time",
        )
        drawn = self._of_own_draws(X, lambda draws: draws)
        by_output = drawn.movedim(1, 0)  # (c, n, s)
        mean, cov = moments(by_output, diagonal=False, centred=False)
        return mean.T.numpy(), cov.movedim(0, -1).numpy()

    # ------------------------------------------------------------------ pickle
    def __getstate__(self) -> dict[str, Any]:
        """Tensors travel on the CPU; skorch sees to the network."""
        state = dict(super().__getstate__())
        for name in ("posterior_", "network_spec_"):
            if name in state:
                state[name] = move(state[name], "cpu")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("posterior_", "network_spec_"):
            if name in vars(self):
                moved = move(vars(self)[name], device_of(self.estimator_))
                setattr(self, name, moved)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class WeightPredictor(OutputPredictor):
    """The same where weights of one network are drawn; not for direct use."""

    posterior_: Any

    def _fitted_posterior(self) -> Any:
        check_is_fitted(self)
        return self.posterior_

    def _drawn_weights(self, n_samples: int, seed: int) -> Tensor:
        """Weights (s, P), if they fit into memory."""
        posterior: WeightDistribution = self._fitted_posterior()
        check_count("n_samples", n_samples)
        require_draws(n_samples, posterior.layout.n_parameters)
        return posterior.sample(n_samples, torch.Generator().manual_seed(seed))

    def _drawn(self, n_samples: int, seed: int) -> Draws:
        """Outputs of the network under drawn weights."""
        weights = self._drawn_weights(n_samples, seed)
        posterior: WeightDistribution = self.posterior_
        return lambda forward, x: network_draws(posterior, forward, x, weights)


def require_draws(n_samples: int, n_weights: int) -> None:
    """Refuse more draws of weights than memory holds."""
    require_bytes(
        8 * n_samples * 3 * n_weights,
        "cpu",
        f"n_samples={n_samples:,} draws of {n_weights:,} weights",
        "set a smaller n_samples; of samples, draw fewer at a time, each with a "
        "random_state of its own",
    )


def n_rows(X: Any) -> int:
    """Rows of what may still be found not to have any."""
    if is_opaque(X):
        return count_rows(X)
    return len(X) if hasattr(X, "__len__") else 1


def require_finite(mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The Gaussian over outputs, if it is one."""
    if all_finite(mean) and all_finite(spread):
        return mean, spread
    raise ValueError(
        "The network's outputs are not finite for some rows of X. Look for values far "
        "beyond those it was trained on."
    )


def device_of(net: Any) -> torch.device:
    """Where the weights of a net are."""
    device: torch.device = next(net.module_.parameters()).device
    return device
