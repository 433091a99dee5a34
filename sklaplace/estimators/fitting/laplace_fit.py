"""LaplaceFit: a trained network, the curvature of its loss, and its posterior.

A `LaplaceFit` does not depend on the prior, noise, temperature or link, so a single fit
is sufficient for a whole search over these settings. `LaplaceSolver` accumulates the
curvature, and computes the posterior for given or tuned hyperparameters:

    N(mean, (scale · H + diag(prior_precision))⁻¹).
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.budget import KEPT_BUDGET, move
from sklaplace.core.checks import warn_user
from sklaplace.core.linalg import as_number
from sklaplace.core.parallel import ordered_map
from sklaplace.core.random import row_hash
from sklaplace.curvature import priors
from sklaplace.curvature.accumulation import CurvatureSums, accumulate
from sklaplace.curvature.jacobian import Centring, backpropagate
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import Structure
from sklaplace.curvature.structures.full import Full
from sklaplace.curvature.structures.rounding import check_finite
from sklaplace.estimators.fitting.noise import (
    root_mean_square,
    seen_noise,
    with_column_noises,
    with_residual_noise,
)
from sklaplace.estimators.fitting.sample_record import (
    NoveltyRecorder,
    SampleRecord,
    SampleRecorder,
    held_out_scores,
)
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.likelihoods.base import DataFit, sample_weights
from sklaplace.networks.data import Batches, TrainingData
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.shards import shards_of
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.networks.training import copied
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.last_layer import LastLayerRecorder
from sklaplace.posterior.linear_model import LinearModel
from sklaplace.posterior.linearised import LinearisedNetwork
from sklaplace.posterior.novelty import Novelty
from sklaplace.posterior.tuning import TUNERS, Tuner
from sklaplace.posterior.tuning.problem import (
    HeldOutScore,
    LinearisedBatch,
    TuningProblem,
)
from sklaplace.posterior.tuning.temperature import tune_temperature
from sklaplace.posterior.tuning.validation import tune_on_validation


@dataclass(frozen=True)
class LaplaceFit:
    """Trained network and the curvature of its loss, without a prior.

    Attributes
    ----------
    network : TrainedNetwork
        Trained network, with its training samples if they are required for a refit.
    structure : Structure
        Hessian approximation.
    data_fit : DataFit
        Loss on the training samples.
    head_rows : LastLayerRecorder
        Samples for the linear model of the last layer.
    needs_rows : bool
        Whether a refit linearises the network at the training samples again.
    novelty : Novelty or None
        Novelty relative to the training samples. None without features.
    folds : tuple of LaplaceFit
        One fit per fold, whose network was not trained on this fold. Empty if tuning
        does not use folds.
    """

    network: TrainedNetwork
    structure: Structure
    data_fit: DataFit
    head_rows: LastLayerRecorder
    needs_rows: bool = False
    novelty: Novelty | None = None
    folds: tuple["LaplaceFit", ...] = ()

    def stored(self) -> "LaplaceFit":
        """Return the fit without training samples that are no longer needed."""
        if self.needs_rows:
            return self
        network = replace(self.network, train=None)
        folds = tuple(fold.stored() for fold in self.folds)
        return replace(self, network=network, folds=folds)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put all networks into evaluation mode."""
        with ExitStack() as stack:
            for fit in (self, *self.folds):
                stack.enter_context(fit.network.forward().frozen())
            yield


@dataclass(frozen=True)
class LaplaceSolver:
    """Solver that accumulates curvature and computes posteriors.

    Attributes
    ----------
    options : LaplaceOptions
        Options of the approximation.
    seed : int
        Seed for the draws of Monte Carlo curvature.
    """

    options: LaplaceOptions
    seed: int

    # ------------------------------------------------------------------- curvature
    def accumulate(
        self, network: TrainedNetwork, folds: Iterable[TrainedNetwork] = ()
    ) -> LaplaceFit:
        """Accumulate the curvature and the loss over the training samples.

        Parameters
        ----------
        network : TrainedNetwork
            Trained network.
        folds : iterable of TrainedNetwork
            Networks that were each trained without one fold of the samples.
        """
        networks = [network, *folds]
        if not self.options.tunes_on_held_out:
            networks = [replace(network, held_out=None)]
        if self.options.free_noise:
            networks = with_column_noises(networks)
        if self.options.uses_held_out:  # also samples that do not choose the noise
            networks[0] = replace(networks[0], held_out=network.held_out)
        with progress.phase("curvature"):
            fit, *others = map(self._accumulated, networks)
        return replace(fit, folds=tuple(others))

    def _accumulated(self, network: TrainedNetwork) -> LaplaceFit:
        is_chosen = self.options.tuner is not None or network.held_out is not None
        refits = self.options.refits(network.spec, len(network.train))
        refits = refits and (is_chosen or self.options.refine is True)
        head_map = network.spec.head_map if refits else None
        recorder = partial(SampleRecorder, head_map=head_map)
        sums = self._sums(network, recorder=recorder)
        record: SampleRecord = sums.record
        return LaplaceFit(
            network=network,
            structure=sums.accumulator.decompose(),
            data_fit=sums.data_fit,
            head_rows=record.head_rows,
            needs_rows=self.options.refine is True and not record.head_rows.is_linear,
            novelty=record.novelty,
        )

    def _sums(self, network: TrainedNetwork, **options: Any) -> CurvatureSums:
        """Sum curvature and loss over a network's training samples."""
        batch_size = self._batches(network, network.train).batch_size
        return accumulate(
            replace(network, train=None, held_out=None),
            shards_of(network.train, batch_size),
            self.options.configured_curvature(self.seed),
            self.options.accumulator(network.spec.layout),
            batch_size=batch_size,
            map=partial(ordered_map, n_jobs=self.options.n_jobs, label="curvature"),
            **options,
        )

    def add_novelty(
        self, novelty: Novelty | None, network: TrainedNetwork
    ) -> Novelty | None:
        """Add a network's training samples to the samples that define novelty."""
        if novelty is None:
            return None
        with NoveltyRecorder(network.spec, network.forward(), novelty) as recorder:
            recorder.add_all(self._batches(network, network.train))
        return recorder.result()

    def add(
        self, posterior: GaussianPosterior, network: TrainedNetwork
    ) -> GaussianPosterior:
        """Add the curvature and loss of new samples to a posterior.

        Parameters
        ----------
        posterior : GaussianPosterior
            Posterior of the earlier samples.
        network : TrainedNetwork
            Network with the posterior's mean as its weights, and with the new samples.
        """
        with progress.phase("curvature"):
            more = self._sums(network)
        accumulator = self.options.accumulator(posterior.layout)
        with network.forward().frozen():
            posterior.structure.resume(accumulator)
            accumulator.merge(more.accumulator)
            structure = accumulator.decompose()
        data_fit = posterior.data_fit + more.data_fit
        check_finite(structure.trace())
        posterior = replace(posterior, structure=structure, data_fit=data_fit)
        if self.options.configured_curvature(self.seed).is_exact:
            posterior.log_marginal_likelihood()  # raises if not positive definite
        _check_resolved(posterior, network)
        return posterior

    # ------------------------------------------------------------------- posterior
    def posterior(
        self, fit: LaplaceFit, score: HeldOutScore, tuner: Tuner | None = None
    ) -> GaussianPosterior:
        """Compute the posterior for given or tuned hyperparameters.

        ``tuner`` replaces the tuner of the options.
        """
        check_finite(fit.structure.trace())
        with fit.evaluation():
            posterior = self._tuned(fit, score, tuner)
        _check_resolved(posterior, fit.network)
        return posterior

    def under(self, fit: LaplaceFit, posterior: GaussianPosterior) -> GaussianPosterior:
        """Return the posterior of a fold's fit with another fit's hyperparameters."""
        with fit.evaluation():
            own, head = self.untuned(fit)
            own = own.replace(**vars(posterior.hyperparameters))
            if not posterior.is_refitted:
                return own
            assert head is not None  # the refitted posterior has a head, too
            return head.refit(own)

    def untuned(self, fit: LaplaceFit) -> tuple[GaussianPosterior, LinearModel | None]:
        """Return the posterior before tuning, and its linear model if there is one."""
        options, network, sums = self.options, fit.network, fit.data_fit
        curvature = options.configured_curvature(self.seed)
        h = initial_hyperparameters(options, network, root_mean_square(sums))
        posterior = at_weights(network, fit.structure, sums, h, curvature.order)
        if (prior := options.prior) is not None:
            if not isinstance(prior, GaussianPosterior):
                prior = prior_of_matrix(prior, posterior)
            earlier = move(prior.as_prior(), posterior.mean.device)
            posterior = posterior.under(earlier, options.accumulator)
        if curvature.is_exact:
            _check_definite(posterior, is_tuned=options.tuner is not None)
        given = curvature, options.accumulator
        head: LinearModel | None = fit.head_rows.build(posterior, *given)
        if head is None and options.refine is True:
            batches = self._batches(network, network.train)
            rows = LinearisedSamples(
                network, batches, in_training=True, is_centred=False
            )
            head = LinearisedNetwork.of(posterior, rows, *given)
        return posterior, head

    def _tuned(
        self, fit: LaplaceFit, score: HeldOutScore, tuner: Tuner | None
    ) -> GaussianPosterior:
        """Return the posterior with hyperparameters chosen by the tuner."""
        options, has_noise = self.options, fit.network.spec.likelihood.has_noise
        is_tuned = options.free_prior or (options.free_noise and has_noise)
        if is_tuned:
            with progress.phase("tune"):
                # a tuner that replaces that of the options repeats passes many times
                problem = self._problem(fit, score, KEPT_BUDGET if tuner else 0)
                return (tuner or TUNERS[cast(str, options.tuner)])(problem)
        problem = self._problem(fit, score)
        chooses = problem.has_held_out and problem.linear_model is not None
        if not (chooses or options.refine is True):
            return problem.posterior
        with progress.phase("refit"):
            if options.refine is True:
                return problem.model.refit(problem.posterior)
            return tune_on_validation(problem)  # which only chooses the refit

    def _problem(
        self, fit: LaplaceFit, score: HeldOutScore, budget: float = 0
    ) -> TuningProblem:
        """Return the tuning problem for a fit and its folds; see `_held_out`."""
        posterior, head = self.untuned(fit)
        per_fold = budget / max(1, len(fit.folds))
        return TuningProblem(
            posterior=posterior,
            linear_model=head,
            validation=self._held_out(fit.network, score, budget),
            free_prior=self.options.free_prior,
            free_noise=self.options.free_noise and posterior.likelihood.has_noise,
            refine=self.options.refine,
            noise_on_held_out=self.options.noise_on_held_out,
            learned=self._learned(fit.network, posterior),
            seen_noise=self._seen_noise(fit, posterior),
            score=score,
            folds=tuple(self._problem(fold, score, per_fold) for fold in fit.folds),
        )

    def _seen_noise(
        self, fit: LaplaceFit, posterior: GaussianPosterior
    ) -> Tensor | None:
        """Estimate the noise from training samples; return None if it is not needed."""
        is_alone = fit.network.held_out is None and not fit.folds
        is_used = is_alone and self.options.tuner == "auto"
        if not (is_used and posterior.likelihood.has_noise):
            return None
        module = as_forward(fit.network.net).module
        n_layers = sum(p.ndim > 1 for p in module.parameters())
        relative = posterior.noise_proportions
        return seen_noise(fit.data_fit, fit.novelty, n_layers, relative)

    def _learned(
        self, network: TrainedNetwork, posterior: GaussianPosterior
    ) -> Tensor | None:
        """Return the prior precision that a training callback learned, or None."""
        names = [block.name for block in posterior.layout.blocks]
        for _, callback in getattr(network.net, "callbacks_", []):
            found = getattr(callback, "precisions_", {})
            if self.options.free_prior and found.keys() >= {*names}:
                values = posterior.mean.new_tensor([found[name] for name in names])
                structure = self.options.prior_structure
                return priors.of_tensors(values, structure, posterior.layout)
        return None

    def retuned(
        self,
        posterior: GaussianPosterior,
        network: TrainedNetwork,
        score: HeldOutScore,
        free: Collection[str],
    ) -> GaussianPosterior:
        """Tune the hyperparameters of a posterior again, without changing its mean.

        Parameters
        ----------
        posterior : GaussianPosterior
            Fitted posterior.
        network : TrainedNetwork
            Network of the posterior, with held-out samples for scoring if available.
            Without held-out samples, the evidence is maximised.
        score : HeldOutScore
            Score of held-out samples.
        free : collection of str
            Names of the hyperparameters to choose.
        """
        if self.options.configured_curvature(self.seed).is_exact:
            _check_definite(posterior, is_tuned=True)
        with network.forward().frozen():
            held_out = self._held_out(network, score)
            if "sigma_noise" in free:
                posterior = with_residual_noise(posterior, held_out)
            problem = TuningProblem(
                posterior=posterior,
                linear_model=None,
                validation=held_out,
                free_prior="prior_precision" in free,
                free_noise="sigma_noise" in free,
                refine=False,
                score=score,
            )
            tuner = TUNERS["validation" if problem.has_held_out else "marglik"]
            if "temperature" in free:
                tuner = tune_temperature
            posterior = tuner(problem)
        _check_resolved(posterior, network)
        return posterior

    # --------------------------------------------------------------------- batches
    def held_out_scores(
        self, network: TrainedNetwork, novelty: Novelty | None
    ) -> Tensor | None:
        """Return the novelty of held-out samples, if any; see `Novelty.scaled`."""
        if network.held_out is None:
            return None
        batches = self._batches(network, network.held_out)
        return held_out_scores(network, novelty, batches)

    def _held_out(
        self, network: TrainedNetwork, score: HeldOutScore, budget: float = 0
    ) -> Iterable[LinearisedBatch] | None:
        """Return linearised held-out samples, stored in memory for a last layer.

        For weights outside the last layer, the samples are stored if their Jacobians
        fit into ``budget`` bytes. Otherwise, or if memory is short, each pass over the
        samples linearises them again.
        """
        if network.held_out is None:
            return None
        batches = self._batches(
            network, network.held_out, with_covariance=not score.diagonal
        )
        rows = LinearisedSamples(network, batches, is_centred=score.is_centred)
        layout, n_outputs = network.spec.layout, network.spec.n_outputs
        width = n_outputs * layout.n_parameters
        if layout.head is not None:
            width = layout.blocks[0].factor_shape[1]  # outputs and gradients are extra
            budget = KEPT_BUDGET
        needed = 8 * len(network.held_out) * (width + 3 * n_outputs)
        return list(rows) if needed <= budget else rows

    def _batches(self, network: TrainedNetwork, dataset: Any, **sizes: Any) -> Batches:
        elements = self.options.row_elements(network.spec)
        batch_size = self.options.batch_size
        return network.batches(dataset, batch_size, row_elements=elements, **sizes)


@dataclass(frozen=True)
class LinearisedSamples:
    """Batches of samples that are linearised again in each pass, to save memory.

    Attributes
    ----------
    network : TrainedNetwork
        Trained network.
    batches : Batches
        Samples to linearise.
    in_training : bool
        Whether to hash the samples, which is required for a refit.
    is_centred : bool
        Whether to subtract the mean over outputs, which a softmax ignores.
    """

    network: TrainedNetwork
    batches: Batches
    in_training: bool = False
    is_centred: bool = True

    def __iter__(self) -> Iterator[LinearisedBatch]:
        forward, spec = self.network.forward(), self.network.spec
        likelihood, columns = spec.likelihood, None
        if likelihood.is_shift_invariant and self.is_centred:
            columns = Centring(likelihood.n_blocks)
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(forward, x, spec.layout, columns)
            targets = likelihood.targets(y, f)
            weights = sample_weights(likelihood, targets, weights, f)
            keys = row_hash(x) if self.in_training else None
            yield LinearisedBatch(f, jacobian, targets, weights, keys)


def initial_hyperparameters(
    options: LaplaceOptions, network: TrainedNetwork, noise: Tensor | None = None
) -> Hyperparameters:
    """Return the hyperparameters at the start of tuning.

    The initial value of a tuned prior precision is one, and that of tuned noise is
    ``noise``.
    """
    layout, device = network.spec.layout, network.device
    names = "prior_precision", "prior_mean", "sigma_noise", "temperature"
    values = {name: getattr(options, name) for name in names}
    if isinstance(values["prior_precision"], str):
        values["prior_precision"] = 1.0
    if isinstance(values["sigma_noise"], str):
        values["sigma_noise"] = noise
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64, device=device)
        for name, value in values.items()
    }
    for name in ("prior_precision", "prior_mean", "temperature"):
        tensors[name] = as_number(tensors[name])
    structure = options.prior_structure
    shape = PRIOR_STRUCTURES[priors.kind(structure)](layout)
    groups = priors.groups_of(structure, layout, device)
    delta = priors.of_groups(tensors.pop("prior_precision"), groups)
    delta = delta.expand(shape).clone()
    return Hyperparameters(prior_precision=delta, groups=groups, **tensors)


def prior_of_matrix(
    matrix: ArrayLike, posterior: GaussianPosterior
) -> GaussianPosterior:
    """Return the Gaussian prior with the given precision matrix (P, P) and prior mean.

    Half of the smallest eigenvalue is used as a scalar prior precision. The remainder
    of the matrix is treated as the curvature of an earlier task.
    """
    precision = torch.tensor(np.asarray(matrix, dtype=float)).to(posterior.mean)
    precision = (precision + precision.T) / 2
    eigenvalues = torch.linalg.eigvalsh(precision)
    rounding = torch.finfo(precision.dtype).eps * eigenvalues[-1]
    delta = eigenvalues[0].maximum(rounding) / 2
    rest = precision - delta * torch.eye(len(precision)).to(precision)
    h = replace(posterior.hyperparameters, prior_precision=delta)
    mean, none = h.prior_mean.expand(len(precision)), torch.zeros_like(delta)
    return replace(
        posterior,
        mean=mean,
        weights=mean,
        structure=Full(posterior.layout, rest / posterior.scale),
        data_fit=DataFit(none, none),
        hyperparameters=h,
    )


def at_weights(
    network: TrainedNetwork,
    structure: Structure,
    data_fit: DataFit,
    hyperparameters: Hyperparameters,
    curvature_order: int,
) -> GaussianPosterior:
    """Return the posterior with the network's weights as its mean."""
    spec = network.spec
    weights = spec.layout.read(as_forward(network.net).module)
    return GaussianPosterior(
        mean=weights,
        weights=weights,
        structure=structure,
        layout=spec.layout,
        likelihood=spec.likelihood,
        data_fit=data_fit,
        hyperparameters=hyperparameters,
        curvature_order=curvature_order,
    )


def _check_definite(posterior: GaussianPosterior, *, is_tuned: bool) -> None:
    """Raise ValueError if the posterior precision is not positive definite."""
    lowest = float(posterior.structure.eigenvalues[0])
    if is_tuned and lowest < 0:
        raise ValueError(
            "curvature='hessian' cannot be tuned: the Hessian of the loss has the "
            f"eigenvalue {lowest:.3g}, so the weights are not a minimum. Use "
            "curvature='ggn', or a larger fixed prior_precision."
        )
    posterior.log_marginal_likelihood()  # raises if the prior precision is too small


def _check_resolved(posterior: GaussianPosterior, network: TrainedNetwork) -> None:
    parameters = dict(as_forward(network.net).module.named_parameters())
    posterior.check_resolved(parameters[posterior.layout.blocks[0].name].dtype)


def network_at_mean(
    posterior: GaussianPosterior, network: TrainedNetwork, data: TrainingData
) -> TrainedNetwork:
    """Return the network or, after a refit, a copy with the refitted weights.

    ``data`` contains the training samples of the returned network.
    """
    net = network.net
    if posterior.is_refitted:
        net = copied(net)
        posterior.layout.write(posterior.mean, as_forward(net).module)
    return TrainedNetwork(net, network.spec, data.dataset(net))


def are_certain(posterior: GaussianPosterior) -> bool:
    """Return whether the prior leaves almost no uncertainty about the weights.

    In this case, the effective number of parameters (MacKay 1992) is less than one. An
    upper bound on this number is the trace of the curvature divided by the prior
    precision.
    """
    size = posterior.scale * posterior.structure.trace()
    return bool(size < posterior.prior_precision.min())


def warn_without_residual(
    posterior: GaussianPosterior, options: LaplaceOptions
) -> None:
    """Warn if a residual is requested or needed, but not available for this network."""
    if options.residual != "auto":
        warn_user(
            f"residual={options.residual} has no effect: the network has no features "
            "(see score_samples), or its likelihood has no unit for a residual. Use "
            "residual='none'."
        )
    elif options.prior_precision == "auto" and are_certain(posterior):
        warn_user(
            "Held-out rows are predicted best with no uncertainty in the weights "
            f"(prior precision {posterior.shown_precision()}), and this network has no "
            "residual. Use prior_precision='marglik' or a number."
        )
