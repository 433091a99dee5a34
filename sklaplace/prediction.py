"""PosteriorPredictor: what a fitted posterior is asked, batch by batch.

The network is linearised on the rows given and the posterior is asked for the
Gaussian over its outputs; each estimator makes of it what it is asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from sklaplace.data import InputType, count_rows, is_opaque
from sklaplace.forward import Forward
from sklaplace.inspection import Inspected, raw_outputs, view
from sklaplace.jacobians import Centring, backpropagate
from sklaplace.linalg import all_finite
from sklaplace.memory import move, require_bytes
from sklaplace.options import as_seed, check_count, check_option, check_positive
from sklaplace.posterior import GaussianPosterior
from sklaplace.predictive import (
    PREDICTIVES,
    Linearised,
    Predictive,
    in_graph,
    linearise,
    linearised_mean,
    moments,
    side_by_side,
)
from sklaplace.settings import check_prior_shape
from sklaplace.structures import STRUCTURES
from sklaplace.training import Batches, private_rng
from sklaplace.trees import leaves, mapped


@dataclass(frozen=True)
class FittedNetwork:
    """A trained net, how it is read, and the rows it has and has not seen."""

    net: Any
    inspected: Inspected
    train: Any
    held_out: Any

    def forward(self) -> Forward:
        """The network as a function to differentiate."""
        known = self.inspected
        return view(self.net, known.output_map, known.tap, known.output_shape)


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


class PosteriorPredictor(BaseEstimator):
    """The part of the estimators that answers; not for direct use."""

    batch_size: int | None
    hessian_structure: str
    n_samples: int
    structure_params: dict[str, Any] | None
    pred_type: str
    prior_structure: str
    estimator_: Any
    inspected_: Inspected
    posterior_: GaussianPosterior
    _input_type: InputType
    _seed: int

    def _batches(
        self,
        fitted: FittedNetwork,
        dataset: Any,
        *,
        with_covariance: bool = False,
        n_draws: int = 0,
    ) -> Batches:
        inspected = fitted.inspected
        accumulator, _ = STRUCTURES[self.hessian_structure]
        elements = accumulator.row_elements(
            inspected.layout, inspected.n_outputs, **(self.structure_params or {})
        )
        # outputs under each draw, and what is made of them
        elements += 3 * n_draws * inspected.n_outputs
        fitting = inspected.batch_size(
            row_elements=elements, with_covariance=with_covariance
        )
        return Batches(fitted.net, dataset, self.batch_size or fitting)

    def _fitted_posterior(self) -> GaussianPosterior:
        check_is_fitted(self)
        return self.posterior_

    @property
    def log_marginal_likelihood_value_(self) -> float:
        """Laplace evidence of the training rows, in nats; factorises when asked."""
        return float(self._fitted_posterior().log_marginal_likelihood())

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
        fitted = FittedNetwork(net, self.inspected_, None, None)
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

    def _collect(
        self,
        X: Any,
        function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        *,
        diagonal: bool = False,
        centred: bool = False,
    ) -> list[np.ndarray]:
        """Functions of each row's Gaussian over outputs, for all rows, as arrays.

        ``diagonal`` and ``centred`` say which Gaussian; see `glm`.
        """
        posterior = self._fitted_posterior()
        predictive = self._predictive()
        question = {"diagonal": diagonal, "centred": centred}
        if not diagonal:
            self._check_covariances()

        weights = None
        if predictive.gaussian is None:
            self._require_variance()
            weights = self._drawn_weights(X, self.n_samples, self._seed)

        def ask(forward: Forward, x: Any) -> tuple[Tensor, ...]:
            if predictive.gaussian is None:
                assert weights is not None
                draws = predictive.draws(posterior, forward, x, weights)
                blocks = posterior.likelihood.n_blocks
                gaussian = moments(draws, n_blocks=blocks, **question)
            else:
                gaussian = predictive.gaussian(posterior, forward, x, **question)
            return function(*_checked(*gaussian))

        path: ProjectedRows | None = vars(self).get("_projected_rows")
        if path is not None and predictive.gaussian is not None:
            gaussians = path.gaussians(self, X, posterior, **question)
            parts = [function(*_checked(*gaussian)) for gaussian in gaussians]
        else:
            n_draws = 0 if weights is None else len(weights)
            parts = self._each_batch(
                X, ask, with_covariance=not diagonal, n_draws=n_draws
            )
        # one batch alone is copied, too: it may be a view of what is remembered
        return [torch.cat(pieces).cpu().numpy() for pieces in zip(*parts, strict=True)]

    def _moments(
        self,
        X: Any,
        function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        full_cov: bool,
    ) -> list[np.ndarray]:
        """`_collect` of means and of covariances, which all stay, or variances."""
        check_is_fitted(self)
        if full_cov:
            c = self.inspected_.n_outputs
            require_bytes(
                2 * 8 * _n_rows(X) * self.inspected_.covariance_size,
                "cpu",
                f"full_cov=True for {_n_rows(X):,} rows of {c:,} outputs",
                "use full_cov=False, or fewer rows at a time",
            )
        return self._collect(X, function, diagonal=not full_cov)

    def _latent(self, X: Any) -> list[np.ndarray]:
        """Means and variances of the outputs, (n, c) each."""
        return self._collect(X, lambda mean, variance: (mean, variance), diagonal=True)

    def _check_covariances(self) -> None:
        """Refuse covariances between outputs of which not even one row's fits."""
        c = self.inspected_.n_outputs
        require_bytes(
            4 * 8 * self.inspected_.covariance_size,
            "cpu",
            f"a covariance between {c:,} outputs",
            "use link_approx='probit' and dirichlet_approx='bridge', which need "
            "variances alone",
        )

    def _predictive(self) -> Predictive:
        check_option("pred_type", self.pred_type, PREDICTIVES)
        return PREDICTIVES[self.pred_type]

    def _sample_outputs(self, X: Any, n_samples: int, random_state: Any) -> np.ndarray:
        """Joint draws of the outputs, (n, c, n_samples)."""
        check_is_fitted(self)
        seed = as_seed("random_state", random_state)
        return self._of_draws(X, n_samples, seed, lambda draws: draws).numpy()

    def _require_variance(self) -> None:
        """Refuse a single draw where a variance is made of draws."""
        if self.n_samples == 1:
            raise ValueError(
                f"n_samples=1 has no variance, and pred_type={self.pred_type!r} has no "
                "other. Use 2 or more, such as 100."
            )

    def _of_draws(
        self, X: Any, n_samples: int, seed: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """A function of the outputs (b, c, s) under drawn weights, for all rows."""
        posterior, predictive = self.posterior_, self._predictive()
        weights = self._drawn_weights(X, n_samples, seed)

        def ask(forward: Forward, x: Any) -> Tensor:
            return function(predictive.draws(posterior, forward, x, weights)).cpu()

        return torch.cat(self._each_batch(X, ask, n_draws=n_samples))

    def _drawn_weights(self, X: Any, n_samples: int, seed: int) -> Tensor:
        """Weights (s, P), if they and what rows make of them fit into memory."""
        posterior = self._fitted_posterior()
        check_count("n_samples", n_samples)
        outputs = _n_rows(X) * self.inspected_.n_outputs
        require_bytes(
            8 * n_samples * (3 * posterior.layout.n_parameters + 2 * outputs),
            "cpu",
            f"n_samples={n_samples:,} draws of {posterior.layout.n_parameters:,} "
            f"weights for {outputs:,} outputs",
            "draw fewer at a time, each with a random_state of its own",
        )
        return posterior.sample(n_samples, torch.Generator().manual_seed(seed))

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
        if self._predictive().gaussian is None:
            raise ValueError(
                f"pred_type={self.pred_type!r} has no Gaussian over outputs. Use "
                "pred_type='glm'."
            )
        fitted = FittedNetwork(self.estimator_, self.inspected_, None, None)
        forward = fitted.forward()
        rows = self._as_tensors(x)
        with torch.inference_mode(False), torch.enable_grad(), forward.frozen():
            raw_outputs(self.estimator_, rows)  # says what does not fit
            return _checked(*in_graph(posterior, forward, rows))

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
        n, p = _n_rows(X), posterior.layout.n_parameters
        require_bytes(
            8 * n * self.inspected_.n_outputs * (2 * n + 2 * p),
            "cpu",
            f"the joint covariance of {n:,} rows over {p:,} weights",
            "use return_std=True, or fewer rows at a time",
        )

        if self._predictive().gaussian is None:
            self._require_variance()
            drawn = self._of_draws(X, self.n_samples, self._seed, lambda draws: draws)
            by_output = drawn.movedim(1, 0)  # (c, n, s)
            mean, cov = moments(by_output, diagonal=False, centred=False)
            return mean.T.numpy(), cov.movedim(0, -1).numpy()

        def whitened(forward: Forward, x: Any) -> tuple[Tensor, Tensor]:
            f, jacobian = backpropagate(forward, x, posterior.layout)
            rows = posterior.structure.whiten(
                jacobian, posterior.prior_precision, posterior.scale
            )
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

    # ------------------------------------------------------------------ pickle
    def __getstate__(self) -> dict[str, Any]:
        """The posterior travels on the CPU; skorch sees to the network."""
        state = dict(super().__getstate__())
        for name in ("posterior_", "inspected_"):
            if name in state:
                state[name] = move(state[name], "cpu")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "posterior_"):
            device = device_of(self.estimator_)
            self.posterior_ = move(self.posterior_, device)
            self.inspected_ = move(self.inspected_, device)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _n_rows(X: Any) -> int:
    """Rows of what may still be found not to have any."""
    if is_opaque(X):
        return count_rows(X)
    return len(X) if hasattr(X, "__len__") else 1


def _checked(mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The Gaussian over outputs, if it is one."""
    if all_finite(mean) and all_finite(spread):
        return mean, spread
    raise ValueError(
        "The network's outputs are not finite for some rows of X. Look for values far "
        "beyond those it was trained on."
    )


def device_of(net: Any) -> torch.device:
    """Where the weights of a net are."""
    return next(net.module_.parameters()).device
