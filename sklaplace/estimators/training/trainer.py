"""Trainer: from encoded samples to a `TrainedNetwork`.

A trainer can hold out samples, and trains the network unless it is frozen. Before and
after training, the trainer infers the meaning of the outputs from a few samples.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from sklearn.base import clone
from skorch import NeuralNet
from skorch.dataset import Dataset, ValidSplit
from torch.utils.data import Subset

from sklaplace.core import progress
from sklaplace.core.checks import listed, naming, warn_user
from sklaplace.core.random import private_rng
from sklaplace.curvature.descent import Descent, weight_decays
from sklaplace.data.dataset import TrainingData, first_rows, is_opaque, spread_rows
from sklaplace.data.split import hash_split, row_keys, separate_replicates
from sklaplace.data.streams import is_stream, require_choice
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.targets.base import Targets
from sklaplace.networks.default import Size
from sklaplace.networks.net_checks import (
    check_held_out_batches,
    check_no_lazy_modules,
    check_sampler,
    check_scripted,
    leaves_one_sample,
)
from sklaplace.networks.outputs import (
    OutputSpec,
    as_forward,
    check_repeatable,
    match_axes,
    measure_outputs,
    raw_outputs,
    warn_if_double_softmax,
    warn_of_other_loss,
)
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.networks.training import (
    copied,
    logits_alone,
    noting_ctrl_c,
    training_run,
)

# If more than this fraction of samples has copies, a random split is not used for
# tuning.
NOTABLE_COPIES = 0.05
# Fraction of samples that replace held-out samples of a net, as in skorch.
FRACTION = 0.2


@dataclass(frozen=True)
class TrainingPlan:
    """Samples of a training, and what is known about its held-out samples.

    Attributes
    ----------
    data : TrainingData
        Training samples, and any samples that the network does not receive.
    recorded : tuple of (Dataset, Dataset) or None
        Training and held-out samples of a frozen net, according to its history.
    groups : ndarray of shape (n_held_out,) or None
        Groups of the samples that the net's ``train_split`` holds out.
    uses_split : bool
        Whether samples that the net holds out are used for tuning.
    """

    data: TrainingData
    recorded: tuple[Any, Any] | None = None
    groups: np.ndarray | None = None
    uses_split: bool = True


@dataclass(kw_only=True)
class Trainer:
    """Trainer of a skorch net on encoded samples.

    Attributes
    ----------
    estimator : skorch.NeuralNet, FrozenEstimator or None
        ``estimator`` parameter of the estimator.
    targets : Targets
        Training targets.
    likelihood : Likelihood or None
        Likelihood that overrides the criterion's likelihood.
    seed : int
        Seed of the split.
    validation_fraction : float or None
        Fraction of the samples to hold out if the net itself does not hold out any.
        None if nothing is tuned on held-out samples.
    alternative : str
        Name of the estimator for the other kind of targets (labels or numbers), for
        messages.
    brings_encoded : bool
        Whether targets from ``train_split``, if any, are already encoded.
    size : Size or None
        Size of the default network. If None, derive the size from the number of
        samples.
    is_part : bool
        Whether other networks are trained, too. If True, Ctrl-C raises an error.
    is_interrupted : bool
        Whether Ctrl-C ended the training.
    """

    estimator: Any
    targets: Targets
    likelihood: Any
    seed: int
    validation_fraction: float | None
    alternative: str
    brings_encoded: bool = False
    size: Size | None = None
    is_part: bool = False
    is_interrupted: bool = False
    _keyed: tuple[Any, np.ndarray, np.ndarray] | None = field(default=None, init=False)

    has_prior: ClassVar[bool] = False
    """Whether every net is trained with a prior, not only the default net."""

    @property
    def is_frozen(self) -> bool:
        """Whether the network keeps its weights."""
        return is_frozen(self.estimator)

    def train(self, data: TrainingData) -> TrainedNetwork:
        """Return the trained network with its training and held-out samples.

        First decide which samples are held out, then train, then infer what the outputs
        mean. Held-out samples are those of ``data`` or of the plan. If there are none,
        they are those that the net split off during training.
        """
        net = self.new_net(data)
        train_split = net.train_split  # steps below may replace it for the training
        if not self.is_frozen:
            self.targets.check_net(net)
            self._split_within_inputs(net, data)
        plan = self._plan(net, data)
        data, validation = plan.data, plan.data.validation
        datasets = self.learn(net, data)
        net.train_split = train_split
        training_set, held_out = plan.recorded or datasets
        groups = plan.groups
        if validation is not None:
            held_out, groups = validation.dataset(net), validation.groups
        elif not plan.uses_split:
            held_out = None
        spec = self.infer_spec(net, training_set, is_trained=True)
        if self.is_frozen:  # other nets are checked before training
            self.targets.match(net, data.y)
            _check_validation(net, validation)
            warn_if_double_softmax(net, spec)
        trained = TrainedNetwork(net, spec, training_set, held_out, groups)
        self._compare_loss(trained)
        return self.after_training(trained)

    def _plan(self, net: NeuralNet, data: TrainingData) -> TrainingPlan:
        """Decide which samples are held out; may replace the net's ``train_split``.

        Samples that the user holds out take precedence, then samples that the net holds
        out. If there are neither, the trainer holds out samples. It also does so if the
        net's split separates copies or groups, and then replaces the net's split.
        """
        if data.validation is not None:
            return TrainingPlan(data)
        recorded = self.split_of_frozen(net, data)
        has_split = bool(recorded or (net.train_split and not self.is_frozen))
        if has_split and not self._copies_cross(net, data):
            return TrainingPlan(data, recorded=recorded)
        rows = self.hold_out(data)
        if rows is None:
            self.check_without_held_out()
            return TrainingPlan(data, uses_split=not has_split)
        train, held_out = rows
        if not has_split:
            return TrainingPlan(data.split(train, held_out))
        # the net still splits all samples itself, for example for early stopping
        net.train_split = ValidSplit([rows])
        groups = None if data.groups is None else data.groups[held_out]
        return TrainingPlan(data, groups=groups)

    def keys(self, data: TrainingData) -> np.ndarray:
        """Return keys that copies of a sample, or samples of a group, share."""
        return self._keys_and_inputs(data)[0]

    def _keys_and_inputs(self, data: TrainingData) -> tuple[np.ndarray, np.ndarray]:
        """Return keys (n,), and keys of the inputs alone (n,); cache the last result.

        Copies of a sample have equal keys. Replicates, which are samples with equal
        inputs and other targets, have equal keys of the inputs only. With groups, both
        are keys of the groups. Without replicates, both are the same array.
        """
        # data, keys, keys of the inputs
        if self._keyed is None or self._keyed[0] is not data:
            keys = inputs = row_keys(data.X, len(data.y), self.seed, data.groups)
            if data.groups is None:
                keys = separate_replicates(inputs, data.y)
            self._keyed = data, keys, inputs
        return self._keyed[1:]

    def size_for(self, data: TrainingData) -> Size:
        """Return the size of the default network for the given samples.

        Unless the size is given, it depends on the number of distinct samples, in all
        groups together.
        """
        if self.size is not None:
            return self.size
        # with groups, keys would count the groups
        ungrouped = data if data.groups is None else replace(data, groups=None)
        return Size.of(len(np.unique(self.keys(ungrouped))))

    def hold_out(self, data: TrainingData) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the indices of training samples and of held-out samples.

        Return None if there are too few samples, or if the net is not trained.
        """
        if self.validation_fraction is None or self.is_frozen or is_stream(data.X):
            return None
        check_sampler(self.estimator)  # raises if it refers to positions in X
        keys, stratify = self.keys(data), self.targets.stratify
        split = hash_split(keys, data.y, self.validation_fraction, stratify=stratify)
        if split is None or not leaves_one_sample(self.estimator, len(split[0])):
            return split
        # Batch norm fails on a last batch of one sample. The sample with the largest
        # key, a hash, is left out, whatever the order of the samples.
        train, held_out = split
        return np.delete(train, keys[train].argmax()), held_out

    def _copies_cross(self, net: NeuralNet, data: TrainingData) -> bool:
        """Warn and return True if the net's random split separates groups or copies.

        Held-out samples say nothing about new samples if the network is trained on
        copies of them, or on other samples of their group.
        """
        has_groups = data.groups is not None
        is_random = isinstance(net.train_split, ValidSplit)
        can_cross = is_random and (has_groups or not is_opaque(data.X))
        if self.validation_fraction is None or not can_cross:
            return False
        # a set contains the samples of a group, or the copies of a sample
        keys = self.keys(data)
        _, set_of_row, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        share = (sizes[set_of_row] > 1).mean()
        # few copies hardly matter, but groups are kept apart because the user asks
        if share == 0 or (share < NOTABLE_COPIES and not has_groups):
            return False
        are = "share a group with others" if has_groups else "have copies"
        warn_user(
            f"{share:.0%} of the rows of X {are}, and the net's train_split puts them "
            "on both sides. Its held-out rows say nothing about new rows, so fit tunes "
            "on other rows, if there are any. Use train_split=None."
        )
        return True

    def _split_within_inputs(self, net: NeuralNet, data: TrainingData) -> None:
        """Replace a split that holds out all samples of repeated inputs, and warn.

        Without shuffling, skorch holds out the first samples. If the samples are sorted
        by their inputs, the network would never see some of these inputs. The new split
        holds out single samples, by their hashes.
        """
        is_random = isinstance(net.train_split, ValidSplit)
        has_keys = data.groups is None and not (is_opaque(data.X) or is_stream(data.X))
        if not (is_random and has_keys):
            return
        keys, input_keys = self._keys_and_inputs(data)
        if keys is input_keys:  # no inputs are repeated with other targets
            return
        _, cell, sizes = np.unique(input_keys, return_inverse=True, return_counts=True)
        # samples of a cell have equal inputs; the net's split is tried on positions, as
        # it does not depend on the inputs, with private random numbers
        with private_rng(None):
            train = net.train_split(Dataset(np.arange(len(cell)), data.y), data.y)[0]
        is_seen = np.bincount(cell[train.indices], minlength=len(sizes)) > 0
        # share of the samples whose inputs are repeated, but never trained on
        if (~is_seen & (sizes > 1))[cell].mean() < NOTABLE_COPIES:
            return
        stratify = self.targets.stratify
        split = hash_split(keys, data.y, FRACTION, stratify=stratify)
        if split is None:
            return
        net.train_split = ValidSplit([split])
        warn_user(
            "The net's train_split holds out all rows of some repeated inputs, so the "
            "network would never see these inputs. fit holds out other rows. Shuffle "
            "the rows of X and y, or use train_split=None."
        )

    def split_of_frozen(
        self, net: NeuralNet, data: TrainingData
    ) -> tuple[Any, Any] | None:
        """Return a frozen net's training and held-out samples, or None if unknown."""
        return None

    def descent(self, trained: TrainedNetwork) -> Descent:
        """Return the gradient descent on the net's loss from the trained weights."""
        # the optimizer of a frozen net refers to the parameters of the original net
        source = inner_net(self.estimator) if self.is_frozen else trained.net
        decays = weight_decays(source)
        return Descent(trained.net, trained.train, decays, self.seed)

    # ------------------------------------------------------ steps to be overridden
    def new_net(self, data: TrainingData) -> NeuralNet:
        """Return the net to train: a clone, or a copy of a frozen net."""
        net = inner_net(self.estimator)
        if net is None:
            return self.targets.default_net(data, self.size_for(data))
        # with a copy, training the original net later does not affect the posterior
        return copied(net) if self.is_frozen else clone(net)

    def check_without_held_out(self) -> None:
        """Raise an error if held-out samples are required but there are none."""

    def infer_spec(
        self, net: NeuralNet, dataset: Any, *, is_trained: bool
    ) -> OutputSpec:
        """Return the specification of a net's outputs; raise an error if invalid.

        A few samples of ``dataset`` determine it.
        """
        samples = spread_rows(net, dataset)
        with as_forward(net).frozen():
            spec, *_ = measure_outputs(net, samples, **self.spec_options(is_trained))
        check_repeatable(net, samples)
        return spec

    def before_training(self, net: NeuralNet, spec: OutputSpec, held_out: Any) -> None:
        """Check and prepare an initialised net before its first step."""

    def training_mixins(self) -> tuple[type, ...]:
        """Return mixins for the net's class during training."""
        return ()

    @property
    def keeps_weights(self) -> bool:
        """Whether the network is not trained."""
        return self.is_frozen

    def after_training(self, trained: TrainedNetwork) -> TrainedNetwork:
        """Return the trained network, with changes that its posterior needs."""
        return trained

    # ------------------------------------------------------------------- training
    def learn(self, net: NeuralNet, data: TrainingData) -> tuple[Any, Any]:
        """Train the net, and return its training and held-out samples.

        A network that keeps its weights is not trained and holds out no samples. The
        net is checked after its initialisation, just before the first step:
        `training_run` then calls ``check``. It also notes the data sets that the net
        trains and validates on.
        """
        fit_params = data.fit_params
        if self.keeps_weights:
            if fit_params:
                raise TypeError(
                    f"fit got the unknown arguments {listed(fit_params)}. They would "
                    "be passed to the training, but this network is frozen."
                )
            check_no_lazy_modules(net)
            return data.dataset(net), None
        check = partial(self._check_initialised, net, data)
        with (
            progress.phase("train"),
            training_run(net, data, check, self.training_mixins()) as run,
            noting_ctrl_c(run),
        ):
            net.fit(data.X, data.y, **fit_params)
        if run.is_interrupted:
            self.is_interrupted = True
            self._accept_interrupt(net, fit_params.get("epochs") or net.max_epochs)
        _check_history(net)
        return run.datasets

    def _check_initialised(
        self,
        net: NeuralNet,
        data: TrainingData,
        dataset: Dataset,
        held_out: Dataset | None,
    ) -> None:
        """Check an initialised net and its samples before the first step.

        This also gives real targets the axes of the net's outputs, and prepares the
        criterion for the encoded targets. ``dataset`` and ``held_out`` are the parts
        that the net is trained and validated on.
        """
        validation = data.validation
        # the net's split selects samples by position
        if isinstance(held_out, Subset) and held_out.dataset is dataset:
            require_choice(dataset)
            check_sampler(net)
        if not self.brings_encoded:
            self.targets.check_held_out(dataset, held_out)
        check_scripted(net)
        check_held_out_batches(net, held_out)
        # held-out samples of a fold have encoded targets, too
        encoded: list[Any] = [dataset, held_out] if self.brings_encoded else [dataset]
        x = first_rows(net, dataset)
        for samples in encoded:
            # a criterion would broadcast targets (n,) against outputs (n, 1)
            y = getattr(samples, "y", None)
            matched = match_axes(net, x, y)
            if matched is not y:
                samples.y = matched
        spec = self.infer_spec(net, dataset, is_trained=False)
        # adapts the criterion to the encoded targets, or raises
        self.targets.match(net, data.y)
        _check_validation(net, validation)
        warn_if_double_softmax(net, spec)
        tuned_on = held_out if validation is None else validation.dataset(net)
        self.before_training(net, spec, tuned_on)

    def _compare_loss(self, trained: TrainedNetwork) -> None:
        """Warn if the net's loss is not that of the likelihood given by the user.

        A trainer with a prior trains with the given likelihood itself.
        """
        if self.likelihood is not None and not self.has_prior:
            # another loss differs on any samples, so a few suffice
            x, _, _ = batch = next(iter(trained.batches(trained.train, 16)))
            # the criterion expects logits, of which some modules return more
            with logits_alone(trained.net, x):
                warn_of_other_loss(trained.net, trained.spec.likelihood, batch)

    def _accept_interrupt(self, net: NeuralNet, n_epochs: int) -> None:
        """Warn about partly trained weights, or raise KeyboardInterrupt.

        An error is raised if no batch has been learned from, or if this is one of
        several networks (``is_part``), because Ctrl-C ends all of them.
        """
        epochs = [*net.history]
        has_learned = any("train_loss" in b for e in epochs for b in e["batches"])
        if self.is_part or not has_learned:
            raise KeyboardInterrupt
        warn_user(
            f"Training was interrupted in epoch {len(epochs)} of {n_epochs}, so the "
            "fit uses the weights learned so far. Fit again to train for all epochs."
        )

    def spec_options(self, is_trained: bool) -> dict[str, Any]:
        """Return the arguments of `measure_outputs` that describe the outputs.

        These are the likelihoods that suit the targets, how to adapt the criterion's
        likelihood to the targets, and the estimator that messages recommend instead.
        """
        return {
            "allowed": self.targets.likelihoods,
            "n_targets": self.targets.n_outputs,
            "is_trained": is_trained,
            "likelihood": self.likelihood,
            "adapted": self.targets.adapt,
            "other": self.alternative,
        }


def check_applicable(net: NeuralNet, X: Any) -> None:
    """Apply a net to inputs that only the net can check; raise an error if it fails."""
    with as_forward(net).frozen():
        raw_outputs(net, first_rows(net, net.get_dataset(X)))


def _check_validation(net: NeuralNet, validation: TrainingData | None) -> None:
    """Raise an error if a net cannot be applied to the samples for tuning."""
    # arrays were already checked against the training data
    if validation is not None and is_opaque(validation.X):
        with naming(X="X_val"):
            check_applicable(net, validation.X)


def _check_history(net: NeuralNet) -> None:
    """Raise an error or warn if the training loss shows that training has diverged."""
    losses = [row["train_loss"] for row in net.history if "train_loss" in row]
    if not losses:
        return
    if not np.isfinite(losses[-1]):
        raise ValueError(
            f"The training of the network has diverged: its loss is {losses[-1]} "
            "after the last epoch. Lower the learning rate or scale the inputs."
        )
    # A tenfold loss is beyond fluctuations. Losses may be negative, or near zero in the
    # first epoch, so the absolute value is used and a rise below one is ignored.
    if losses[-1] > 10 * abs(losses[0]) + 1:
        warn_user(
            f"The training of the network seems to have diverged: its loss rose to "
            f"{losses[-1]:.3g}. Lower the learning rate or scale the inputs.",
        )
