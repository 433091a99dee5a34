"""MCDropoutClassifier and MCDropoutRegressor: Monte Carlo dropout.

Dropout stays active during prediction. A draw is one dropout mask, shared by all
samples. Each draw is thus a function of the inputs (a network with some units set to
zero), and does not depend on batches or the order of samples.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sklaplace.core import progress
from sklaplace.core.checks import listed
from sklaplace.core.trees import Batch, copied, tree_rows
from sklaplace.curvature.recorder import n_samples
from sklaplace.data.dataset import TrainingData, spread_rows
from sklaplace.estimators.options.constraints import COUNT, option
from sklaplace.estimators.predicting.output_model import OutputModel
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.sampling import BaseSampling
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.default import with_dropout
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import OutputSpec, as_forward
from sklaplace.networks.training import copied as copied_net

# ---------------------------------------------------------------------------- masks
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
# random operators of these layers, of functions, and within attention and recurrence
OPERATORS = torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default
# layers that stay in evaluation mode; all others are searched for dropout
_FIXED = nn.modules.batchnorm._NormBase, nn.RReLU
# attribute of modules whose functions drop units; files keep it
_MARK = "_drops_units"


class SharedMasks(TorchDispatchMode):
    """Mode in which dropout drops the same units for all samples.

    Attributes
    ----------
    generator : torch.Generator
        Generator of the masks.
    n_samples : int or None
        Number of samples, b. None if the length of the first axis is b.
    running : list of nn.Module
        Modules that are being called, the innermost last.
    drawing : set of nn.Module
        Modules that drew random numbers themselves.
    """

    def __init__(self, generator: torch.Generator, n_samples: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator, self.n_samples = generator, n_samples
        self.running: list[nn.Module] = []
        self.drawing: set[nn.Module] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; dropout operators use the masks of the current draw.

        torch calls this method for each operator within the mode. ``types`` is part of
        its interface. All modules that draw are recorded in ``drawing``, also if their
        operators are not those of dropout.
        """
        # the innermost running module is the one that draws
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawing.update(self.running[-1:])
        if func not in OPERATORS:
            return func(*args, **(kwargs or {}))
        x, p = (*args, 0.5)[:2]  # p is 0.5 by default
        if func is OPERATORS[0]:  # fills x with ones, each with probability p
            return x.copy_(self._shared_mask(x, p))
        # the fused operator of GPUs, which returns outputs and mask; here p is the
        # probability of dropping a unit, and the division keeps the mean of the outputs
        mask = self._shared_mask(x, 1 - p)
        return x * mask / (1 - p), mask.bool()

    def _shared_mask(self, x: Tensor, keep: float) -> Tensor:
        """Return a mask in the shape of ``x`` that is the same for all samples.

        A mask for one sample is drawn, and repeated along the axis of samples. A unit
        is kept (one instead of zero) with probability ``keep``.
        """
        shape = list(x.shape)
        if isinstance(self.running[-1], nn.RNNBase):
            shape[-2] = 1  # after time, or the only axis of packed sequences
        else:
            # attention folds its heads, each with its own mask, into the first axis
            n_heads, rest = divmod(shape[0], self.n_samples or shape[0])
            # with a rest, the first axis is not of samples, and its entries share one
            shape[0] = 1 if rest else n_heads
        mask = torch.rand(shape, generator=self.generator) >= 1 - keep
        n_copies = [n // size for n, size in zip(x.shape, shape, strict=True)]
        return mask.to(x).repeat(n_copies)


def dropping_modules(module: nn.Module) -> list[nn.Module]:
    """Return dropout layers, and modules marked because their functions drop units."""
    modules = module.modules()
    return [m for m in modules if isinstance(m, DROPOUTS) or hasattr(m, _MARK)]


@contextmanager
def drawn_mask(
    modules: nn.Module | list[nn.Module],
    generator: torch.Generator,
    n_samples: int | None = None,
) -> Iterator[SharedMasks]:
    """Drop the same units for all samples, with the network in evaluation mode.

    ``modules`` is a network, or a list of the modules that draw as in training.
    ``n_samples`` is the batch size, or None if it is the length of the first axis.
    Yield the mode, whose ``drawing`` then contains the modules that drew random
    numbers.
    """
    masks = SharedMasks(generator, n_samples)

    def enter(owner: nn.Module, inputs: Any) -> Any:
        """Note the running module; protect inputs from dropout that works in place."""
        masks.running.append(owner)
        return copied(inputs) if getattr(owner, "inplace", False) else None

    def leave(*_call: object) -> None:
        """Forget the module, whose call has ended."""
        masks.running.pop()

    with ExitStack() as stack:
        if isinstance(modules, nn.Module):
            modules = dropping_modules(modules)
        for owner in modules:  # the stack restores its mode and removes the hooks
            stack.callback(setattr, owner, "training", owner.training)
            owner.training = True
            stack.enter_context(owner.register_forward_pre_hook(enter))
            stack.enter_context(owner.register_forward_hook(leave))
        yield stack.enter_context(masks)


def mark_dropping_modules(net: NeuralNet, x: Batch) -> set[str]:
    """Mark a net's modules that draw in training mode; return the names of their types.

    A copy of the net is called twice. In the first call, all modules except batch norm
    are in training mode, and those that draw are marked. In the second call, as in
    predictions, only dropout layers and marked modules are. Raise ValueError if one of
    them then no longer draws. A mark is an attribute of the module, set on the net and
    on its copy.
    """
    forward = as_forward(copied_net(net))
    named = dict(forward.module.named_modules())
    searched = [m for m in named.values() if not isinstance(m, _FIXED)]
    with forward.frozen(), drawn_mask(searched, torch.Generator()) as masks:
        forward.returned(x)  # fills ``masks.drawing``
    drawing = {name: owner for name, owner in named.items() if owner in masks.drawing}
    for name, owner in drawing.items():
        if not isinstance(owner, DROPOUTS):  # dropout layers need no mark
            for module in (forward.module, as_forward(net).module):
                setattr(module.get_submodule(name), _MARK, True)
    with forward.frozen(), drawn_mask(forward.module, torch.Generator()) as masks:
        forward.returned(x)
    skipped = [name for name in drawing if named[name] not in masks.drawing]
    if skipped:
        raise ValueError(
            f"The network calls {listed(skipped)} only if self.training of another "
            "module is True. Call dropout layers in every forward pass; they do "
            "nothing in evaluation mode."
        )
    return {type(owner).__name__ for owner in drawing.values()}


def mc_dropout_outputs(forward: Forward, x: Batch, seeds: list[int]) -> Tensor:
    """Return the outputs (b, c, s) of a frozen network, with one mask per seed.

    There are b samples, c outputs and s seeds.
    """
    draws = []
    with torch.no_grad():
        for seed in progress.tracked(seeds, "draws", len(seeds)):
            generator = torch.Generator().manual_seed(seed)
            with drawn_mask(forward.module, generator, n_samples(x)):
                draws.append(forward(x).double())
    return torch.stack(draws, -1)


# ----------------------------------------------------------------------- estimators
@dataclass(frozen=True)
class DropoutDraws(OutputModel):
    """Outputs of a network under random dropout masks."""

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return the outputs (b, c, s), with one mask per draw."""
        generator = np.random.default_rng(self.seed)
        seeds = generator.integers(2**63, size=self.n_samples).tolist()
        return mc_dropout_outputs(forward, x, seeds)


class DropoutTrainer(Trainer):
    """Trainer of networks with dropout."""

    def new_net(self, data: TrainingData) -> Any:
        """Return the net to train, with dropout layers added to the default net."""
        net = super().new_net(data)
        return with_dropout(net) if self.estimator is None else net

    def infer_spec(
        self, net: NeuralNet, dataset: Any, *, is_trained: bool
    ) -> OutputSpec:
        """Return the output specification; raise ValueError without shared masks.

        The masks are shared if a sample has the same outputs in a batch of its own as
        within a batch of several samples, with the same seed.
        """
        spec = super().infer_spec(net, dataset, is_trained=is_trained)
        forward, x = as_forward(net), spread_rows(net, dataset)
        dropping = mark_dropping_modules(net, x)
        if not dropping:
            names = ", ".join(kind.__name__ for kind in DROPOUTS)
            raise ValueError(
                "The network calls no dropout layer with p > 0. Use one of "
                f"{names} from torch.nn."
            )
        # the last sample alone: a batch of another size, with another first sample
        order = torch.tensor([-1])
        with forward.frozen():
            first = mc_dropout_outputs(forward, x, [0])
            again = mc_dropout_outputs(forward, tree_rows(x, order), [0])
        # rounding depends on the batch size; another mask changes outputs by much more
        if not torch.allclose(first[order], again, rtol=1e-3, atol=1e-3):
            raise ValueError(
                "The network draws other random numbers for each sample in training "
                f"mode, in one of the modules {listed(dropping)}. Draw only with "
                "dropout of torch.nn or torch.nn.functional, of tensors with samples "
                "in the first axis, so that all samples share a mask."
            )
        return spec


@dataclass(eq=False, repr=False, kw_only=True)
class BaseDropout(BaseSampling):
    """Parameters and outputs of `MCDropoutClassifier` and `MCDropoutRegressor`."""

    n_samples: int = option(100, COUNT)

    _trainer_kind = DropoutTrainer

    def _output_model(self) -> OutputModel:
        return DropoutDraws(int(self.n_samples), self._seed)


@dataclass(eq=False, repr=False, kw_only=True)
class MCDropoutClassifier(BaseDropout, ProbabilisticClassifier):
    """Classifier with Monte Carlo dropout.

    Dropout stays active during prediction, and probabilities are averaged over random
    masks. This estimator is a baseline for `LaplaceClassifier`. Monte Carlo dropout
    needs no extra training, but requires a network with dropout layers. The dropout
    rates determine the variance, which does not decrease with more training samples.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network, with dropout layers. A skorch net is cloned and trained in ``fit``.
        A trained net in a ``sklearn.frozen.FrozenEstimator`` keeps its weights. If
        None, use a small network for tabular data, including data frames.
    n_samples : int, default=100
        Number of masks that predictions are averaged over. Every call uses the same
        masks.
    likelihood, class_weight, dirichlet_approx, batch_size, random_state, verbose
        As in `LaplaceClassifier`.

    Attributes
    ----------
    estimator_, classes_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : Gaussian posterior around trained weights.
    MCDropoutRegressor : For real-valued targets.

    Notes
    -----
    Prediction requires ``n_samples`` forward passes. Masks apply to layers of
    `torch.nn` such as ``Dropout`` and ``Dropout2d``, to functions such as
    `torch.nn.functional.dropout`, and within attention and recurrent layers. All
    samples (the first axis of a layer's input) share the same mask.

    References
    ----------
    Gal and Ghahramani (2016), "Dropout as a Bayesian approximation: representing model
    uncertainty in deep learning".

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import MCDropoutClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = MCDropoutClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """


@dataclass(eq=False, repr=False, kw_only=True)
class MCDropoutRegressor(BaseDropout, ProbabilisticRegressor):
    """Regressor with Monte Carlo dropout.

    The counterpart of `MCDropoutClassifier` for real-valued targets. See
    `MCDropoutClassifier` for when to use Monte Carlo dropout.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        As in `MCDropoutClassifier`.
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, in units of ``y``, for nets with
        ``MSELoss``. An array has one value per column of ``y``. ``"auto"`` chooses one
        level per column, which maximises the likelihood of held-out targets from
        ``y_val``, else from the net's ``train_split``, else from
        ``validation_fraction``. Without held-out targets (a frozen net, or fewer than
        50 distinct samples), ``"auto"`` uses the training targets.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for estimating the noise, if the net is
        trained in ``fit`` and holds out no samples itself, and if there are at least 50
        distinct samples.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`.
    n_samples : int, default=100
        Number of masks, at least two. Every call uses the same masks.
    likelihood, batch_size, random_state, verbose
        As in `LaplaceRegressor`.

    Attributes
    ----------
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use, or 1 for criteria without
        noise.
    estimator_, sigma_scaling_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceRegressor`.

    See Also
    --------
    LaplaceRegressor : Gaussian posterior around trained weights.
    MCDropoutClassifier : For class labels.

    Notes
    -----
    Prediction requires ``n_samples`` forward passes. Masks apply to layers of
    `torch.nn` such as ``Dropout`` and ``Dropout2d``, to functions such as
    `torch.nn.functional.dropout`, and within attention and recurrent layers. All
    samples (the first axis of a layer's input) share the same mask.

    References
    ----------
    Gal and Ghahramani (2016), "Dropout as a Bayesian approximation: representing model
    uncertainty in deep learning".

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import MCDropoutRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = MCDropoutRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """
