"""PosteriorPredictor: what a fitted posterior is asked, batch by batch.

The network is linearised on the rows given and the posterior is asked for the
Gaussian over its outputs; each estimator makes of it what it is asked for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import check_option, check_positive
from sklaplace.core.trees import leaves, mapped
from sklaplace.curvature.jacobian import Centring, backpropagate
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.estimators.outputs import (
    Draws,
    Question,
    TrainedNetwork,
    WeightPredictor,
    n_rows,
    require_finite,
)
from sklaplace.estimators.settings import check_prior_shape
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import raw_outputs
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import (
    PREDICTIVES,
    Linearised,
    Predictive,
    in_graph,
    linearise,
    linearised_mean,
    side_by_side,
)


class ProjectedRows:
    """Rows that are predicted under many prior precisions: linearised once.

    While it is an estimator's ``_projected_rows``, predictions come from here.
    """

    def __init__(self) -> None:
        # X itself is kept beside its batches, so that its id stays
        self._known: dict[tuple[Any, ...], tuple[Any, list[list[Linearised]]]] = {}

    def gaussians(
        self,
        model: "PosteriorPredictor",
        X: Any,
        posterior: GaussianPosterior,
        *,
        diagonal: bool,
        centred: bool,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean and covariance, or variances, of each batch."""
        key = id(X), diagonal, centred
        if key not in self._known:

            def look(forward: Forward, x: Any) -> list[Linearised]:
                layout = posterior.layout
                blocks = posterior.likelihood.n_blocks
                parts = linearise(
                    forward,
                    x,
                    layout,
                    diagonal=diagonal,
                    cotangents=Centring(blocks) if centred else None,
                )
                return list(parts)

            batches = model._each_batch(X, look, with_covariance=not diagonal)
            self._known[key] = X, batches
        for parts in self._known[key][1]:
            yield side_by_side(p.projected(posterior, diagonal=diagonal) for p in parts)


class PosteriorPredictor(WeightPredictor):
    """The part of the estimators that answers; not for direct use."""

    hessian_structure: str
    structure_params: dict[str, Any] | None
    pred_type: str
    prior_structure: str
    posterior_: GaussianPosterior

    def _row_elements(self, inspected: NetworkSpec) -> int:
        accumulator, _ = STRUCTURES[self.hessian_structure]
        return accumulator.row_elements(
            inspected.layout, inspected.n_outputs, **(self.structure_params or {})
        )

    def _predictive(self) -> Predictive:
        check_option("pred_type", self.pred_type, PREDICTIVES)
        return PREDICTIVES[self.pred_type]

    @property
    def _has_gaussian(self) -> bool:
        return self._predictive().gaussian is not None

    def _drawn(self, n_samples: int, seed: int) -> Draws:
        """Outputs under drawn weights, of the network or of its tangent."""
        weights = self._drawn_weights(n_samples, seed)
        posterior, draws = self.posterior_, self._predictive().draws
        return lambda forward, x: draws(posterior, forward, x, weights)

    def _answers(
        self, X: Any, function: Question, *, diagonal: bool, centred: bool
    ) -> Iterable[tuple[Tensor, ...]]:
        posterior, gaussian = self._fitted_posterior(), self._predictive().gaussian
        question = {"diagonal": diagonal, "centred": centred}
        if gaussian is None:
            return super()._answers(X, function, **question)
        path: ProjectedRows | None = vars(self).get("_projected_rows")
        if path is not None:
            gaussians = path.gaussians(self, X, posterior, **question)
            return [function(*known) for known in gaussians]

        def ask(forward: Forward, x: Any) -> tuple[Tensor, ...]:
            return function(*gaussian(posterior, forward, x, **question))

        return self._each_batch(X, ask, with_covariance=not diagonal)

    @property
    def log_marginal_likelihood_value_(self) -> float:
        """Laplace evidence of the training rows, in nats; factorises when asked."""
        return float(self._fitted_posterior().log_marginal_likelihood())

    def predictive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the outputs as functions of ``x``, in its graph.

        For acquisition functions and whatever else needs gradients in the inputs.

        Parameters
        ----------
        x : Tensor of shape (b, ...), or dict, list or tuple of tensors
            Rows as the network takes them, on its device; real numbers are cast to its
            dtype.

        Returns
        -------
        mean : Tensor of shape (b, c)
            Float64; logits for a classifier.
        cov : Tensor of shape (b, c, c)
            Of the noise-free outputs of each row; float64.

        Raises
        ------
        ValueError
            With ``pred_type="nn"``, under which outputs are not Gaussian, and for rows
            that the network cannot be applied to, or that give no finite numbers.
        TypeError
            If ``x`` is not made of tensors.

        Notes
        -----
        Writes the Jacobian out: c backward passes and c·P numbers for each row. For
        predictions alone, `latent_mean_and_variance` is much faster.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> x = torch.tensor(X[:2], requires_grad=True)
        >>> mean, cov = model.predictive(x)
        >>> (mean + cov.diagonal(dim1=1, dim2=2).sqrt()).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 10])
        """
        posterior = self._fitted_posterior()
        if not self._has_gaussian:
            raise ValueError(
                f"pred_type={self.pred_type!r} has no Gaussian over outputs. Use "
                "pred_type='glm'."
            )
        fitted = TrainedNetwork(self.estimator_, self.network_spec_, None, None)
        forward = fitted.forward()
        rows = self._as_tensors(x)
        with torch.inference_mode(False), torch.enable_grad(), forward.frozen():
            raw_outputs(self.estimator_, rows)  # says what does not fit
            return require_finite(*in_graph(posterior, forward, rows))

    def _as_tensors(self, x: Any) -> Any:
        """Rows for the network, in their graph."""
        parts = list(leaves(x))
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            raise TypeError(
                f"x is of type {type(x).__name__}; predictive needs tensors. Use "
                "torch.as_tensor(x), or latent_mean_and_variance for arrays."
            )
        if any(part.ndim == 0 or len(part) == 0 for part in parts):
            raise ValueError("x has no rows. Pass a tensor of shape (b, ...), b > 0.")
        dtype = next(
            p.dtype
            for p in self.estimator_.module_.parameters()
            if p.is_floating_point()
        )
        cast = self._input_type.keeps_integers

        def fitting(leaf: Tensor) -> Tensor:
            return leaf if cast and not leaf.is_floating_point() else leaf.to(dtype)

        return mapped(fitting, x)

    def _joint(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean (n, c) and covariance (n, n, c) of each output across rows."""
        posterior = self._fitted_posterior()
        if not self._has_gaussian:
            return super()._joint(X)
        n, p = n_rows(X), posterior.layout.n_parameters
        require_bytes(
            8 * n * self.network_spec_.n_outputs * (2 * n + 2 * p),
            "cpu",
            f"the joint covariance of {n:,} rows over {p:,} weights",
            "use return_std=True, or fewer rows at a time",
        )

        def whitened(forward: Forward, x: Any) -> tuple[Tensor, Tensor]:
            f, jacobian = backpropagate(forward, x, posterior.layout)
            rows = posterior.precision.whiten(jacobian)
            return linearised_mean(posterior, f, jacobian), rows

        parts = self._each_batch(X, whitened)
        mean, rows = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        cov = torch.einsum("ncp,mcp->nmc", rows, rows)
        return mean.cpu().numpy(), cov.cpu().numpy()

    def log_marginal_likelihood(
        self, prior_precision: Any = None, sigma_noise: Any = None
    ) -> float:
        """Laplace evidence ``log p(D)`` of the training rows, in nats.

        Parameters
        ----------
        prior_precision : float or array, optional
            Asked instead of the fitted value.
        sigma_noise : float, optional
            Likewise; regression only.

        Returns
        -------
        float
            Asking changes nothing. For a refitted last layer the weights are
            those of the fitted prior precision.
        """
        posterior = self._fitted_posterior()
        asked = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        given = {name: value for name, value in asked.items() if value is not None}
        self._check_asked(posterior, given)
        h = posterior.hyperparameters
        device = h.prior_precision.device
        tensors = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device).expand(
                getattr(h, name).shape
            )
            for name, value in given.items()
        }
        asked_h = replace(h, **tensors) if tensors else None
        return float(posterior.log_marginal_likelihood(asked_h))

    def _check_asked(self, posterior: GaussianPosterior, given: dict[str, Any]) -> None:
        """Refuse hyperparameters that the posterior does not have."""
        for name, value in given.items():
            check_positive(name, value, scalar=name == "sigma_noise")
        if "prior_precision" in given:
            shape = self.prior_structure
            check_prior_shape(given["prior_precision"], shape, posterior.layout)
        if "sigma_noise" in given and not posterior.likelihood.has_noise:
            raise ValueError(
                "sigma_noise was given, but this likelihood has no observation noise. "
                "Leave it out."
            )
