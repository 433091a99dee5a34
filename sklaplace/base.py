"""BaseLaplace: the pipeline that both estimators share.

``fit``: validate, train the network unless it is frozen, add up the curvature
over the rows it learned from, make the posterior, tune it. ``predict``: linearise
the network batch by batch and ask the posterior. Here is the border between numpy
outside and torch inside.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, clone
from sklearn.frozen import FrozenEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from skorch import NeuralNet
from skorch.helper import SliceDict
from torch import Tensor, nn

from sklaplace import holdout
from sklaplace.curvature import CURVATURES, accumulate
from sklaplace.forward import Forward
from sklaplace.heads import HeadRows, LinearHead
from sklaplace.inspection import Inspected, inspect, view
from sklaplace.jacobians import backpropagate
from sklaplace.layouts import Layout
from sklaplace.likelihoods import DataFit
from sklaplace.memory import free_bytes, readable
from sklaplace.options import (
    check_count,
    check_fraction,
    check_option,
    check_positive,
    listed,
)
from sklaplace.posterior import GaussianPosterior, Hyperparameters
from sklaplace.predictive import PREDICTIVES, linearised_mean
from sklaplace.priors import PRIOR_STRUCTURES
from sklaplace.structures import STRUCTURES, Structure
from sklaplace.subsets import SUBSETS
from sklaplace.training import (
    Batches,
    WeightedDataset,
    first_rows,
    private_rng,
    take_rows,
    train,
)
from sklaplace.tuning import TUNERS, Rows, Task, require_head


@dataclass(frozen=True)
class TrainingData:
    """Checked input of ``fit``: rows, targets as the net takes them, weights."""

    X: Any
    y: np.ndarray
    sample_weight: np.ndarray | None

    def take(self, rows: np.ndarray) -> "TrainingData":
        """Some of the rows."""
        w = self.sample_weight
        return TrainingData(
            take_rows(self.X, rows), self.y[rows], None if w is None else w[rows]
        )

    def dataset(self, net: Any) -> Any:
        """The rows as the net's dataset, with weights where there are any."""
        data = net.get_dataset(self.X, self.y)
        if self.sample_weight is None:
            return data
        return WeightedDataset(data, self.sample_weight)


@dataclass(frozen=True)
class FittedNetwork:
    """A trained net, how it is read, and the rows it has and has not seen."""

    net: Any
    inspected: Inspected
    train: Any
    held_out: Any

    def forward(self) -> Forward:
        """The network as a function to differentiate."""
        return view(self.net, self.inspected.output_map, self.inspected.tap)


@contextmanager
def unchanged_on_error(estimator: Any) -> Iterator[None]:
    """Put the estimator's attributes back if anything raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


class BaseLaplace(BaseEstimator):
    """Shared by `LaplaceClassifier` and `LaplaceRegressor`; not for direct use."""

    _likelihoods: tuple[type, ...]

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
            Targets; class labels of any kind for a classifier.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the rows in loss, curvature and evidence.
        X_val, y_val : optional
            Rows that the network does not see, used by the ``"validation"`` and
            ``"auto"`` tuners only.
        **fit_params : dict
            Passed to the ``fit`` of the skorch net.

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
            self._check_parameters()
            data, validation = self._check_data(X, y, sample_weight, X_val, y_val)
            self._seed = int(self._fresh_random_state().randint(np.iinfo(np.int32).max))
            with private_rng(self._seed):
                fitted = self._fit_network(data, validation, fit_params)
                with fitted.forward().frozen():
                    posterior = self._fit_posterior(fitted)
            self._publish(fitted, posterior)
        return self

    def _fresh_random_state(self) -> np.random.RandomState:
        """Never the global generator: None draws on the operating system."""
        if self.random_state is None:
            return np.random.RandomState(int.from_bytes(os.urandom(4), "little"))
        return check_random_state(self.random_state)

    def _publish(self, fitted: FittedNetwork, posterior: GaussianPosterior) -> None:
        self.estimator_ = fitted.net
        self.inspected_ = fitted.inspected
        self.posterior_ = posterior
        self.n_iter_ = max(1, len(getattr(fitted.net, "history_", None) or []))
        self.prior_precision_ = plain(posterior.prior_precision)
        self.log_marginal_likelihood_value_ = float(posterior.log_marginal_likelihood())

    # -------------------------------------------------------- fit: the settings
    def _check_parameters(self) -> None:
        """Refuse values that cannot be right, before anything is done."""
        self._check_estimator()
        check_option("subset_of_weights", self.subset_of_weights, SUBSETS)
        check_option("hessian_structure", self.hessian_structure, STRUCTURES)
        check_option("curvature", self.curvature, CURVATURES)
        check_option("prior_structure", self.prior_structure, PRIOR_STRUCTURES)
        check_option("pred_type", self.pred_type, PREDICTIVES)
        _, structure = STRUCTURES[self.hessian_structure]
        if self.prior_structure not in structure.priors:
            raise ValueError(
                f"prior_structure={self.prior_structure!r} cannot be used with "
                f"hessian_structure={self.hessian_structure!r}. Choose one of "
                f"{listed(structure.priors)}, or another hessian_structure."
            )
        check_positive("prior_precision", self.prior_precision, TUNERS)
        check_positive("temperature", self.temperature)
        if self.refine not in (True, False, "auto"):
            raise ValueError(
                f"refine={self.refine!r} is not known. Choose True, False or 'auto'."
            )
        if self.refine is True and self.subset_of_weights != "last_layer":
            raise ValueError(
                f"refine=True cannot be used with subset_of_weights="
                f"{self.subset_of_weights!r}. Use subset_of_weights='last_layer', or "
                "refine='auto'."
            )
        check_fraction("validation_fraction", self.validation_fraction)
        check_count("n_samples", self.n_samples)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        if not np.isfinite(np.asarray(self.prior_mean, dtype=float)).all():
            raise ValueError(
                "prior_mean has entries that are not finite. Use one number, or one "
                "per selected weight."
            )

    def _check_estimator(self) -> None:
        net = self._net()
        if net is None:
            return
        if not isinstance(net, NeuralNet):
            given = "a class" if isinstance(net, type) else type(net).__name__
            raise TypeError(
                f"estimator must be a skorch net, a FrozenEstimator around one, or "
                f"None; got {given}. Wrap a torch module as "
                "skorch.NeuralNetClassifier(Module), and put preprocessing into a "
                "Pipeline around this estimator."
            )
        if self._is_frozen() and not getattr(net, "initialized_", False):
            raise ValueError(
                "The frozen network has no weights yet. Fit it, or call "
                "net.initialize() and load its weights, before freezing it."
            )

    def _is_frozen(self) -> bool:
        return isinstance(self.estimator, FrozenEstimator)

    def _net(self) -> Any:
        return self.estimator.estimator if self._is_frozen() else self.estimator

    # ------------------------------------------------------------ fit: the data
    def _check_data(
        self, X: Any, y: Any, sample_weight: Any, X_val: Any, y_val: Any
    ) -> tuple[TrainingData, TrainingData | None]:
        if (X_val is None) != (y_val is None):
            missing = "y_val" if y_val is None else "X_val"
            raise ValueError(
                f"{missing} is missing: rows to tune on need inputs and targets. "
                "Pass both X_val and y_val, or neither."
            )
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is "
                "None. For a torch Dataset, pass its targets as an array."
            )
        self._input_dtype = _input_dtype(self._net())
        X, y = self._check_inputs(X, y, reset=True)
        y = self._encode(y, reset=True)
        data = TrainingData(X, y, None)
        if sample_weight is not None:
            data = self._weigh(data, sample_weight)
        if X_val is None:
            return data, None
        X_val, y_val = self._check_inputs(X_val, y_val, reset=False)
        return data, TrainingData(X_val, self._encode(y_val, reset=False), None)

    def _weigh(self, data: TrainingData, sample_weight: Any) -> TrainingData:
        """Attach weights; rows of weight zero are left out altogether."""
        probe = np.empty((len(data.y), 1))
        weights = _check_sample_weight(
            sample_weight, probe, dtype=np.float64, ensure_non_negative=True
        )
        kept = np.flatnonzero(weights)
        if len(kept) == 0:
            raise ValueError(
                "All entries of sample_weight are zero. At least one row needs a "
                "positive weight."
            )
        data = TrainingData(data.X, data.y, weights)
        return data if len(kept) == len(weights) else data.take(kept)

    def _check_inputs(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, np.ndarray]:
        """Validated arrays; datasets and dicts as they are."""
        options = self._target_options()
        if is_opaque(X):
            return X, np.asarray(y)
        X, y = validate_data(
            self, X, y, reset=reset, dtype=None, allow_nd=True, **options
        )
        return self._cast(X), y

    def _cast(self, X: np.ndarray) -> np.ndarray:
        """The dtype of the weights; integers stay if the network looks them up."""
        if X.dtype.kind not in "fiub":
            X = np.asarray(X, dtype=np.float64)
        dtype, keeps_integers = self._input_dtype
        if keeps_integers and X.dtype.kind in "iu":
            return X.astype(np.int64)
        return X.astype(dtype)

    def _cast_floats(self, y: np.ndarray) -> np.ndarray:
        """Targets in the dtype of the network's weights."""
        return y.astype(self._input_dtype[0])

    # --------------------------------------------------------- fit: the network
    def _fit_network(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> FittedNetwork:
        """The trained net, and which rows it has and has not seen."""
        net = self._new_net(data)
        frozen = self._is_frozen()
        if not frozen and not net.train_split and validation is None:
            data, validation = self._hold_out(data)
        if frozen:
            self._inspect(net, data.dataset(net))
            seen, held_out = data.dataset(net), None
        else:
            seen, held_out = self._train(net, data, fit_params)
        if validation is not None:
            held_out = validation.dataset(net)
        return FittedNetwork(net, self._inspect(net, seen), seen, held_out)

    def _new_net(self, data: TrainingData) -> Any:
        if self.estimator is None:
            return self._default_net(data)
        # a copy, so that training the original further cannot outdate the posterior
        return copy.deepcopy(self._net()) if self._is_frozen() else clone(self._net())

    def _train(
        self, net: Any, data: TrainingData, fit_params: dict[str, Any]
    ) -> tuple[Any, Any]:
        def check(dataset: Any) -> None:
            self._match_target_shape(net, dataset)
            self._inspect(net, dataset)

        X = data.X
        if data.sample_weight is not None:
            X = data.dataset(net)
        seen, held_out = train(net, X, data.y, check, **fit_params)
        return seen, held_out

    def _match_target_shape(self, net: Any, dataset: Any) -> None:
        """Overridden where the shape of targets depends on the module."""

    def _hold_out(self, data: TrainingData) -> tuple[TrainingData, TrainingData | None]:
        """Set rows aside for the tuner, if it wants some and there are enough."""
        if not self._tunes_on_rows():
            return data, None
        parts = holdout.split_by_content(
            data.X,
            data.y,
            self.validation_fraction,
            self._seed,
            stratify=self._stratify,
        )
        if parts is None:
            return data, None
        return data.take(parts[0]), data.take(parts[1])

    def _tunes_on_rows(self) -> bool:
        names = {name for name in self._tuners() if isinstance(name, str)}
        return bool(names & {"auto", "validation"})

    def _inspect(self, net: Any, dataset: Any) -> Inspected:
        """Read the net's conventions and refuse what does not fit."""
        x = first_rows(net, dataset)
        inspected = inspect(
            net, x, self.subset_of_weights, self._likelihoods, self._n_outputs()
        )
        self._check_layout(inspected.layout, device_of(net))
        return inspected

    def _check_layout(self, layout: Layout, device: torch.device) -> None:
        """Refuse sizes that do not fit, before anything is allocated."""
        accumulator, _ = STRUCTURES[self.hessian_structure]
        needed, available = accumulator.n_bytes(layout), free_bytes(device)
        if needed > available:
            raise ValueError(
                f"hessian_structure={self.hessian_structure!r} over "
                f"{layout.n_parameters:,} parameters needs {readable(needed)}, and "
                f"{readable(available)} are free; use 'kron' or 'diag', or "
                "subset_of_weights='last_layer'."
            )
        expected = PRIOR_STRUCTURES[self.prior_structure](layout)
        if not isinstance(self.prior_precision, str):
            shape = np.shape(self.prior_precision)
            if shape not in ((), expected):
                raise ValueError(
                    f"prior_precision has shape {shape}, but prior_structure="
                    f"{self.prior_structure!r} needs one number or shape {expected} "
                    f"({len(layout.blocks)} parameter tensors, "
                    f"{layout.n_parameters:,} weights)."
                )
        if np.shape(self.prior_mean) not in ((), (layout.n_parameters,)):
            raise ValueError(
                f"prior_mean has shape {np.shape(self.prior_mean)}. Use one number, "
                f"or one per selected weight: shape ({layout.n_parameters},)."
            )

    # ------------------------------------------------------- fit: the posterior
    def _fit_posterior(self, fitted: FittedNetwork) -> GaussianPosterior:
        """Curvature over the training rows, then the hyperparameters."""
        inspected, curvature = fitted.inspected, CURVATURES[self.curvature]
        accumulator = STRUCTURES[self.hessian_structure][0](inspected.layout)
        head_rows = HeadRows(inspected.head_map)
        data_fit = accumulate(
            fitted.forward(),
            self._batches(fitted, fitted.train),
            inspected.likelihood,
            curvature,
            accumulator,
            head_rows.add,
        )
        posterior = self._untuned(fitted, accumulator.decompose(), data_fit)
        head = head_rows.build(posterior, curvature, type(accumulator))
        return self._tuned(fitted, posterior, head)

    def _batches(self, fitted: FittedNetwork, dataset: Any) -> Batches:
        size = self.batch_size or fitted.inspected.batch_size
        return Batches(fitted.net, dataset, size)

    def _untuned(
        self, fitted: FittedNetwork, structure: Structure, data_fit: DataFit
    ) -> GaussianPosterior:
        """The posterior at the network's weights under initial hyperparameters."""
        layout = fitted.inspected.layout
        weights = layout.read(view(fitted.net).module)

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
        )

    def _tuned(
        self,
        fitted: FittedNetwork,
        posterior: GaussianPosterior,
        head: LinearHead | None,
    ) -> GaussianPosterior:
        """The posterior with chosen hyperparameters, by the tuner asked for."""
        task = Task(
            posterior=posterior,
            head=head,
            validation=self._validation_rows(fitted),
            log_proba=self._log_proba(posterior),
            free_prior=isinstance(self.prior_precision, str),
            free_noise=posterior.likelihood.has_noise
            and isinstance(self._sigma_noise(), str),
            refine=self.refine,
        )
        if task.free_prior or task.free_noise:
            return TUNERS[self._tuner()](task)
        return require_head(task).refit(posterior) if self.refine is True else posterior

    def _tuners(self) -> list[str]:
        """Names of the tuners asked for, the more specific ones first."""
        values = [self.prior_precision, self._sigma_noise()]
        names = {value for value in values if isinstance(value, str)}
        return sorted(names, key=lambda name: name == "auto")

    def _tuner(self) -> str:
        return self._tuners()[0]

    def _sigma_noise(self) -> Any:
        """Noise setting; one where the likelihood has none."""
        return 1.0

    def _validation_rows(self, fitted: FittedNetwork) -> Iterable[Rows] | None:
        """Held-out rows, linearised; kept in memory for the last layer only."""
        if fitted.held_out is None or not self._tunes_on_rows():
            return None
        rows = _LinearisedRows(fitted, self._batches(fitted, fitted.held_out))
        return list(rows) if self.subset_of_weights == "last_layer" else rows

    # ----------------------------------------------------------------- predict
    def _fitted_posterior(self) -> GaussianPosterior:
        check_is_fitted(self)
        return self.posterior_

    def _each_batch(self, X: Any, function: Callable[..., Any]) -> list[Any]:
        """``function(forward, x)`` of every batch of X, the network frozen."""
        if not is_opaque(X):
            X = self._cast(
                validate_data(self, X, reset=False, dtype=None, allow_nd=True)
            )
        net = self.estimator_
        fitted = FittedNetwork(net, self.inspected_, None, None)
        batches = self._batches(fitted, net.get_dataset(X))
        with private_rng(None):
            forward = fitted.forward()
            with forward.frozen():
                return [function(forward, x) for x, _, _ in batches]

    def _collect(
        self, X: Any, function: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> list[np.ndarray]:
        """Functions of each row's Gaussian over outputs, for all rows, as arrays."""
        posterior, predictive = self._fitted_posterior(), PREDICTIVES[self.pred_type]
        parts = self._each_batch(
            X, lambda forward, x: function(*predictive(posterior, forward, x))
        )
        return [torch.cat(pieces).cpu().numpy() for pieces in zip(*parts, strict=True)]

    def _sample_outputs(self, X: Any, n_samples: int, random_state: Any) -> np.ndarray:
        """Joint draws of the linearised outputs, (n, c, n_samples)."""
        posterior = self._fitted_posterior()
        check_count("n_samples", n_samples)
        generator = torch.Generator().manual_seed(self._sample_seed(random_state))
        shifts = (posterior.sample(n_samples, generator) - posterior.weights).T

        def draw(forward: Forward, x: Any) -> Tensor:
            f, jacobian = backpropagate(forward, x, posterior.layout)
            return f.double().unsqueeze(-1) + jacobian.double().matmul(shifts)

        return torch.cat(self._each_batch(X, draw)).cpu().numpy()

    def _joint(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean (n, c) and covariance (n, n, c) of each output across rows."""
        posterior = self._fitted_posterior()

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

    @staticmethod
    def _sample_seed(random_state: Any) -> int:
        """Seed of draws; None gives fresh ones each time."""
        if random_state is None:
            return int.from_bytes(os.urandom(4), "little")
        if isinstance(random_state, Integral):
            return int(random_state)
        return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))

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
        for name, value in given.items():
            check_positive(name, value)
        h = posterior.hyperparameters
        device = h.prior_precision.device
        tensors = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device).expand(
                getattr(h, name).shape
            )
            for name, value in given.items()
        }
        return float(posterior.log_marginal_likelihood(replace(h, **tensors)))

    # ------------------------------------------------------------------ pickle
    def __getstate__(self) -> dict[str, Any]:
        """The posterior travels on the CPU; skorch sees to the network."""
        state = dict(super().__getstate__())
        if "posterior_" in state:
            state["posterior_"] = state["posterior_"].to("cpu")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "posterior_"):
            self.posterior_ = self.posterior_.to(device_of(self.estimator_))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class _LinearisedRows:
    """Held-out rows, linearised anew on each pass: no memory for many weights."""

    def __init__(self, fitted: FittedNetwork, batches: Batches) -> None:
        self.fitted, self.batches = fitted, batches

    def __iter__(self) -> Iterator[Rows]:
        forward = self.fitted.forward()
        inspected = self.fitted.inspected
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(forward, x, inspected.layout)
            if weights is None:
                weights = torch.ones_like(f[:, 0])
            yield Rows(f, jacobian, inspected.likelihood.targets(y, f), weights)


def is_opaque(X: Any) -> bool:
    """Whether X is for skorch to understand: a dict, a dataset, a tuple of arrays."""
    if issparse(X):  # one of scipy's formats is a dict
        return False
    return isinstance(X, (Mapping, torch.utils.data.Dataset, tuple, SliceDict))


def device_of(net: Any) -> torch.device:
    """Where the weights of a net are."""
    return next(net.module_.parameters()).device


def _input_dtype(net: Any) -> tuple[np.dtype, bool]:
    """Dtype of the first weights, and whether integers are indices for a lookup."""
    if net is None:
        return np.dtype(np.float64), False  # the default network
    module = _peek(net)
    if module is None:
        return np.dtype(np.float32), False
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    name = str(floating[0] if floating else torch.float32).removeprefix("torch.")
    looks_up = any(
        isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules()
    )
    # numpy has no bfloat16; torch takes float32 and the module casts it
    return np.dtype(name if hasattr(np, name) else "float32"), looks_up


def _peek(net: Any) -> nn.Module | None:
    """The module of a net, made for a look if there is none; None if it cannot be."""
    if getattr(net, "initialized_", False):
        return net.module_
    if isinstance(net.module, nn.Module):
        return net.module
    scratch = clone(net).set_params(verbose=0, callbacks="disable", device="cpu")
    with private_rng(0):
        try:
            return scratch.initialize().module_
        except (TypeError, ValueError, RuntimeError):
            return None  # sized by a callback when training begins


def plain(value: Tensor) -> Any:
    """A float or an array."""
    return value.item() if value.ndim == 0 else value.cpu().numpy()
