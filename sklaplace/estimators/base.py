"""BaseLaplace: the pipeline that both estimators share.

``fit``: validate, train the network unless it is frozen, add up the curvature
over the rows it learned from, make the posterior, tune it. ``predict``: linearise
the network batch by batch and ask the posterior. Here is the border between numpy
outside and torch inside.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.budget import move
from sklaplace.core.caching import cached, check_memory
from sklaplace.core.checks import (
    listed,
)
from sklaplace.core.draws import row_hash
from sklaplace.core.fingerprints import fingerprint
from sklaplace.curvature.ggn import CURVATURES, Curvature, accumulate
from sklaplace.curvature.jacobian import Centring, backpropagate
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES, Accumulator, Structure
from sklaplace.estimators.fitting import unchanged_on_error
from sklaplace.estimators.laplace import LaplaceFitter
from sklaplace.estimators.outputs import TrainedNetwork
from sklaplace.estimators.settings import check_earlier_layout
from sklaplace.likelihoods import DataFit, weighted
from sklaplace.networks.data import (
    TrainingData,
)
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.training import Batches, copied, private_rng
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.last_layer import LastLayerRecorder
from sklaplace.posterior.linear_model import LinearModel
from sklaplace.posterior.linearised import LinearisedNetwork
from sklaplace.posterior.tuning import TUNERS
from sklaplace.posterior.tuning.task import (
    LinearisedBatch,
    TuningProblem,
    require_linear_model,
)


@dataclass(frozen=True)
class LaplaceFit:
    """A trained network and its curvature, before any prior is chosen."""

    network: TrainedNetwork
    structure: Structure
    data_fit: DataFit
    head_rows: LastLayerRecorder
    needs_rows: bool = False

    def stored(self) -> "LaplaceFit":
        """Without the rows that have done their part."""
        if self.needs_rows:
            return self
        return replace(self, network=replace(self.network, train=None))


class BaseLaplace(LaplaceFitter):
    """Shared by `LaplaceClassifier` and `LaplaceRegressor`; not for direct use."""

    memory: Any

    # --------------------------------------------------------------------- fit
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
        **fit_params: Any,
    ) -> "BaseLaplace":
        """Train the network unless it is frozen, and fit the posterior around it.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training rows. Arrays are validated and cast to the network's dtype;
            anything else goes to skorch as it is.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets. For a classifier class labels of any kind, a matrix of labels
            that are 0 or 1, or a map of labels for each row.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the rows in loss, curvature and evidence.
        X_val, y_val : optional
            Rows that the network does not see, used by the ``"validation"`` and
            ``"auto"`` tuners only.
        **fit_params : dict
            Passed to the ``fit`` of the skorch net. They must not change what the
            module computes: predictions are made without them.

        Returns
        -------
        self : object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network cannot be right; the estimator,
            the network and the data are then as they were.

        Notes
        -----
        Costs the training of the network, one pass over the rows with k backward
        columns per row (k = c - 1 for c classes), and the decomposition of the
        structure.
        """
        with unchanged_on_error(self):
            curved = self._curve(X, y, sample_weight, X_val, y_val, fit_params)
            self._publish(curved, self._posterior(curved))
        return self

    def _kinds(self) -> dict[str, Any]:
        """Settings that say what the curvature is kept of, and how."""
        kinds = "subset", "structure", "curvature"
        names = ["subset_of_weights", "hessian_structure", "curvature"]
        names += [f"{kind}_params" for kind in kinds]
        return {name: getattr(self, name) for name in names}

    def _add_rows(self, X: Any, y: Any, sample_weight: Any) -> None:
        """Add the curvature and the loss of new rows; the network stays as it is."""
        posterior = self._fitted_posterior()
        self._check_parameters()
        before, now = self._fitted_kinds, self._kinds()
        changed = [k for k in now if fingerprint(before[k]) != fingerprint(now[k])]
        if changed:
            raise ValueError(
                f"{listed(changed)} changed since fit, so that new rows cannot be "
                "added to what there is. Set them back, or fit anew."
            )
        if posterior.is_refitted and self.network_spec_.head_map is None:
            raise ValueError(
                "refine=True has moved the posterior's mean away from the weights of "
                "the network, at which new rows would be linearised. Use refine=False, "
                "or subset_of_weights='last_layer'."
            )
        with unchanged_on_error(self):
            data = self._weighted(self._checked(X, y, reset=False), sample_weight)
            net = self._net_at_mean()
            fitted = TrainedNetwork(net, self.network_spec_, data.dataset(net), None)
            accumulator = self._accumulator()(posterior.layout)
            forward = fitted.forward()
            with private_rng(None), torch.inference_mode(False), forward.frozen():
                posterior.structure.resume(accumulator)
                more = accumulate(
                    forward,
                    self._batches(fitted, fitted.train),
                    posterior.likelihood,
                    self._curvature(),
                    accumulator,
                )
            data_fit = DataFit(
                posterior.data_fit.loss + more.loss,
                posterior.data_fit.n_targets + more.n_targets,
            )
            self.posterior_ = replace(
                posterior, structure=accumulator.decompose(), data_fit=data_fit
            )
            if self._curvature().is_exact:
                # raises where the prior no longer makes up for the eigenvalues
                self.posterior_.log_marginal_likelihood()

    def _net_at_mean(self) -> Any:
        """The network; a copy with the posterior's mean where a head was refitted."""
        posterior = self.posterior_
        if not posterior.is_refitted:
            return self.estimator_
        net = copied(self.estimator_)
        module = as_forward(net).module
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in posterior.layout.unflatten(
                posterior.mean, module
            ).items():
                own[name].copy_(value)
        return net

    def _curve(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        X_val: Any,
        y_val: Any,
        fit_params: dict[str, Any],
    ) -> LaplaceFit:
        """All that does not depend on prior, noise, temperature and link."""
        self._check_parameters()
        memory = check_memory(self.memory)
        data, validation = self._check_data(X, y, sample_weight, X_val, y_val)
        random_state = self._fresh_random_state()
        self._seed = int(random_state.randint(np.iinfo(np.int32).max))

        def work() -> LaplaceFit:
            device = getattr(self._net(), "device", "cpu")
            with private_rng(self._seed, device), torch.inference_mode(False):
                fitted = self._fit_network(data, validation, fit_params)
                with fitted.forward().frozen():
                    return self._accumulated(fitted)

        if self.memory is None:
            return work()
        if self.random_state is None:
            warnings.warn(
                "memory has no effect with random_state=None, which makes every fit "
                "differ. Set random_state to a number.",
                UserWarning,
                stacklevel=3,
            )
            return work()

        def key() -> str:
            return self._key(data, validation, fit_params)

        return cached(memory, key(), lambda: work().stored(), key)

    def _key(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> str:
        """Content of everything that `_curve` depends on."""
        settings = {**self._kinds(), "batch_size": self.batch_size}
        if self._tunes_on_rows():
            settings["validation_fraction"] = self.validation_fraction
        return fingerprint(
            {
                "kind": type(self)._likelihoods,
                "estimator": self.estimator,
                "data": (data, self._n_outputs()),
                "validation": validation,
                "fit_params": fit_params,
                "seed": self._seed,
                "settings": settings,
                "rows": (self._tunes_on_rows(), self._may_refit()),
                "likelihood": self._likelihood_settings(),
            }
        )

    def _likelihood_settings(self) -> Any:
        """What the curvature takes from settings of the likelihood."""
        return self.likelihood

    def _publish(self, curved: LaplaceFit, posterior: GaussianPosterior) -> None:
        fitted = curved.network
        self.estimator_ = fitted.net
        self.network_spec_ = fitted.inspected
        self.posterior_ = posterior
        self._fitted_kinds = copy.deepcopy(self._kinds())
        self.n_iter_ = max(1, len(getattr(fitted.net, "history_", None) or []))
        self.prior_precision_ = plain(posterior.prior_precision)
        if self.verbose:
            print(f"[{type(self).__name__}] {self._summary()}")  # noqa: T201

    def _summary(self) -> str:
        """What was fitted, in one line."""
        posterior = self.posterior_
        head = "refitted" if posterior.is_refitted else "kept"
        return (
            f"{self.hessian_structure} posterior over "
            f"{posterior.layout.n_parameters:,} weights ({self.subset_of_weights}), "
            f"prior_precision {posterior.shown_precision()}, weights {head}, "
            f"log evidence {self.log_marginal_likelihood_value_:.1f}"
        )

    # ------------------------------------------------------- fit: the posterior
    def _accumulated(self, fitted: TrainedNetwork) -> LaplaceFit:
        """Curvature and loss over the training rows."""
        inspected, curvature = fitted.inspected, self._curvature()
        accumulator = self._accumulator()(inspected.layout)
        head_rows = LastLayerRecorder(inspected.head_map if self._may_refit() else None)
        data_fit = accumulate(
            fitted.forward(),
            self._batches(fitted, fitted.train),
            inspected.likelihood,
            curvature,
            accumulator,
            head_rows.add,
        )
        if not self._tunes_on_rows():
            fitted = replace(fitted, held_out=None)
        needs_rows = self._refine() is True and not head_rows.is_linear
        structure = accumulator.decompose()
        return LaplaceFit(fitted, structure, data_fit, head_rows, needs_rows)

    def _posterior(self, curved: LaplaceFit) -> GaussianPosterior:
        """The posterior under the hyperparameters that are given or chosen."""
        with self._asked(curved):
            return self._tuned(curved.network, *self._initial(curved))

    @contextmanager
    def _asked(self, curved: LaplaceFit) -> Iterator[None]:
        """The state in which a trained network is asked for its posterior."""
        forward = curved.network.forward()
        with private_rng(None), torch.inference_mode(False), forward.frozen():
            yield

    def _initial(
        self, curved: LaplaceFit
    ) -> tuple[GaussianPosterior, LinearModel | None]:
        """The posterior before any tuning, and the outputs as a linear model."""
        self._check_loss(curved.data_fit)
        posterior = self._untuned(curved.network, curved.structure, curved.data_fit)
        accumulator = self._accumulator()
        curvature = self._curvature()
        if self.prior is not None:
            # again, for a network that was not trained here but found in the memory
            check_earlier_layout(self.prior, posterior.layout)
            earlier = self.prior.as_prior()
            earlier = move(earlier, posterior.mean.device)
            posterior = posterior.under(earlier, accumulator)
        if curvature.is_exact:
            self._check_definite(posterior)
        head = curved.head_rows.build(posterior, curvature, accumulator)
        if head is None and self._refine() is True:
            return posterior, self._linearised(curved.network, posterior)
        return posterior, head

    def _linearised(
        self, fitted: TrainedNetwork, posterior: GaussianPosterior
    ) -> LinearisedNetwork:
        """Training rows as the network's tangent sees them."""
        batches = self._batches(fitted, fitted.train)
        rows = _LinearisedRows(fitted, batches, in_training=True)
        return LinearisedNetwork.of(
            posterior, rows, self._curvature(), self._accumulator()
        )

    def _curvature(self) -> Curvature:
        """The curvature asked for, with its options."""
        curvature = CURVATURES[self.curvature]
        return curvature.configured(self.curvature_params or {}, self._seed)

    def _accumulator(self) -> Callable[[Layout], Accumulator]:
        """What makes the accumulator of the structure asked for."""
        accumulator, _ = STRUCTURES[self.hessian_structure]
        return partial(accumulator, **(self.structure_params or {}))

    def _check_definite(self, posterior: GaussianPosterior) -> None:
        """Refuse a Hessian that is no inverse of a covariance."""
        lowest = float(posterior.structure.eigenvalues[0])
        if self._tuners() and lowest < 0:
            raise ValueError(
                "curvature='hessian' cannot be tuned here: the weights are no minimum "
                f"of the loss, whose Hessian has the eigenvalue {lowest:.3g}. Use "
                "curvature='ggn', or a fixed prior_precision (and sigma_noise) that "
                "makes up for it, such as the weight decay in training."
            )
        posterior.log_marginal_likelihood()  # raises where the prior does not

    def _check_loss(self, data_fit: DataFit) -> None:
        """Overridden where a loss says by itself that training has failed."""

    def _untuned(
        self, fitted: TrainedNetwork, structure: Structure, data_fit: DataFit
    ) -> GaussianPosterior:
        """The posterior at the network's weights under initial hyperparameters."""
        layout = fitted.inspected.layout
        weights = layout.read(as_forward(fitted.net).module)

        def number(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64, device=weights.device)

        given = 1.0 if isinstance(self.prior_precision, str) else self.prior_precision
        shape = PRIOR_STRUCTURES[self.prior_structure](layout)
        residual = 2 * data_fit.loss / data_fit.n_targets
        noise = self._sigma_noise()
        hyperparameters = Hyperparameters(
            prior_precision=number(given).expand(shape).clone(),
            prior_mean=number(self.prior_mean),
            sigma_noise=residual.clamp(min=1e-16).sqrt()
            if isinstance(noise, str)
            else number(noise),
            temperature=number(self.temperature),
        )
        return GaussianPosterior(
            mean=weights,
            weights=weights,
            structure=structure,
            layout=layout,
            likelihood=fitted.inspected.likelihood,
            data_fit=data_fit,
            hyperparameters=hyperparameters,
            curvature_order=self._curvature().order,
        )

    def _tuned(
        self,
        fitted: TrainedNetwork,
        posterior: GaussianPosterior,
        head: LinearModel | None,
    ) -> GaussianPosterior:
        """The posterior with chosen hyperparameters, by the tuner asked for."""
        task = TuningProblem(
            posterior=posterior,
            linear_model=head,
            validation=self._validation_rows(fitted),
            log_proba=self._log_proba(posterior),
            free_prior=self.prior is None and isinstance(self.prior_precision, str),
            free_noise=posterior.likelihood.has_noise
            and isinstance(self._sigma_noise(), str),
            refine=self._refine(),
            diagonal=self._needs_variances_only(),
            log_density=self._log_density(posterior),
        )
        if task.free_prior or task.free_noise:
            return TUNERS[self._tuners()[0]](task)
        if task.refine is True:
            return require_linear_model(task.linear_model).refit(posterior)
        return posterior

    def _log_density(self, posterior: GaussianPosterior) -> Any:
        """Of held-out targets without a noise level; overridden for numbers."""
        return None

    def _needs_variances_only(self) -> bool:
        """Whether predictions ask for no covariance between outputs."""
        return True

    def _validation_rows(
        self, fitted: TrainedNetwork
    ) -> Iterable[LinearisedBatch] | None:
        """Held-out rows, linearised; kept in memory for the last layer only."""
        if fitted.held_out is None or not self._tunes_on_rows():
            return None
        needs_covariance = not self._needs_variances_only()
        batches = self._batches(
            fitted, fitted.held_out, with_covariance=needs_covariance
        )
        rows = _LinearisedRows(fitted, batches)
        is_cheap = fitted.inspected.layout.head is not None
        return list(rows) if is_cheap else rows


class _LinearisedRows:
    """LinearisedBatch, linearised anew on each pass: no memory for many weights.

    Those of the training have keys, and the outputs as they are.
    """

    def __init__(
        self, fitted: TrainedNetwork, batches: Batches, *, in_training: bool = False
    ) -> None:
        self.fitted, self.batches, self.in_training = fitted, batches, in_training

    def __iter__(self) -> Iterator[LinearisedBatch]:
        forward = self.fitted.forward()
        inspected = self.fitted.inspected
        likelihood = inspected.likelihood
        columns = None
        if likelihood.is_shift_invariant and not self.in_training:
            columns = Centring(likelihood.n_blocks)
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(forward, x, inspected.layout, columns)
            targets = inspected.likelihood.targets(y, f)
            weights = weighted(inspected.likelihood, targets, weights)
            if weights is None:
                weights = torch.ones_like(f[:, 0])
            keys = row_hash(x) if self.in_training else None
            yield LinearisedBatch(f, jacobian, targets, weights, keys)


def plain(value: Tensor) -> Any:
    """A float or an array."""
    return value.item() if value.ndim == 0 else value.cpu().numpy()
