"""BaseLaplace: parameters, fit and posterior shared by the Laplace estimators."""

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.cache import check_memory
from sklaplace.core.checks import naming
from sklaplace.core.linalg import plain
from sklaplace.core.trees import Inputs, without_groups
from sklaplace.curvature.priors import by_group
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.base import NetEstimator, without_class
from sklaplace.estimators.fitting.cross_validation import CrossValidation
from sklaplace.estimators.fitting.fit_cache import cache_entry
from sklaplace.estimators.fitting.hyperparameters import (
    check_addable,
    check_evidence,
    free_parameters,
    under_hyperparameters,
)
from sklaplace.estimators.fitting.laplace_fit import (
    LaplaceFit,
    accumulate_fit,
    network_at_mean,
    novelty_with_samples,
    with_samples,
    with_scaled_novelty,
)
from sklaplace.estimators.fitting.noise import loss_per_target
from sklaplace.estimators.fitting.sample_record import (
    held_out_novelty,
    novelty_scores,
)
from sklaplace.estimators.fitting.steepness import chosen_steepness, with_steepness
from sklaplace.estimators.fitting.tuned import (
    are_certain,
    posterior_of_fold,
    retuned_posterior,
    tuned_posterior,
    warn_without_residual,
)
from sklaplace.estimators.options.laplace import REPLACED, LaplaceOptions
from sklaplace.estimators.options.parameters import LaplaceParameters
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.estimators.predicting.output_model import BatchedOutputs, require_finite
from sklaplace.estimators.predicting.residual_outputs import ResidualOutputs
from sklaplace.estimators.training.folds import train_with_folds
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.samples import (
    Samples,
    check_loader,
    draw_seed,
    warn_of_weight_scale,
)
from sklaplace.networks.outputs import raw_outputs
from sklaplace.networks.trained import TrainedNetwork, n_epochs
from sklaplace.novelty.novelty import Novelty
from sklaplace.novelty.residual import Residual
from sklaplace.novelty.steepness import steepnesses
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning import Tuner
from sklaplace.posterior.tuning.problem import HeldOutScore


@without_class
@dataclass(eq=False, repr=False, kw_only=True)
class BaseLaplace(LaplaceParameters, NetEstimator):
    """Parameters, fit and posterior that all Laplace estimators share."""

    memory: Any = None  # checked by `check_memory`

    if TYPE_CHECKING:  # provided by the other base classes of an estimator
        _likelihood: Any

        def _check_loss(
            self, loss: float, data: TrainingData, rate: str = ...
        ) -> None: ...
        def _grid_tuner(self, *args: Any) -> Tuner: ...

    # --------------------------------------------------------------------- fit
    def fit(
        self,
        X: Inputs,
        y: ArrayLike | None = None,  # None raises an error with instructions
        sample_weight: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
        X_val: Inputs | None = None,
        y_val: ArrayLike | None = None,
        groups_val: ArrayLike | None = None,
        **fit_params: object,
    ) -> Any:
        """Train the network, unless it is frozen, and fit the posterior.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training samples. Arrays, sparse matrices and data frames are validated and
            cast to the network's dtype. All other inputs are passed to skorch
            unchanged. Sparse matrices are converted to dense arrays one batch at a
            time.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets. For a classifier, class labels of any type, a matrix of 0/1 labels,
            or one array of labels per sample.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights for loss, curvature and evidence. Weights are
            interpreted as counts: a sample with weight two counts as two samples, and
            samples whose weights sum to one count as a single sample. If your weights
            are relative, scale them to a mean of one.
        groups : array-like of shape (n,), optional
            Group labels (strings or integers), such as patient IDs. Splits keep the
            samples of a group together, so that prior and noise are those of new
            groups. Copies of a sample may be separated if they belong to different
            groups.
        X_val, y_val : optional
            Held-out samples for the ``"validation"`` and ``"auto"`` tuners. The network
            is not trained on these samples.
        groups_val : array-like of shape (n_val,), optional
            Group labels of ``X_val``. In a noise model, all groups have equal weights.
        **fit_params : dict
            Arguments for the ``fit`` method of the skorch net. Predictions do not use
            these arguments, so they must not change the module's outputs.

        Returns
        -------
        object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network is invalid. The error leaves the
            estimator, the network and the data unchanged.

        Warns
        -----
        UserWarning
            If Ctrl-C ended the training of the network. In this case, the posterior
            uses the weights learned so far, and the fit is not stored in ``memory``.
            If a prior that maximises the evidence predicts held-out samples worse than
            the network alone.

        See Also
        --------
        partial_fit : Adds samples to a fitted posterior.
        tune : Tunes prior and noise again.

        Notes
        -----
        In addition to training the network, ``fit`` requires one pass over the samples,
        with k backpropagated columns per sample (k = c - 1 for c classes), and one
        decomposition of the Hessian approximation.

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
            X,
            y,
            sample_weight,
            groups,
            X_val=X_val,
            y_val=y_val,
            groups_val=groups_val,
            fit_params=fit_params,
        )
        with self._reported():
            return self._fit(samples)

    def _fit(self, samples: Samples) -> Any:
        """Fit to samples as passed by the user, and return the estimator.

        The posterior comes first. The residual, which is extra variance for inputs far
        from the training data, and the noise model then learn from the predictions of
        this posterior for held-out samples. Novelty measures how far inputs are. The
        extra variance is a power of it, and the steepness is the exponent.
        """
        # check the parameters
        options = self._check_options()
        warn_of_weight_scale(samples.sample_weight)
        check_memory(self.memory)
        # encode the samples
        data = self._encode(samples)
        cross_validation = self._cross_validation(samples)
        self._seed = draw_seed(self.random_state)
        options = self._scaled(options)
        # train the network and accumulate the curvature of its loss, unless cached
        trainer = replace(
            self._trainer(options),
            # with several fits, Ctrl-C raises an error instead of keeping the weights
            is_part=samples.is_part,
            splits=None if cross_validation is None else cross_validation.splits,
        )
        cached = cache_entry(
            trainer,
            data,
            memory=self.memory,
            random_state=self.random_state,
            settings=self._fit_settings(options),
        )
        fit: LaplaceFit | None = None if cached is None else cached.load()
        if fit is None:
            network, folds = train_with_folds(trainer, data)
            fit = accumulate_fit(options, network, folds)
            # after Ctrl-C, the next fit with these settings should train to the end
            if cached is not None and not trainer.is_interrupted:
                cached.store(fit.stored())
        else:  # the cache does not depend on all options
            trainer.check_trained(fit.network)
        fit = with_scaled_novelty(options, fit)
        # tune the prior precision and the noise, with a score of held-out samples; the
        # user passed these, or the trainer split them off
        likelihood = fit.network.spec.likelihood
        score = self._score(likelihood, is_given=samples.X_val is not None)
        # the largest value (they ascend), unless held-out samples choose another
        self.residual_steepness_ = steepnesses(likelihood)[-1]
        tuner = None  # the tuner of the options
        if cross_validation is not None:
            tuner = self._grid_tuner(options, cross_validation, fit)
        posterior = tuned_posterior(options, fit, score, tuner)
        self._set_fitted(options, fit.network, posterior)
        # warn if the network seems not to have learned
        loss = loss_per_target(fit.data_fit, fit.network, posterior)
        self._check_loss(loss, data)
        # learn from held-out samples what is far from the data, and the noise there
        self._novelty = fit.novelty
        residual = self._residual_of(fit.novelty, posterior)
        if residual is None and options.residual_variance:
            warn_without_residual(posterior, options)
        held_out_outputs = []
        if residual is not None or self._models_noise:
            held_out_outputs = self._held_out_outputs(fit)
        # the noise model learns from outputs with the final residual
        self._fit_noise(self._with_chosen_steepness(held_out_outputs, score))
        return self

    def _cross_validation(self, samples: Samples) -> CrossValidation | None:
        """Return the cross-validation of an estimator that chooses its prior by one."""
        return None

    def _scaled(self, options: LaplaceOptions) -> LaplaceOptions:
        """Return the options with the seed, and with the noise in units of the net."""
        noise = options.sigma_noise
        if not isinstance(noise, str):  # the name of a tuner has no unit
            noise = noise / self._targets.noise_unit
        return replace(options, sigma_noise=noise, seed=self._seed)

    def _fit_settings(self, options: LaplaceOptions) -> dict[str, Any]:
        """Return settings that affect the `LaplaceFit`, for the key of the cache.

        A `LaplaceFit` is the trained network with its curvature, before any tuning. The
        key also contains the trainer and the samples.
        """
        settings = {
            "targets": (self._targets.likelihoods, self._targets.n_outputs),
            "likelihood": self._likelihood_settings(),
            "batches": self.batch_size,
        }
        if options.tunes_on_held_out:
            settings["validation_fraction"] = self.validation_fraction
        return settings

    def _held_out_outputs(self, fit: LaplaceFit) -> list[BatchedOutputs]:
        """Return the outputs of all networks that have held-out samples.

        With folds, these are the networks of the folds. Otherwise, it is the fitted
        network, or none.
        """
        if not fit.folds:
            # the network of the fit, unlike that of predictions, has held-out samples
            whole_outputs = replace(self._outputs(), network=fit.network)
            return [] if fit.network.held_out is None else [whole_outputs]
        outputs = []
        for fold in fit.folds:
            posterior = posterior_of_fold(self._options, fold, self.posterior_)
            outputs.append(self._outputs_of(fold.network, posterior, fold.novelty))
        return outputs

    def _with_chosen_steepness(
        self, outputs: list[BatchedOutputs], score: HeldOutScore
    ) -> list[BatchedOutputs]:
        """Choose and set the steepness of the residual on held-out outputs.

        The steepness is the exponent with which the extra variance of a residual grows
        for unusual inputs.
        Return the outputs with this steepness, or unchanged if they have no residual.
        """
        if not any(isinstance(each.model, ResidualOutputs) for each in outputs):
            return outputs
        values = steepnesses(self.posterior_.likelihood)  # to choose from
        self.residual_steepness_ = chosen_steepness(outputs, score, values)
        return [with_steepness(each, self.residual_steepness_) for each in outputs]

    @property
    def _models_noise(self) -> bool:
        """Whether the noise can depend on the inputs."""
        return False

    def _fit_noise(self, outputs: list[BatchedOutputs]) -> None:
        """Fit a noise model to the residuals of held-out samples; regression only."""

    def _set_fitted(
        self,
        options: LaplaceOptions,
        network: TrainedNetwork,
        posterior: GaussianPosterior,
    ) -> None:
        """Set the fitted attributes that describe the posterior.

        ``options`` are those of the fit, because users can change parameters later.
        """
        self._options = options
        self.estimator_ = network.net
        # tuning can change the ratios of the likelihood's noise levels
        self.network_spec_ = replace(network.spec, likelihood=posterior.likelihood)
        self.posterior_ = posterior
        self.n_iter_ = n_epochs(network.net)
        # users see one value per group of tensors, the posterior has one per tensor
        groups = posterior.hyperparameters.groups
        self.prior_precision_ = plain(by_group(posterior.prior_precision, groups))
        self.temperature_ = plain(posterior.hyperparameters.temperature)

    def _fit_summary(self) -> list[str]:
        """Return the parts of the summary that describe the posterior.

        Parts about a residual, a temperature or the evidence occur only if there is
        something to report.
        """
        posterior, options = self.posterior_, self._options
        subset = options.subset_of_weights
        names = subset if isinstance(subset, str) else ", ".join(subset)
        phrases = [
            f"{options.hessian_structure} posterior over "
            f"{posterior.layout.n_parameters:,} weights ({names})",
            "weights refitted" if posterior.is_refitted else "weights kept",
        ]
        if posterior.earlier is not None:
            phrases.append("prior given as a Gaussian")
        else:
            phrases.append(f"prior_precision {posterior.shown_precision()}")
            if options.free_prior and are_certain(posterior):
                phrases.append("weights hardly uncertain")
        residual = self._residual_of(self._novelty, self.posterior_)
        if residual is not None:
            phrases.append(
                f"residual {residual.variance:.3g} (steepness {residual.steepness:g})"
            )
        if self.temperature_ != 1:
            phrases.append(f"temperature {self.temperature_:.3g}")
        if options.tuner == "marglik":
            # under other priors, weights without a refit can be improbable
            phrases.append(f"log evidence {self.log_marginal_likelihood_value_:.1f}")
        return phrases

    def _get_fitted_attr_html(self, doc_link: str = "") -> Any:
        """Return the table of fitted attributes, without a misleading evidence.

        If the prior was not chosen by the evidence and the weights were not refitted,
        the evidence says little about the model.
        """
        table = super()._get_fitted_attr_html(doc_link)
        if hasattr(self, "_options") and self._options.tuner != "marglik":
            table.pop("log_marginal_likelihood_value_", None)
        return table

    # ------------------------------------------------------------- collaborators
    def _check_options(self) -> LaplaceOptions:
        """Return the options; raise an error for invalid values.

        Their noise and seed are default values, which are replaced later.
        """
        # the noise is a parameter of regressors only, and `_scaled` sets the seed
        set_later = {"sigma_noise", "seed"}
        names = [f.name for f in fields(LaplaceOptions) if f.name not in set_later]
        values = {name: getattr(self, name) for name in names}
        self._check_parameters()  # each parameter alone
        if self.estimator is None and self.likelihood is not None:
            raise ValueError(
                f"likelihood={self.likelihood!r} needs a network trained with the "
                "same loss, unlike the default network. Pass a skorch net."
            )
        # an earlier posterior replaces these parameters, so they must be unchanged
        defaults = {name: getattr(type(self), name) for name in REPLACED}
        return LaplaceOptions.of(values, defaults)

    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        fraction = options.validation_fraction if options.holds_out else None
        return self._new_trainer(LaplaceTrainer, fraction, options=options)

    def _likelihood_settings(self) -> Any:
        """Return the likelihood settings that affect the curvature."""
        return self.likelihood

    def _score(self, likelihood: Any, *, is_given: bool) -> HeldOutScore:
        """Return the score for held-out samples.

        ``is_given`` states whether the user passed these samples.
        """
        return HeldOutScore(is_given=is_given)

    def _outputs(self) -> BatchedOutputs:
        """Distribution of the fitted network's outputs."""
        check_is_fitted(self)
        self._check_settings()
        network = TrainedNetwork(self.estimator_, self.network_spec_)
        return self._outputs_of(network, self.posterior_, self._novelty)

    def _outputs_of(
        self,
        network: TrainedNetwork,
        posterior: GaussianPosterior,
        novelty: Novelty | None,
    ) -> BatchedOutputs:
        """Distribution of a network's outputs under a posterior, with any residual.

        A residual model wraps the model of ``pred_type``. ``novelty`` is that of the
        network, or None without features.
        """
        n_samples = int(self.n_samples)
        model = OUTPUT_MODELS[self.pred_type](n_samples, self._seed, posterior)
        residual = self._residual_of(novelty, posterior)
        if residual is not None:
            layers = network.spec.feature_layers
            model = ResidualOutputs(
                n_samples, self._seed, posterior, model, residual, layers
            )
        return BatchedOutputs(
            network,
            model,
            self.batch_size,
            row_elements=self._options.row_elements(network.spec),
            n_jobs=self.n_jobs,
            name=type(self).__name__,
            verbose=self.verbose,
        )

    def _residual_of(
        self, novelty: Novelty | None, posterior: GaussianPosterior
    ) -> Residual | None:
        """Return the residual for the given novelty and posterior, or None without one.

        The residual is extra variance for inputs far from the training data, as
        measured by the novelty. In regression, it is in units of the posterior's noise,
        one level per column.
        """
        # the parameter can change after fit
        variance = replace(self._options, residual=self.residual).residual_variance
        if novelty is None or not variance:
            return None
        sigma = posterior.hyperparameters.sigma_noise
        return Residual.of(
            novelty,
            posterior.likelihood,
            sigma * posterior.noise_proportions.to(sigma),
            variance=variance,
            steepness=self.residual_steepness_,
        )

    # ----------------------------------------------------------------------- samples
    def _add_samples(
        self, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None
    ) -> Any:
        """Add the curvature and loss of new samples; the network keeps its weights.

        The new samples also count as training data for the novelty of inputs.
        """
        check_is_fitted(self)
        with self._reported():
            # parameters may have changed since fit, which used `self._options`
            options = self._check_options()
            check_addable(self.posterior_, self.network_spec_, self._options, options)
            warn_of_weight_scale(sample_weight)
            options = self._scaled(options)
            data = self._new_data(X, y, sample_weight)
            samples = data.dataset(self.estimator_)
            network = TrainedNetwork(self.estimator_, self.network_spec_, samples)
            # novelty is measured at the trained weights, curvature at the mean, which
            # differs from them after a refit
            novelty = novelty_with_samples(options, self._novelty, network)
            network = network_at_mean(self.posterior_, network, data)
            self.posterior_ = with_samples(options, self.posterior_, network)
            self._novelty = novelty
        return self

    def score_samples(self, X: Inputs) -> np.ndarray:
        """Score how similar samples are to the training data; higher is more similar.

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
            If the network has no features, or if X has another shape than in ``fit``.

        See Also
        --------
        sklaplace.metrics.ood_auroc : How well the score detects out-of-distribution
            samples.
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
        return novelty_scores(self._outputs(), self._check_inputs(X), self._novelty)

    # ------------------------------------------------------------------- posterior
    @property
    def log_marginal_likelihood_value_(self) -> float:
        """Log marginal likelihood (Laplace evidence) of the training data, in nats.

        See Also
        --------
        log_marginal_likelihood : Evidence for other hyperparameters, with gradients.

        Notes
        -----
        Use this value to compare models that were fitted with
        ``prior_precision="marglik"``. A prior precision that was tuned on held-out
        samples can be far from the maximum of the evidence. In this case, the evidence
        is not a useful score.

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
        """Return the scalar log evidence of the targets in units of ``y``."""
        # the density of y is that of normalised targets, divided by their unit
        log_unit = np.log(self._targets.noise_unit) * posterior.data_fit.n_targets
        return posterior.log_marginal_likelihood() - log_unit

    def log_marginal_likelihood(
        self, prior_precision: object = None, sigma_noise: object = None
    ) -> Any:
        """Return the Laplace approximation of ``log p(D)`` for the training data D.

        Parameters
        ----------
        prior_precision : float, array or Tensor, optional
            Prior precision to use instead of the fitted prior precision.
        sigma_noise : float, array or Tensor of shape (n_outputs,), optional
            Noise to use instead of the fitted noise; regression only. A single number
            applies to all columns of ``y``.

        Returns
        -------
        float or Tensor of shape ()
            Log marginal likelihood in nats. If an argument is a tensor, the result is a
            differentiable float64 tensor. The posterior does not change: refitted
            weights keep the values that they have under the fitted prior.

        Raises
        ------
        ValueError
            If a value is not positive, has a shape that does not match the prior or the
            targets, or is not a multiple of ``sigma_noise_`` although columns share
            weights.

        See Also
        --------
        tune : Maximises the evidence.
        sklaplace.plotting.PriorPathDisplay : Plot of the evidence over prior
            precisions.

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
        changes = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        posterior = under_hyperparameters(
            self.posterior_, changes, self._options, self._targets
        )
        evidence = self._evidence(posterior)
        # a tensor can need gradients of the evidence
        has_tensor = any(isinstance(value, Tensor) for value in changes.values())
        return evidence if has_tensor else float(evidence)

    def tune(
        self,
        X: Inputs | None = None,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        *,
        parameters: object = None,
    ) -> Any:
        """Tune prior precision, noise or temperature again, without the training data.

        The network, the curvature and the posterior mean do not change. This method
        also works for loaded estimators.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset, optional
            Held-out samples that the network was not trained on. Tuning maximises the
            predictive probability of their targets. If None, maximise the evidence of
            the training data.
        y : array-like of shape (n,) or (n, n_outputs), optional
            Targets of the samples.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights.
        parameters : str or sequence of str, optional
            Hyperparameters to tune: ``"prior_precision"``, ``"sigma_noise"`` or
            ``"temperature"``. If None, tune the prior precision, and the noise if the
            likelihood has noise. All other hyperparameters keep their values, including
            a temperature that was tuned earlier. Tuning the temperature requires
            held-out samples, because tempered likelihoods are not normalised. The
            temperature stays at one unless another value increases the joint
            probability of all targets by at least a factor of e.

        Returns
        -------
        object
            The estimator, with updated ``posterior_``, ``prior_precision_``,
            ``temperature_`` and, for a regressor, ``sigma_noise_``. Held-out samples
            also adjust the residual, if there is one. Any recalibration is undone.

        Raises
        ------
        ValueError
            If a parameter name is unknown, samples are incomplete, or the prior is the
            posterior of an earlier task. The error leaves the estimator unchanged.

        See Also
        --------
        log_marginal_likelihood : The objective without samples.

        Notes
        -----
        Without samples, tuning costs O(P) and requires no pass over data. With samples,
        tuning evaluates the predictive distribution about twenty times, or about two
        hundred times for the temperature. For a last layer, one pass over the samples
        is sufficient, because their features are stored. For all other weights, tuning
        requires two or three passes, or several dozen for the temperature. Without a
        refit, the result is the same as that of `fit` with ``refine=False`` and
        ``prior_precision="marglik"`` or ``prior_precision="validation"``. The results
        of a cross-validation search (``best_score_``, ``best_index_``, ``cv_results_``)
        do not change.

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
        self._check_settings()
        with self._reported():
            tuned_names = free_parameters(self.posterior_, parameters)
            network = TrainedNetwork(self.estimator_, self.network_spec_)
            if X is None:
                check_evidence(tuned_names, y, sample_weight)
            else:
                check_loader(X, "tune")
                if y is None:
                    raise ValueError("y is missing. Pass both X and y, or neither.")
                data = self._new_data(X, y, sample_weight)
                network = replace(network, held_out=data.dataset(self.estimator_))
            # here, the user passes any held-out samples; fit can also split them off
            score = self._score(network.spec.likelihood, is_given=True)
            # the parameter can change after fit
            options = replace(self._options, residual=self.residual)
            # errors refer to X by its name
            with progress.phase("tune"), nullcontext() if X is None else naming(X="X"):
                posterior = retuned_posterior(
                    options, self.posterior_, network, score, tuned_names
                )
            self._set_fitted(self._options, network, posterior)
            residual = self._residual_of(self._novelty, posterior)
            # learn from the new samples what is far from the data: the scale of the
            # novelty, and then the steepness of the residual
            if network.held_out is not None and residual is not None:
                novelty = held_out_novelty(options, network, self._novelty)
                if self._novelty is not None and novelty is not None:
                    self._novelty = self._novelty.scaled([novelty])
                outputs = replace(self._outputs(), network=network)
                self._with_chosen_steepness([outputs], score)
        return self

    def predictive(self, x: Tensor, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Return the mean and covariance of the outputs, differentiable in ``x``.

        Use this method for acquisition functions, or for gradients with respect to the
        inputs.

        Parameters
        ----------
        x : Tensor of shape (b, ...), or dict, list or tuple of tensors
            Samples in the network's input format, on the network's device. Real numbers
            are cast to the network's dtype. With ``joint``, the shape is (b, q, ...): b
            groups of q samples.
        joint : bool, default=False
            Whether to return covariances between the samples of each group, for batch
            acquisition functions.

        Returns
        -------
        mean : Tensor of shape (b, c) or (b, q·c)
            Means of the outputs, float64. For a classifier, the outputs are logits.
        cov : Tensor of shape (b, c, c) or (b, q·c, q·c)
            Covariances of the noise-free outputs of each sample or group, float64.
            Within a group, the c outputs of a sample are adjacent.

        Raises
        ------
        ValueError
            If outputs are not Gaussian (``pred_type="nn"``), the network cannot be
            applied to the samples, or outputs are not finite.
        TypeError
            If ``x`` does not consist of tensors.

        See Also
        --------
        latent_mean_and_variance : Mean and variance as arrays, without gradients.

        Notes
        -----
        Computing the full Jacobian requires c backward passes, and memory for c·P
        numbers per sample. Without gradients, `latent_mean_and_variance` is much
        faster. To include the observation noise, add ``sigma_noise_**2`` to the
        diagonal.

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
        outputs = self._outputs()
        model: Any = outputs.model
        if not model.is_gaussian:
            raise ValueError(
                f"pred_type={self.pred_type!r} does not yield Gaussian outputs. Use "
                "pred_type='glm'."
            )
        forward = outputs.network.forward()
        # the covariance is between the outputs of ``n_joint`` samples
        rows, n_joint = self._input_type.cast_tensors(x, self.estimator_.module_), 1
        if joint:
            rows, n_joint = without_groups(rows)
        with forward.frozen(), torch.enable_grad():
            raw_outputs(self.estimator_, rows)  # only raises for invalid inputs
            mean, cov = model.differentiable_moments(forward, rows, n_joint)
            mean, cov = require_finite(mean, cov)
            # to units of y, in the graph
            return self._targets.restored_outputs(self._likelihood, mean, cov)
