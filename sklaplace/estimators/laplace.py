"""BaseLaplace: parameters, fit and posterior that the Laplace estimators share."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import is_classifier
from sklearn.utils._param_validation import validate_parameter_constraints
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.budget import moved_entries
from sklaplace.core.cache import check_memory
from sklaplace.core.linalg import plain
from sklaplace.core.serialise import from_portable, pickled, to_portable, worker_state
from sklaplace.core.trees import without_groups
from sklaplace.estimators.fitting.diagram import displayed
from sklaplace.estimators.fitting.fit_cache import FitWork, UnfinishedFit, cached_fit
from sklaplace.estimators.fitting.hyperparameters import (
    check_addable,
    retuned,
    under_hyperparameters,
)
from sklaplace.estimators.fitting.laplace_fit import (
    HeldOutScore,
    LaplaceFit,
    LaplaceSolver,
    network_at_mean,
)
from sklaplace.estimators.fitting.noise import loss_per_target
from sklaplace.estimators.fitting.novelty_recorder import novelty_scores
from sklaplace.estimators.fitting.summary import (
    of_posterior,
    reporting_for,
    warn_if_alone,
)
from sklaplace.estimators.options.constraints import CONSTRAINTS, Constraints
from sklaplace.estimators.options.given_net import (
    check_net,
    inner_net,
)
from sklaplace.estimators.options.laplace import (
    REPLACED,
    LaplaceOptions,
    check_likelihood,
    sibling,
)
from sklaplace.estimators.options.workers import Group, check_workers, data_to_agree_on
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS, CachedOutputs
from sklaplace.estimators.predicting.output_model import BatchedOutputs, require_finite
from sklaplace.estimators.predicting.residual_outputs import ResidualOutputs
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.samples import (
    EncodedData,
    InputForm,
    Samples,
    applicable,
    draw_seed,
    encode_samples,
    unchanged_on_error,
    warn_of_weight_scale,
    weighted_data,
)
from sklaplace.networks.outputs import raw_outputs
from sklaplace.networks.trained import TrainedNetwork, device_of, n_epochs
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.residual import Residual

# attributes of a fitted estimator
_WITH_TENSORS = "posterior_", "network_spec_", "_novelty"
# what functions of outputs do not need
_SENT_APART = "estimator", "estimator_", "prior", "memory", "posterior_", "_novelty"


@displayed
@dataclass(eq=False, repr=False, kw_only=True)
class BaseLaplace:
    """Parameters, fit and posterior of all Laplace estimators."""

    estimator: Any = field(default=None, kw_only=False)
    likelihood: Any = None
    subset_of_weights: str | list[str] = "last_layer"
    subset_params: dict[str, Any] | None = None
    hessian_structure: str = "kron"
    structure_params: dict[str, Any] | None = None
    curvature: str = "ggn"
    curvature_params: dict[str, Any] | None = None
    prior_precision: Any = "auto"
    prior_structure: str = "scalar"
    prior_mean: Any = 0.0
    prior: Any = None
    refine: Any = "auto"
    residual: Any = "auto"
    temperature: float = 1.0
    validation_fraction: float = 0.2
    pred_type: str = "glm"
    n_samples: int = 100
    batch_size: int | None = None
    n_shards: int | None = None
    n_jobs: int | None = None
    distributed: bool = False
    memory: Any = None
    random_state: Any = None
    verbose: int = 0

    _parameter_constraints: ClassVar[Constraints] = CONSTRAINTS
    # LinearisationCache of a search over priors, which predicts the same samples often
    _cache: ClassVar[Any] = None

    # --------------------------------------------------------------------- fit
    def fit(
        self,
        X: Any,
        y: Any = None,  # which is refused, saying what to pass
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
        **fit_params: Any,
    ) -> Any:
        """Train the network unless it is frozen, and fit the posterior around it.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training samples. Arrays are validated and cast to the network's dtype;
            anything else is passed to skorch unchanged.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets. For a classifier class labels of any type, a matrix of labels
            that are 0 or 1, or an array of labels for each sample.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the samples in loss, curvature and evidence. They
            are counts: a sample of weight two is equivalent to two samples, and weights
            that sum to one to a single sample. Relative weights should have mean one.
        X_val, y_val : optional
            Samples that the network does not see, used by the ``"validation"`` and
            ``"auto"`` tuners only.
        **fit_params : dict
            Passed to the ``fit`` of the skorch net. They must not change what the
            module computes: predictions are made without them.

        Returns
        -------
        object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network is not valid; the estimator,
            the network and the data are then unchanged.

        Warns
        -----
        UserWarning
            If Ctrl-C has ended the training of the network. The fit is that of the
            weights learned so far, and is stored nowhere.

        See Also
        --------
        partial_fit : Adds samples to a fitted posterior.
        tune : Chooses prior and noise anew.

        Notes
        -----
        Costs the training of the network, one pass over the samples with k backward
        columns per sample (k = c - 1 for c classes), and the decomposition of the
        structure.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.posterior_.mean.shape
        torch.Size([111])
        """
        samples = Samples(
            X, y, sample_weight, X_val=X_val, y_val=y_val, fit_params=fit_params
        )
        with reporting_for(self):
            return self._fit(samples)

    def _fit(self, samples: Samples) -> Any:
        with unchanged_on_error(self):
            with Group.of(self.distributed).together():
                options = self._check_options()
                warn_of_weight_scale(samples.sample_weight)
            fit = self._train_and_accumulate(options, samples)
            score = self._score(fit.network.spec.likelihood)
            score = replace(score, is_given=samples.X_val is not None)
            posterior = self._solver(options).posterior(fit, score)
            self._set_fitted(options, fit.network, posterior)
            self._check_loss(loss_per_target(fit.data_fit, fit.network, posterior))
            self._novelty = fit.novelty and fit.novelty.inflated(score.leverages)
            warn_if_alone(self)
        if self.verbose:
            progress.line(self._summary())
        return self

    def _train_and_accumulate(
        self, options: LaplaceOptions, samples: Samples
    ) -> LaplaceFit:
        """Train and accumulate the curvature; or load both from ``memory``."""
        group = Group.of(self.distributed)
        with group.together():
            check_memory(self.memory)
            encoded = self._encode(samples)
        group.agree(vars(options) | data_to_agree_on(encoded.data))
        group.agree({"random_state": self.random_state})
        # without a random state, the seed of the first process
        self._seed, *_ = group.gather(draw_seed(self.random_state))
        work = FitWork(
            trainer=replace(self._trainer(options), is_part=samples.is_part),
            solver=self._solver(options),
            group=group,
            data=encoded.data,
            validation=encoded.validation,
            fit_params=samples.fit_params,
        )
        settings = {
            "targets": (self._targets.likelihoods, self._targets.n_outputs),
            "likelihood": self._likelihood_settings(),
            "batches": (self.batch_size, self.n_shards),
        }
        if options.tunes_on_held_out:
            settings["validation_fraction"] = self.validation_fraction
        try:
            return cached_fit(work, self.memory, self.random_state, settings)
        except UnfinishedFit as unfinished:
            return unfinished.args[0]

    def _set_fitted(
        self,
        options: LaplaceOptions,
        network: TrainedNetwork,
        posterior: GaussianPosterior,
    ) -> None:
        self._options = options
        self.estimator_ = network.net
        self.network_spec_ = replace(network.spec, likelihood=posterior.likelihood)
        self.posterior_ = posterior
        self.n_iter_ = n_epochs(network.net)
        self.prior_precision_ = plain(posterior.prior_precision)
        self.temperature_ = plain(posterior.hyperparameters.temperature)

    _summary = of_posterior

    # ------------------------------------------------------------- collaborators
    def _check_options(self) -> LaplaceOptions:
        """Return the options; raises for values that are not valid."""
        names = [f.name for f in fields(LaplaceOptions) if f.name != "sigma_noise"]
        values = {name: getattr(self, name) for name in names}
        self._validate_params()
        check_net(self.estimator, self._targets_kind.example_net)
        other = sibling(type(self).__name__, is_classifier(self))
        check_likelihood(self.likelihood, is_classifier(self), other)
        check_workers(self.distributed, self.memory)
        kind = type(self)
        return LaplaceOptions.of(
            values, {name: getattr(kind, name) for name in REPLACED}
        )

    def _solver(self, options: LaplaceOptions) -> LaplaceSolver:
        return LaplaceSolver(options, self._seed)

    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        fraction = options.validation_fraction if options.holds_out else None
        return LaplaceTrainer(
            estimator=self.estimator,
            targets=self._targets,
            likelihood=self.likelihood,
            seed=self._seed,
            validation_fraction=fraction,
            alternative=sibling(type(self).__name__, is_classifier(self)),
            options=options,
        )

    def _likelihood_settings(self) -> Any:
        """Return the settings of the likelihood that the curvature depends on."""
        return self.likelihood

    def _score(self, likelihood: Any) -> HeldOutScore:
        """Return what held-out samples are scored by."""
        return HeldOutScore()

    @property
    def _outputs(self) -> BatchedOutputs:
        """The distribution of outputs of the fitted network."""
        check_is_fitted(self)
        # they may have been set after fit
        names = "pred_type", "n_samples", "batch_size", "n_jobs", "residual"
        values = {name: getattr(self, name) for name in names}
        validate_parameter_constraints(
            self._parameter_constraints, values, type(self).__name__
        )
        kind = OUTPUT_MODELS[self.pred_type]
        draws = self.n_samples, self._seed, self.posterior_
        model, residual = kind(*draws), self._residual()
        if residual is not None:
            layers = self.network_spec_.feature_layers
            model = ResidualOutputs(*draws, model, residual, layers)
        network = TrainedNetwork(self.estimator_, self.network_spec_)
        elements = self._options.row_elements(self.network_spec_)
        given = network, model, self.batch_size, elements
        if self._cache is not None:
            return CachedOutputs(*given, cache=self._cache)
        return BatchedOutputs(*given, self.n_jobs, (type(self).__name__, self.verbose))

    def _residual(self) -> Residual | None:
        """Return the residual of the outputs, None where there is none."""
        # it may have been set after fit
        variance = self._options.residual_variance(self.residual)
        if self._novelty is None or not variance:
            return None
        return Residual.of(self._novelty, self.posterior_, variance)

    # ----------------------------------------------------------------------- samples
    def _encode(self, samples: Samples) -> EncodedData:
        """Return encoded samples; sets what later samples are encoded by."""
        self._input_type = InputForm.of(inner_net(self.estimator))
        owner, infer = type(self).__name__, self._infer_targets
        return encode_samples(samples, owner, self._check_samples, infer)

    def _check_samples(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Return inputs and targets, checked; inputs are cast."""
        options = {"reset": reset, "allow_nd": is_classifier(self)}
        X, y = self._input_type.check_samples(self, X, y, **options)
        if reset:
            self._input_type = self._input_type.seen(X)
        return X, y

    def _check_inputs(self, X: Any) -> Any:
        """Return inputs to predict, checked and cast."""
        check_is_fitted(self)
        check = partial(self._input_type.check_inputs, self, net=self.estimator_)
        if self._cache is not None:
            return self._cache.inputs(X, check)
        return check(X)

    def _add_samples(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """Add curvature and loss of new samples; the network keeps its weights."""
        check_is_fitted(self)
        with reporting_for(self), unchanged_on_error(self):
            group = Group.of(self.distributed)
            with group.together():
                solver, data, network, novelty = self._prepared(X, y, sample_weight)
            group.agree(data_to_agree_on(data))
            network = network_at_mean(self.posterior_, network, data)
            added = solver.add(self.posterior_, network)
            self.posterior_, self._novelty = added, novelty
        return self

    def _prepared(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
        """Return solver, new samples, the network with them, and their novelty."""
        options = self._check_options()
        check_addable(self, options)
        warn_of_weight_scale(sample_weight)
        X, y = self._check_samples(X, y, reset=False)
        data = weighted_data(
            self._targets, applicable(self.estimator_, X), y, sample_weight
        )
        samples, solver = data.dataset(self.estimator_), self._solver(options)
        network = TrainedNetwork(self.estimator_, self.network_spec_, samples)
        return solver, data, network, solver.add_novelty(self._novelty, network)

    def score_samples(self, X: Any) -> np.ndarray:
        """Score how like the training samples others are: the higher, the more normal.

        Read more in the :ref:`User Guide <novelty>`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to score.

        Returns
        -------
        ndarray of shape (n,)
            Sums of log tail probabilities, at most zero; see the user guide.

        Raises
        ------
        ValueError
            If the network has no features.

        See Also
        --------
        sklaplace.metrics.ood_auroc : How well the score detects other samples.
        sklaplace.plotting.NoveltyDisplay : Scores of known and unknown samples.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> known, unknown = model.score_samples([X.mean(0), X.mean(0) + 100])
        >>> bool(known > unknown)
        True
        """
        return novelty_scores(self._outputs, self._check_inputs(X), self._novelty)

    # ------------------------------------------------------------------- posterior
    @property
    def log_marginal_likelihood_value_(self) -> float:
        """Log marginal likelihood (Laplace evidence) of the training data, in nats.

        See Also
        --------
        log_marginal_likelihood : Under other hyperparameters, with gradients.

        Notes
        -----
        Models compare by it under ``prior_precision="marglik"``. A prior precision that
        held-out samples chose can be far from the one that maximises it, and the value
        there says little of the model.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> bool(
        ...     model.log_marginal_likelihood_value_ == model.log_marginal_likelihood()
        ... )
        True
        """
        check_is_fitted(self)
        return float(self._evidence(self.posterior_))

    def _evidence(self, posterior: GaussianPosterior) -> Tensor:
        """Return the log evidence of targets in the units of ``y``, ()."""
        log_unit = np.log(self._targets.noise_unit) * posterior.data_fit.n_targets
        return posterior.log_marginal_likelihood() - log_unit

    def log_marginal_likelihood(
        self, prior_precision: Any = None, sigma_noise: Any = None
    ) -> Any:
        """Laplace approximation of ``log p(D)`` of the training data, in nats.

        Parameters
        ----------
        prior_precision : float, array or Tensor, optional
            Value in place of the fitted one.
        sigma_noise : float, array or Tensor of shape (n_outputs,), optional
            Likewise; regression only. One number is the noise of all columns of ``y``.

        Returns
        -------
        float or Tensor of shape ()
            Given a tensor, a float64 tensor in its graph, so that it has gradients. The
            posterior does not change: refitted weights are those of the fitted prior.

        Raises
        ------
        ValueError
            If a value is not positive, has another shape than prior or targets, or is
            no multiple of ``sigma_noise_`` where columns share weights.

        See Also
        --------
        tune : Maximises it.
        sklaplace.plotting.PriorPathDisplay : A plot of it along prior precisions.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> worse = model.log_marginal_likelihood(1e6 * model.prior_precision_)
        >>> bool(worse < model.log_marginal_likelihood())
        True
        """
        check_is_fitted(self)
        given = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        posterior = under_hyperparameters(self, given)
        evidence = self._evidence(posterior)
        has_tensor = any(isinstance(value, Tensor) for value in given.values())
        return evidence if has_tensor else float(evidence)

    def tune(
        self,
        X: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        parameters: Any = None,
    ) -> Any:
        """Choose prior precision, noise or temperature anew, without training samples.

        Network, curvature and the posterior's mean stay. Works for loaded estimators.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset, optional
            Samples that the network was not trained on: the choice is that under which
            their targets are most probable. None maximises the evidence of the
            training data.
        y : array-like of shape (n,) or (n, n_outputs), optional
            Their targets.
        sample_weight : array-like of shape (n,), optional
            Their non-negative weights.
        parameters : str or sequence of str, optional
            What to choose, of ``"prior_precision"``, ``"sigma_noise"`` and
            ``"temperature"``. None is the first, and the second where the likelihood
            has noise. Others keep their values: a temperature that was chosen before
            stays unless it is named again. It needs samples, as tempered likelihoods
            are not normalised, and is one unless another makes all targets together
            more probable by a factor of e.

        Returns
        -------
        object
            The estimator, with ``posterior_``, ``prior_precision_``, ``temperature_``
            and, for a regressor, ``sigma_noise_``; a recalibration is undone.

        Raises
        ------
        ValueError
            If there is no such parameter, samples are incomplete, or the prior is the
            posterior of an earlier task. The estimator is then unchanged.

        See Also
        --------
        log_marginal_likelihood : What is maximised without samples.

        Notes
        -----
        Without samples O(P) and no pass over any data. With samples about twenty
        evaluations of the predictive; ten times as many for the temperature. That is
        one pass over the samples for the last layer, whose features are kept. For
        other weights it is two or three passes, and some dozens with the temperature.
        Without a refit, the result is that of `fit` with ``refine=False`` and
        ``prior_precision`` ``"marglik"`` or ``"validation"``.
        What a search by cross-validation found (``best_score_``, ``best_index_``,
        ``cv_results_``) stays as it is, whatever ``prior_precision_`` is now.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(prior_precision=1.0, random_state=0)
        >>> model.fit(X[::2], y[::2]).prior_precision_
        1.0
        >>> model.tune(X[1::2], y[1::2]).prior_precision_ != 1.0
        True
        """
        check_is_fitted(self)
        with reporting_for(self), unchanged_on_error(self):
            posterior, novelty = retuned(self, X, y, sample_weight, parameters)
            network = TrainedNetwork(self.estimator_, self.network_spec_)
            self._set_fitted(self._options, network, posterior)
            self._novelty = novelty
            if self.verbose:
                progress.line(self._summary())
        return self

    def predictive(self, x: Tensor, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the outputs as functions of ``x``, in its graph.

        For acquisition functions and whatever else needs gradients in the inputs.

        Parameters
        ----------
        x : Tensor of shape (b, ...), or dict, list or tuple of tensors
            Samples as the network takes them, on its device; real numbers are cast to
            its dtype. With ``joint``, (b, q, ...): b groups of q samples.
        joint : bool, default=False
            Return covariances between the samples of each group, as batch acquisition
            functions need them.

        Returns
        -------
        mean : Tensor of shape (b, c) or (b, q·c)
            Float64; logits for a classifier.
        cov : Tensor of shape (b, c, c) or (b, q·c, q·c)
            Of the noise-free outputs of each sample or group; float64. In a group, the
            c outputs of a sample are next to each other.

        Raises
        ------
        ValueError
            With ``pred_type="nn"``, under which outputs are not Gaussian, and for
            samples that the network cannot be applied to, or whose outputs are not
            finite.
        TypeError
            If ``x`` is not made of tensors.

        See Also
        --------
        latent_mean_and_variance : Arrays, without gradients.

        Notes
        -----
        Writes the Jacobian out: c backward passes and c·P numbers for each sample. For
        predictions alone, `latent_mean_and_variance` is much faster. The observation
        noise is ``sigma_noise_**2`` on the diagonal, where it is to be included.

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
        outputs = self._outputs
        if not outputs.model.is_gaussian:
            raise ValueError(
                f"pred_type={self.pred_type!r} has no Gaussian over outputs. Use "
                "pred_type='glm'."
            )
        forward = outputs.network.forward()
        rows, n_joint = self._input_type.cast_tensors(x, self.estimator_.module_), 1
        if joint:
            rows, n_joint = without_groups(rows)
        with forward.frozen(), torch.enable_grad():
            raw_outputs(self.estimator_, rows)  # raises for inputs that do not fit
            found = require_finite(*outputs.model.in_graph(forward, rows, n_joint))
            return self._targets.restored_outputs(self._likelihood, *found)

    # ------------------------------------------------------------- persistence
    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle: tensors on the CPU; skorch pickles the network."""
        state = worker_state(vars(self), _SENT_APART)
        return pickled(self, moved_entries(state, _WITH_TENSORS, "cpu"))

    def __getstate__(self) -> dict[str, Any]:
        """For skops: the state without tensors, see `to_portable`."""
        return to_portable(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(from_portable(state))
        if "estimator_" in vars(self):
            device = device_of(self.estimator_)
            vars(self).update(moved_entries(vars(self), _WITH_TENSORS, device))
