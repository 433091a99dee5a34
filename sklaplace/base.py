"""BaseLaplace: the pipeline that both estimators share.

``fit``: validate, train the network unless it is frozen, add up the curvature
over the rows it learned from, make the posterior, tune it. ``predict``: linearise
the network batch by batch and ask the posterior. Here is the border between numpy
outside and torch inside.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    validate_data,
)
from torch import Tensor

from sklaplace import holdout
from sklaplace.caching import cached, check_memory
from sklaplace.curvature import CURVATURES, Curvature, accumulate
from sklaplace.data import (
    InputType,
    TrainingData,
    check_length,
    input_type,
    is_opaque,
)
from sklaplace.fingerprints import fingerprint
from sklaplace.heads import HeadRows, LinearHead
from sklaplace.inspection import (
    Inspected,
    inspect,
    raw_outputs,
    view,
    warn_if_double_softmax,
)
from sklaplace.jacobians import backpropagate, centring
from sklaplace.layouts import Layout
from sklaplace.likelihoods import DataFit, Likelihood, weighed
from sklaplace.memory import require_bytes
from sklaplace.options import (
    listed,
)
from sklaplace.posterior import GaussianPosterior, Hyperparameters
from sklaplace.prediction import FittedNetwork, PosteriorPredictor, device_of
from sklaplace.priors import PRIOR_STRUCTURES
from sklaplace.settings import (
    check_layout,
    check_settings,
    inner_net,
    is_frozen,
)
from sklaplace.structures import STRUCTURES, Accumulator, Structure
from sklaplace.subnetworks import Question, choose
from sklaplace.subsets import CRITERION, select
from sklaplace.tasks import Rows, Task, require_head
from sklaplace.training import Batches, copied, first_rows, private_rng, train
from sklaplace.tuning import TUNERS


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


@dataclass(frozen=True)
class Curved:
    """A trained network and its curvature, before any prior is chosen."""

    network: FittedNetwork
    structure: Structure
    data_fit: DataFit
    head_rows: HeadRows

    def stored(self) -> "Curved":
        """Without the rows that have done their part."""
        return replace(self, network=replace(self.network, train=None))


class BaseLaplace(PosteriorPredictor):
    """Shared by `LaplaceClassifier` and `LaplaceRegressor`; not for direct use."""

    _likelihoods: tuple[type, ...]
    likelihood: Any
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
            Targets; class labels of any kind for a classifier.
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
        names = [f"{kind}_params" for kind in kinds]
        names += ["subset_of_weights", "hessian_structure", "curvature"]
        return {name: getattr(self, name) for name in names}

    def _add_rows(self, X: Any, y: Any, sample_weight: Any) -> None:
        """Add the curvature and the loss of new rows; the network stays as it is."""
        posterior = self._fitted_posterior()
        self._check_parameters()
        now = self._kinds()
        changed = [k for k, v in self._fitted_kinds.items() if repr(v) != repr(now[k])]
        if changed:
            raise ValueError(
                f"{listed(changed)} changed since fit, so that new rows cannot be "
                "added to what there is. Set them back, or fit anew."
            )
        with unchanged_on_error(self):
            data = self._weighted(self._checked(X, y, reset=False), sample_weight)
            net = self._net_at_mean()
            fitted = FittedNetwork(net, self.inspected_, data.dataset(net), None)
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
        module = view(net).module
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
    ) -> Curved:
        """All that does not depend on prior, noise, temperature and link."""
        self._check_parameters()
        memory = check_memory(self.memory)
        data, validation = self._check_data(X, y, sample_weight, X_val, y_val)
        random_state = self._fresh_random_state()
        self._seed = int(random_state.randint(np.iinfo(np.int32).max))

        def work() -> Curved:
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
        settings = ["subset_of_weights", "subset_params"]
        settings += ["hessian_structure", "structure_params"]
        settings += ["curvature", "curvature_params", "batch_size"]
        if self._tunes_on_rows():
            settings.append("validation_fraction")
        return fingerprint(
            {
                "kind": type(self)._likelihoods,
                "estimator": self.estimator,
                "data": (data, self._n_outputs()),
                "validation": validation,
                "fit_params": fit_params,
                "seed": self._seed,
                "settings": {name: getattr(self, name) for name in settings},
                "rows": (self._tunes_on_rows(), self._may_refit()),
                "likelihood": self._likelihood_settings(),
            }
        )

    def _likelihood_settings(self) -> Any:
        """What the curvature takes from settings of the likelihood."""
        return self.likelihood

    def _fresh_random_state(self) -> np.random.RandomState:
        """Never the global generator: None draws on the operating system."""
        if self.random_state is None:
            return np.random.RandomState(int.from_bytes(os.urandom(4), "little"))
        return check_random_state(self.random_state)

    def _publish(self, curved: Curved, posterior: GaussianPosterior) -> None:
        fitted = curved.network
        self.estimator_ = fitted.net
        self.inspected_ = fitted.inspected
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

    def _check_parameters(self) -> None:
        check_settings(self)

    def _is_frozen(self) -> bool:
        return is_frozen(self.estimator)

    def _net(self) -> Any:
        return inner_net(self.estimator)

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
        self._input_type: InputType = input_type(self._net())
        data = self._weighted(self._checked(X, y, reset=True), sample_weight)
        if X_val is None:
            return data, None
        validation = self._checked(X_val, y_val, reset=False, name="y_val")
        return data, self._weighted(validation, None)

    def _weighted(self, data: TrainingData, sample_weight: Any) -> TrainingData:
        """The rows with weights, if there are any; those of weight zero are dropped."""
        own = self._own_weights(data.y)
        if sample_weight is None:
            return data if own is None else data.weighted(own)
        weights = _check_sample_weight(
            sample_weight,
            np.empty((len(data.y), 1)),
            dtype=np.float64,
            ensure_non_negative=True,
        )
        return data.weighted(weights if own is None else weights * own)

    def _own_weights(self, y: np.ndarray) -> np.ndarray | None:
        """Weights that targets have by themselves, (n,); overridden for labels."""
        return None

    def _checked(self, X: Any, y: Any, *, reset: bool, name: str = "y") -> TrainingData:
        """Validated arrays; datasets and dicts as they are; targets encoded."""
        if is_opaque(X):
            y = np.asarray(y)
            check_length(X, y)
            if reset:  # what an earlier fit on arrays has left
                for name in ("n_features_in_", "feature_names_in_"):
                    self.__dict__.pop(name, None)
        else:
            X, y = validate_data(
                self,
                X,
                y,
                reset=reset,
                dtype=None,
                allow_nd=True,
                **self._target_options,
            )
            X = self._input_type.inputs(X)
        return TrainingData(X, self._encode(y, reset=reset, name=name), None)

    # --------------------------------------------------------- fit: the network
    def _fit_network(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> FittedNetwork:
        """The trained net, and which rows it has and has not seen."""
        net = self._new_net(data)
        if validation is None and not self._is_frozen() and not net.train_split:
            data, validation = self._hold_out(data)
        if validation is None and (self._is_frozen() or not net.train_split):
            self._require_no_rows()
        if self._is_frozen():
            if fit_params:
                raise TypeError(
                    f"fit got the unknown arguments {listed(fit_params)}. They would "
                    "go to the training of the network, but this one is frozen."
                )
            self._check_targets(net, data.y)
            seen, held_out = data.dataset(net), None
        else:
            seen, held_out = self._train(net, data, fit_params)
        if validation is not None:
            held_out = validation.dataset(net)
        inspected = self._inspect(net, seen, is_trained=True)
        if self._chooses_weights():
            fitted = FittedNetwork(net, inspected, seen, None)
            options = {"indices": self._chosen_weights(fitted)}
            inspected = self._inspect(net, seen, is_trained=True, options=options)
        if self._is_frozen():  # else that was said before the training
            warn_if_double_softmax(net, inspected)
        return FittedNetwork(net, inspected, seen, held_out)

    def _new_net(self, data: TrainingData) -> Any:
        if self.estimator is None:
            return self._default_net(data)
        # a copy, so that training the original further cannot outdate the posterior
        return copied(self._net()) if self._is_frozen() else clone(self._net())

    def _train(
        self, net: Any, data: TrainingData, fit_params: dict[str, Any]
    ) -> tuple[Any, Any]:
        def check(dataset: Any, held_out: Any) -> None:
            self._check_held_out(dataset, held_out)
            self._check_targets(net, data.y)
            _match_targets(net, dataset)
            inspected = self._inspect(net, dataset, is_trained=False)
            warn_if_double_softmax(net, inspected)

        rows = data.X, data.y, data.sample_weight
        seen, held_out = train(net, *rows, check, **fit_params)
        _check_history(net)
        return seen, held_out

    def _check_targets(self, net: Any, y: np.ndarray) -> None:
        """Overridden where a criterion does not take all numbers."""

    def _check_held_out(self, dataset: Any, held_out: Any) -> None:
        """Overridden where targets are encoded: a split may bring its own."""

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
        return bool(self._tuners()) and self._tuners()[0] in ("auto", "validation")

    def _require_no_rows(self) -> None:
        """Refuse, before training, a tuner whose rows are not there."""
        reason = "the network is frozen, so that only you know what it has seen"
        if not self._is_frozen():
            reason = f"fewer than {holdout.MIN_ROWS} distinct rows are too few to share"
        if self._tuners()[:1] == ["validation"]:
            raise ValueError(
                "'validation' needs rows that the network did not see, and there are "
                f"none: {reason}. Pass X_val and y_val to fit, or use "
                "prior_precision='marglik'."
            )

    def _chooses_weights(self) -> bool:
        """Whether the training decides which single weights are random."""
        is_subnetwork = isinstance(self.subset_of_weights, str) and (
            self.subset_of_weights == "subnetwork"
        )
        return is_subnetwork and "indices" not in (self.subset_params or {})

    def _chosen_weights(self, fitted: FittedNetwork) -> Tensor:
        """Places of the weights that the criterion prefers."""
        options = self.subset_params or {}
        forward = fitted.forward()
        with forward.frozen():
            layout = select(forward, first_rows(fitted.net, fitted.train), "all", {})
            question = Question(
                forward,
                layout,
                fitted.inspected.likelihood,
                lambda: self._batches(fitted, fitted.train),
                self._seed,
            )
            by = options.get("by", CRITERION)
            return choose(question, by, fitted.inspected.layout.n_parameters)

    def _inspect(
        self,
        net: Any,
        dataset: Any,
        *,
        is_trained: bool,
        options: dict[str, Any] | None = None,
    ) -> Inspected:
        """Read the net's conventions and refuse what does not fit."""
        inspected = inspect(
            net,
            first_rows(net, dataset),
            self.subset_of_weights,
            self._likelihoods,
            self._n_outputs(),
            is_trained=is_trained,
            options=options or self.subset_params,
            likelihood=self.likelihood,
        )
        inspected = replace(inspected, likelihood=self._adapted(inspected.likelihood))
        n_rows = len(dataset) * inspected.n_outputs
        check_layout(self, inspected.layout, device_of(net), n_rows)
        if self._may_refit() and inspected.head_map is not None:
            self._check_head_rows(inspected, len(dataset), device_of(net))
        if self._refine() is True:
            if not inspected.likelihood.is_convex:
                raise ValueError(
                    "refine=True needs a loss that is convex in the outputs, which "
                    f"that of {type(inspected.likelihood).__name__} is not. Use "
                    "refine=False."
                )
            require_head(inspected.head_map)
        return inspected

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        """Overridden where settings say more of a likelihood than the criterion."""
        return likelihood

    def _check_head_rows(
        self, inspected: Inspected, n_rows: int, device: torch.device
    ) -> None:
        """Refuse to keep more rows for refitting than memory holds."""
        n_inputs = inspected.layout.blocks[0].factor_shape[1]
        # as they come, in float64 and in the dtype of the network; outputs, gradients
        # and what a step makes of them
        per_row = 16 * n_inputs + 6 * 8 * inspected.n_outputs
        require_bytes(
            per_row * n_rows,
            device,
            f"refitting the last layer on {n_rows:,} rows",
            "use refine=False, or fewer rows",
        )

    # ------------------------------------------------------- fit: the posterior
    def _accumulated(self, fitted: FittedNetwork) -> Curved:
        """Curvature and loss over the training rows."""
        inspected, curvature = fitted.inspected, self._curvature()
        accumulator = self._accumulator()(inspected.layout)
        head_rows = HeadRows(inspected.head_map if self._may_refit() else None)
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
        return Curved(fitted, accumulator.decompose(), data_fit, head_rows)

    def _posterior(self, curved: Curved) -> GaussianPosterior:
        """The posterior under the hyperparameters that are given or chosen."""
        with self._asked(curved):
            return self._tuned(curved.network, *self._initial(curved))

    @contextmanager
    def _asked(self, curved: Curved) -> Iterator[None]:
        """The state in which a trained network is asked for its posterior."""
        forward = curved.network.forward()
        with private_rng(None), torch.inference_mode(False), forward.frozen():
            yield

    def _initial(self, curved: Curved) -> tuple[GaussianPosterior, LinearHead | None]:
        """The posterior before any tuning, and the last layer as a linear model."""
        self._check_loss(curved.data_fit)
        posterior = self._untuned(curved.network, curved.structure, curved.data_fit)
        accumulator = self._accumulator()
        curvature = self._curvature()
        if curvature.is_exact:
            self._check_definite(posterior)
        return posterior, curved.head_rows.build(posterior, curvature, accumulator)

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

    def _may_refit(self) -> bool:
        """Whether anything can ask for another last layer."""
        refine = self._refine()
        return refine is True or (refine == "auto" and bool(self._tuners()))

    def _refine(self) -> bool | Literal["auto"]:
        """The setting as it is compared with: numpy's flags are not True or False."""
        return "auto" if self.refine == "auto" else bool(self.refine)

    def _check_loss(self, data_fit: DataFit) -> None:
        """Overridden where a loss says by itself that training has failed."""

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
            curvature_order=self._curvature().order,
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
            refine=self._refine(),
            diagonal=self._needs_variances_only(),
            log_density=self._log_density(posterior),
        )
        if task.free_prior or task.free_noise:
            return TUNERS[self._tuners()[0]](task)
        if task.refine is True:
            return require_head(task.head).refit(posterior)
        return posterior

    def _log_density(self, posterior: GaussianPosterior) -> Any:
        """Of held-out targets without a noise level; overridden for numbers."""
        return None

    def _needs_variances_only(self) -> bool:
        """Whether predictions ask for no covariance between outputs."""
        return True

    def _tuners(self) -> list[str]:
        """Names of the tuners asked for, the more specific ones first."""
        values = [self.prior_precision, self._sigma_noise()]
        names = {value for value in values if isinstance(value, str)}
        return sorted(names, key=lambda name: name == "auto")

    def _sigma_noise(self) -> Any:
        """Noise setting; one where the likelihood has none."""
        return 1.0

    def _validation_rows(self, fitted: FittedNetwork) -> Iterable[Rows] | None:
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
    """Held-out rows, linearised anew on each pass: no memory for many weights."""

    def __init__(self, fitted: FittedNetwork, batches: Batches) -> None:
        self.fitted, self.batches = fitted, batches

    def __iter__(self) -> Iterator[Rows]:
        forward = self.fitted.forward()
        inspected = self.fitted.inspected
        columns = centring if inspected.likelihood.is_shift_invariant else None
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(forward, x, inspected.layout, columns)
            targets = inspected.likelihood.targets(y, f)
            weights = weighed(inspected.likelihood, targets, weights)
            if weights is None:
                weights = torch.ones_like(f[:, 0])
            yield Rows(f, jacobian, targets, weights)


def _match_targets(net: Any, dataset: Any) -> None:
    """Give real-valued targets the number of axes that the module's outputs have.

    A criterion would broadcast (n,) against (n, 1) to (n, n), or refuse.
    """
    y = getattr(dataset, "y", None)
    if not isinstance(y, np.ndarray) or y.dtype.kind != "f":
        return
    with view(net).frozen():
        n_axes = raw_outputs(net, first_rows(net, dataset)).ndim
    if n_axes == 1 and y.ndim == 2 and y.shape[1] == 1:
        dataset.y = y.ravel()
    elif n_axes == 2 and y.ndim == 1:
        dataset.y = y.reshape(-1, 1)


def _check_history(net: Any) -> None:
    """Report training that went wrong as such, not as what it leads to."""
    losses = [row["train_loss"] for row in net.history if "train_loss" in row]
    if not losses:
        return
    if not np.isfinite(losses[-1]):
        raise ValueError(
            f"The training of the network has diverged: its loss is {losses[-1]} "
            "after the last epoch. Lower the learning rate or scale the inputs."
        )
    if losses[-1] > 10 * abs(losses[0]) + 1:
        warnings.warn(
            f"The training of the network seems to have diverged: its loss rose from "
            f"{losses[0]:.3g} to {losses[-1]:.3g}. Lower the learning rate or scale "
            "the inputs.",
            UserWarning,
            stacklevel=2,
        )


def plain(value: Tensor) -> Any:
    """A float or an array."""
    return value.item() if value.ndim == 0 else value.cpu().numpy()
