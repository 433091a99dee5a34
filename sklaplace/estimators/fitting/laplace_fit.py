"""LaplaceFit: a trained network and the curvature of its loss, without a prior.

A `LaplaceFit` does not depend on the prior, noise, temperature or link, so a single fit
is sufficient for a whole search over these settings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from sklaplace.core import progress
from sklaplace.core.parallel import ordered_map
from sklaplace.curvature.accumulation import CurvatureSums, Recorder, accumulate
from sklaplace.curvature.structures import Structure
from sklaplace.curvature.structures.kron import Kron
from sklaplace.curvature.structures.rounding import check_finite
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.fitting.sample_record import (
    SampleRecord,
    SampleRecorder,
    held_out_novelty,
)
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.likelihoods.base import DataFit
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.shards import shards_of
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.networks.training import copied
from sklaplace.noise.levels import with_column_noises
from sklaplace.novelty.novelty import Novelty
from sklaplace.novelty.recorder import NoveltyRecorder
from sklaplace.novelty.scale import ZScores
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import LastLayerRecorder


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
        """Return the fit to store, without samples that are no longer needed."""
        if isinstance(self.structure, Kron):
            # compute and cache the eigenvectors, which all prior precisions share
            for factor in chain.from_iterable(self.structure.factors):
                factor.eigh()
        if self.needs_rows:
            return self
        network = replace(self.network, train=None)
        folds = tuple(fold.stored() for fold in self.folds)
        return replace(self, network=network, folds=folds)

    def with_novelty_of(self, held_out: list[ZScores]) -> "LaplaceFit":
        """Scale the novelty of all networks by the z-scores of held-out samples."""
        return replace(
            self,
            novelty=self.novelty and self.novelty.scaled(held_out),
            folds=tuple(fold.with_novelty_of(held_out) for fold in self.folds),
        )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put all networks into evaluation mode."""
        with ExitStack() as stack:
            for fit in (self, *self.folds):
                stack.enter_context(fit.network.forward().frozen())
            yield


def networks_for_tuning(
    options: LaplaceOptions, network: TrainedNetwork, folds: Sequence[TrainedNetwork]
) -> list[TrainedNetwork]:
    """Return the network and those of folds, with the held-out samples to be used.

    If the noise is tuned, their likelihood has the relative noise levels of columns.
    These levels are measured on held-out samples only if tuning uses held-out samples.
    """
    if not options.uses_held_out:
        network = replace(network, held_out=None)
    networks = [network, *folds]
    if options.free_noise:
        return with_column_noises(networks, on_held_out=options.tunes_on_held_out)
    return networks


@torch.inference_mode(False)
@progress.phase("curvature")
def accumulate_fit(
    options: LaplaceOptions, network: TrainedNetwork, folds: Sequence[TrainedNetwork]
) -> LaplaceFit:
    """Return the fit of the network, which contains the fits of the folds' networks.

    One pass over the training samples of each network accumulates curvature and loss,
    and records the novelty and, if the last layer may be refitted, its inputs.

    Parameters
    ----------
    options : LaplaceOptions
        Options of the approximation.
    network : TrainedNetwork
        Trained network.
    folds : sequence of TrainedNetwork
        Networks that were each trained without one fold of the samples.
    """
    fits = []
    for trained in networks_for_tuning(options, network, folds):
        # with refine="auto", the tuner or held-out samples decide whether to refit
        can_choose = options.tuner is not None or trained.held_out is not None
        refits = options.refits(trained.spec, len(trained.train))
        refits = refits and (can_choose or options.refine is True)
        # the map from the last layer's to the network's outputs, used by refits of this
        # layer; with None, no inputs of the layer are recorded
        head_map = trained.spec.head_map if refits else None
        recorder = partial(SampleRecorder, head_map=head_map)
        sums = curvature_sums(options, trained, recorder=recorder)
        record: SampleRecord = sums.record
        fits.append(
            LaplaceFit(
                network=trained,
                structure=sums.accumulator.decompose(),
                data_fit=sums.data_fit,
                head_rows=record.head_rows,
                needs_rows=options.refine is True and not record.head_rows.is_linear,
                novelty=record.novelty,
            )
        )
    return replace(fits[0], folds=tuple(fits[1:]))


def with_scaled_novelty(options: LaplaceOptions, fit: LaplaceFit) -> LaplaceFit:
    """Scale the novelty of all networks by their held-out samples.

    The scale is the distribution of the novelty of new samples; see `Novelty.scaled`.
    Without a residual, which is the only use of this scale, it remains that of the
    training samples.
    """
    all_scores = []
    if options.residual_variance:
        # folds hold out samples in place of the whole fit
        for part in fit.folds or (fit,):
            scores = held_out_novelty(options, part.network, part.novelty)
            all_scores += [] if scores is None else [scores]
    return fit.with_novelty_of(all_scores)


def curvature_sums(
    options: LaplaceOptions,
    network: TrainedNetwork,
    recorder: Callable[[TrainedNetwork, Forward], Recorder] = Recorder,
) -> CurvatureSums:
    """Sum curvature and loss over a network's training samples.

    ``recorder`` builds an object that records further data about the samples, which the
    sums contain as ``record``; a plain `Recorder` records nothing.
    """
    batch_size = options.batches(network, network.train).batch_size
    return accumulate(
        replace(network, train=None, held_out=None),  # shards bring the samples
        shards_of(network.train, batch_size),
        options.configured_curvature,
        options.accumulator(network.spec.layout),
        batch_size=batch_size,
        map=partial(ordered_map, n_jobs=options.n_jobs, label="curvature"),
        recorder=recorder,
    )


def with_samples(
    options: LaplaceOptions, posterior: GaussianPosterior, network: TrainedNetwork
) -> GaussianPosterior:
    """Return a posterior to which the curvature and loss of new samples are added.

    Parameters
    ----------
    options : LaplaceOptions
        Options of the approximation.
    posterior : GaussianPosterior
        Posterior of the earlier samples.
    network : TrainedNetwork
        Network with the posterior's mean as its weights, and with the new samples.
    """
    with progress.phase("curvature"):
        new_sums = curvature_sums(options, network)
    accumulator = options.accumulator(posterior.layout)
    with network.forward().frozen():
        posterior.structure.add_to(accumulator)
        accumulator.merge(new_sums.accumulator)
        structure = accumulator.decompose()
    data_fit = posterior.data_fit + new_sums.data_fit
    check_finite(structure.trace())  # not finite if any entry is not
    posterior = replace(posterior, structure=structure, data_fit=data_fit)
    # unlike the other curvatures, the exact Hessian can have negative eigenvalues
    if options.is_exact:
        posterior.log_marginal_likelihood()  # raises if not positive definite
    check_resolved(posterior, network)
    return posterior


def novelty_with_samples(
    options: LaplaceOptions, novelty: Novelty | None, network: TrainedNetwork
) -> Novelty | None:
    """Add a network's training samples to the samples that define novelty.

    Return the new novelty, or None if the old or the new samples have no features.
    """
    if novelty is None:
        return None
    recorder = NoveltyRecorder(network, network.forward(), novelty)
    with recorder:  # removes its hooks from the network at the end
        recorder.observe_all(options.batches(network, network.train))
    return recorder.novelty


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


def check_resolved(posterior: GaussianPosterior, network: TrainedNetwork) -> None:
    """Raise ValueError if rounding errors would dominate the posterior variances."""
    # the dtype of the selected weights determines the rounding errors of Jacobians
    parameters = dict(as_forward(network.net).module.named_parameters())
    posterior.check_resolved(parameters[posterior.layout.blocks[0].name].dtype)
