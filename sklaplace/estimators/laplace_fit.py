"""LaplaceFit: a trained network and the curvature of its loss; then, its posterior.

Nothing in a `LaplaceFit` depends on prior, noise, temperature or link, so that one
serves a whole search over these. `LaplaceSolver` accumulates it, and computes the
posterior under the hyperparameters that are given or tuned:

    N(mean, (scale · H + diag(prior_precision))⁻¹).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.budget import move
from sklaplace.core.random import private_rng, row_hash
from sklaplace.curvature.ggn import accumulate
from sklaplace.curvature.jacobian import Centring, backpropagate
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import Structure
from sklaplace.estimators.options import LaplaceOptions, check_earlier_layout
from sklaplace.likelihoods import DataFit, weighted
from sklaplace.networks.data import Batches, TrainingData
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.networks.training import copied
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.last_layer import LastLayerRecorder
from sklaplace.posterior.linear_model import LinearModel
from sklaplace.posterior.linearised import LinearisedNetwork
from sklaplace.posterior.tuning import TUNERS
from sklaplace.posterior.tuning.problem import (
    LinearisedBatch,
    TuningProblem,
    require_linear_model,
)


@dataclass(frozen=True)
class LaplaceFit:
    """A trained network and the curvature of its loss, before any prior.

    Attributes
    ----------
    network : TrainedNetwork
        The network; its training samples are kept where a refit needs them.
    structure : Structure
        The part of the Hessian that is kept.
    data_fit : DataFit
        Loss of the training samples.
    head_rows : LastLayerRecorder
        Training samples as the last layer's linear model takes them.
    needs_rows : bool
        Whether training samples are linearised again.
    """

    network: TrainedNetwork
    structure: Structure
    data_fit: DataFit
    head_rows: LastLayerRecorder
    needs_rows: bool = False

    def stored(self) -> "LaplaceFit":
        """Return the fit without training samples that are not needed any more."""
        if self.needs_rows:
            return self
        return replace(self, network=replace(self.network, train=None))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The network in evaluation mode; random states are restored."""
        forward = self.network.forward()
        with private_rng(None), torch.inference_mode(False), forward.frozen():
            yield


@dataclass(frozen=True)
class HeldOutScore:
    """What held-out samples are scored by; see `TuningProblem`.

    Attributes
    ----------
    log_proba : callable or None
        Log-probabilities of classes under a Gaussian over outputs.
    log_density : callable or None
        Log-density of targets whose likelihood has no noise to tune.
    diagonal : bool
        Whether variances of the outputs suffice.
    """

    log_proba: Callable[[Tensor, Tensor], Tensor] | None = None
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    diagonal: bool = True


@dataclass(frozen=True)
class LaplaceSolver:
    """Accumulates curvature, and computes posteriors.

    Attributes
    ----------
    options : LaplaceOptions
        Options of the approximation.
    seed : int
        Seed of Monte-Carlo curvature.
    """

    options: LaplaceOptions
    seed: int

    # ------------------------------------------------------------------- curvature
    def accumulate(self, network: TrainedNetwork) -> LaplaceFit:
        """Return the curvature and the loss over the training samples."""
        options, spec = self.options, network.spec
        accumulator = options.accumulator(spec.layout)
        head_rows = LastLayerRecorder(spec.head_map if options.may_refit else None)
        data_fit = accumulate(
            network.forward(),
            self._batches(network, network.train),
            spec.likelihood,
            options.configured_curvature(self.seed),
            accumulator,
            head_rows.add,
        )
        if not options.tunes_on_held_out:
            network = replace(network, held_out=None)
        needs_rows = options.refine is True and not head_rows.is_linear
        structure = accumulator.decompose()
        return LaplaceFit(network, structure, data_fit, head_rows, needs_rows)

    def add(
        self, posterior: GaussianPosterior, network: TrainedNetwork
    ) -> GaussianPosterior:
        """Return a posterior with the curvature and loss of further samples added.

        Parameters
        ----------
        posterior : GaussianPosterior
            Of earlier samples.
        network : TrainedNetwork
            At the posterior's mean, with the further samples to add.
        """
        curvature = self.options.configured_curvature(self.seed)
        accumulator = self.options.accumulator(posterior.layout)
        forward = network.forward()
        with private_rng(None), torch.inference_mode(False), forward.frozen():
            posterior.structure.resume(accumulator)
            more = accumulate(
                forward,
                self._batches(network, network.train),
                posterior.likelihood,
                curvature,
                accumulator,
            )
        before = posterior.data_fit
        data_fit = DataFit(before.loss + more.loss, before.n_targets + more.n_targets)
        structure = accumulator.decompose()
        posterior = replace(posterior, structure=structure, data_fit=data_fit)
        if curvature.is_exact:
            posterior.log_marginal_likelihood()  # raises if it is not definite
        return posterior

    # ------------------------------------------------------------------- posterior
    def posterior(self, fit: LaplaceFit, score: HeldOutScore) -> GaussianPosterior:
        """Return the posterior under given or tuned hyperparameters."""
        with fit.evaluation():
            untuned, head = self.untuned(fit)
            return self._tuned(fit.network, untuned, head, score)

    def untuned(self, fit: LaplaceFit) -> tuple[GaussianPosterior, LinearModel | None]:
        """Return the posterior before tuning, and outputs as a linear model, if any."""
        curvature = self.options.configured_curvature(self.seed)
        posterior = self._initial(fit)
        if self.options.prior is not None:
            # also for a network that was not trained here but loaded from memory
            check_earlier_layout(self.options.prior, posterior.layout)
            earlier = move(self.options.prior.as_prior(), posterior.mean.device)
            posterior = posterior.under(earlier, self.options.accumulator)
        if curvature.is_exact:
            self._check_definite(posterior)
        head = fit.head_rows.build(posterior, curvature, self.options.accumulator)
        if head is None and self.options.refine is True:
            network = fit.network
            batches = self._batches(network, network.train)
            rows = LinearisedSamples(network, batches, in_training=True)
            return posterior, LinearisedNetwork.of(
                posterior, rows, curvature, self.options.accumulator
            )
        return posterior, head

    def _initial(self, fit: LaplaceFit) -> GaussianPosterior:
        """Return the posterior at the network's weights, with initial values."""
        options, network = self.options, fit.network
        layout = network.spec.layout
        weights = layout.read(as_forward(network.net).module)

        def number(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64, device=weights.device)

        prior, noise = options.prior_precision, options.sigma_noise
        shape = PRIOR_STRUCTURES[options.prior_structure](layout)
        residual = 2 * fit.data_fit.loss / fit.data_fit.n_targets
        hyperparameters = Hyperparameters(
            prior_precision=number(1.0 if isinstance(prior, str) else prior)
            .expand(shape)
            .clone(),
            prior_mean=number(options.prior_mean),
            sigma_noise=residual.clamp(min=1e-16).sqrt()
            if isinstance(noise, str)
            else number(noise),
            temperature=number(options.temperature),
        )
        return GaussianPosterior(
            mean=weights,
            weights=weights,
            structure=fit.structure,
            layout=layout,
            likelihood=network.spec.likelihood,
            data_fit=fit.data_fit,
            hyperparameters=hyperparameters,
            curvature_order=options.configured_curvature(self.seed).order,
        )

    def _check_definite(self, posterior: GaussianPosterior) -> None:
        """Raise for a Hessian whose precision matrix is not positive definite."""
        lowest = float(posterior.structure.eigenvalues[0])
        if self.options.tuner and lowest < 0:
            raise ValueError(
                "curvature='hessian' cannot be tuned here: the weights are no minimum "
                f"of the loss, whose Hessian has the eigenvalue {lowest:.3g}. Use "
                "curvature='ggn', or a fixed prior_precision (and sigma_noise) that "
                "makes up for it, such as the weight decay in training."
            )
        posterior.log_marginal_likelihood()  # raises where the prior does not suffice

    def _tuned(
        self,
        network: TrainedNetwork,
        posterior: GaussianPosterior,
        head: LinearModel | None,
        score: HeldOutScore,
    ) -> GaussianPosterior:
        """Return the posterior with hyperparameters chosen by the tuner."""
        options = self.options
        problem = TuningProblem(
            posterior=posterior,
            linear_model=head,
            validation=self._held_out(network, score.diagonal),
            log_proba=score.log_proba,
            free_prior=options.free_prior,
            free_noise=options.free_noise and posterior.likelihood.has_noise,
            refine=options.refine,
            diagonal=score.diagonal,
            log_density=score.log_density,
        )
        if options.tuner and (problem.free_prior or problem.free_noise):
            return TUNERS[options.tuner](problem)
        if options.refine is True:
            return require_linear_model(head).refit(posterior)
        return posterior

    # --------------------------------------------------------------------- batches
    def _held_out(
        self, network: TrainedNetwork, diagonal: bool
    ) -> Iterable[LinearisedBatch] | None:
        """Return held-out samples, linearised; kept in memory for the last layer."""
        if network.held_out is None or not self.options.tunes_on_held_out:
            return None
        batches = self._batches(network, network.held_out, with_covariance=not diagonal)
        rows = LinearisedSamples(network, batches)
        return list(rows) if network.spec.layout.head is not None else rows

    def _batches(self, network: TrainedNetwork, dataset: Any, **sizes: Any) -> Batches:
        elements = self.options.row_elements(network.spec)
        batch_size = self.options.batch_size
        return network.batches(dataset, batch_size, row_elements=elements, **sizes)


@dataclass(frozen=True)
class LinearisedSamples:
    """Batches of samples, linearised again in each pass, which takes no memory.

    Attributes
    ----------
    network : TrainedNetwork
        The network.
    batches : Batches
        Samples.
    in_training : bool
        Whether outputs are left uncentred and samples have hashes, as a refit needs.
    """

    network: TrainedNetwork
    batches: Batches
    in_training: bool = False

    def __iter__(self) -> Iterator[LinearisedBatch]:
        forward, spec = self.network.forward(), self.network.spec
        likelihood, columns = spec.likelihood, None
        if likelihood.is_shift_invariant and not self.in_training:
            columns = Centring(likelihood.n_blocks)
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(forward, x, spec.layout, columns)
            targets = likelihood.targets(y, f)
            weights = weighted(likelihood, targets, weights)
            if weights is None:
                weights = torch.ones_like(f[:, 0])
            keys = row_hash(x) if self.in_training else None
            yield LinearisedBatch(f, jacobian, targets, weights, keys)


def network_at_mean(
    posterior: GaussianPosterior, network: TrainedNetwork, data: TrainingData
) -> TrainedNetwork:
    """Return the network at the posterior's mean, a copy if it was refitted.

    ``data`` are its training samples.
    """
    net = network.net
    if posterior.is_refitted:
        net = copied(net)
        module = as_forward(net).module
        own = dict(module.named_parameters())
        values = posterior.layout.unflatten(posterior.mean, module)
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
    return TrainedNetwork(net, network.spec, data.dataset(net))
