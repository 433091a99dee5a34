"""LaplaceRanker: scores of items, learned from pairwise preferences.

The Bradley-Terry model is ``P(second is preferred) = sigmoid(s(second) - s(first))``,
with a network ``s`` that scores single items. The Laplace approximation treats the
model as a classifier of pairs. Under the posterior, the scores of the linearised
network have a Gaussian distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_array, check_is_fitted
from skorch import NeuralNet
from torch import Tensor, nn

from sklaplace.core.checks import check_arrays, naming
from sklaplace.core.trees import Batch, Inputs, leaves, mapped
from sklaplace.curvature.network import NetworkSpec
from sklaplace.data.arrays import as_array, detached
from sklaplace.data.dataset import TrainingData, as_given, first_rows, is_opaque
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.predicting import latent
from sklaplace.estimators.targets.classes import ClassTargets
from sklaplace.estimators.targets.label_types import SingleLabel
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.likelihoods import Bernoulli
from sklaplace.networks.default import Size, penalised_classifier, require_array
from sklaplace.networks.forward import Forward, first_tensor
from sklaplace.networks.outputs import as_forward, raw_outputs
from sklaplace.networks.tabular import TabularNetwork

# Allowed relative rounding error between a logit and the difference of two scores.
# Larger logits than the limit are not compared: probabilities round them too much.
_ROUNDING, _COARSE = 1e-3, 10.0


class BradleyTerry(nn.Module):
    """Module that returns the score difference of two items.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    scorer : nn.Module
        Module that maps items (b, ...) to one score each, (b,) or (b, 1). The output is
        a tensor, or an object with an attribute ``logits``, like the output of reward
        models in ``transformers``. Omit the bias of the last layer: the bias cancels in
        every difference and cannot be learned.

    Raises
    ------
    TypeError
        If the scorer is not a module.

    See Also
    --------
    LaplaceRanker : Fits the module.

    References
    ----------
    Bradley and Terry (1952), "Rank analysis of incomplete block designs: I. The method
    of paired comparisons", Biometrika 39.

    Examples
    --------
    >>> import torch
    >>> from sklaplace import BradleyTerry
    >>> module = BradleyTerry(torch.nn.Linear(3, 1, bias=False))
    >>> module(torch.ones(5, 2, 3)).flatten().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        if not isinstance(scorer, nn.Module):
            raise TypeError(
                f"scorer is a {type(scorer).__name__}. Pass a torch.nn.Module that "
                "returns one score per item, such as torch.nn.Linear(3, 1, bias=False)."
            )
        self.scorer = scorer

    def forward(self, X: Inputs | None = None, **named: object) -> Tensor:
        """Return the second item's score minus the first's, or a single item's score.

        Parameters
        ----------
        X : Tensor of shape (b, 2, ...) or (b, 1, ...)
            Pairs of items, or single items.
        **named : Tensor of shape (b, 2, ...) or (b, 1, ...)
            Named inputs of the scorer, instead of ``X`` or in addition to it. skorch
            passes the entries of a dict as named inputs.

        Returns
        -------
        Tensor of shape (b, 1)
            Logits of pairs, or scores of single items.

        Raises
        ------
        ValueError
            If ``X`` has a different shape, or if the scorer does not return one number
            per item.

        See Also
        --------
        LaplaceRanker.predict_score : Scores with their uncertainty.

        Examples
        --------
        >>> import torch
        >>> from sklaplace import BradleyTerry
        >>> module = BradleyTerry(torch.nn.Identity())
        >>> module(torch.tensor([[[1.0], [3.0]]]))  # 3 - 1
        tensor([[2.]])
        """
        # skorch passes an entry of a dict that is called X as the first argument
        if named and X is not None:
            named["X"] = X
        samples = named or X
        sizes = _n_items(samples)  # a set: all arrays must have the same size
        if sizes not in ({1}, {2}):
            shapes = [str(tuple(leaf.shape[1:])) for leaf in leaves(samples)]
            raise ValueError(
                f"samples of shape {', '.join(shapes)} are neither pairs (2, ...) nor "
                "single items (1, ...)"
            )
        # one call per item, so that layers see one position per item
        scores = [self._score(_item(samples, k)) for k in range(max(sizes))]
        # the sign: a positive logit means that the second item is preferred
        return scores[-1] - scores[0] if len(scores) == 2 else scores[0]

    def _score(self, item: Any) -> Tensor:
        """Return the scores (b, 1) of one item per pair.

        ``item`` is a tensor (b, ...), or a dict of tensors, which are named arguments
        of the scorer. Of several outputs, the first is the score.
        """
        is_named = isinstance(item, dict)
        score = first_tensor(self.scorer(**item) if is_named else self.scorer(item))
        if score.numel() != len(next(leaves(item))):
            raise ValueError(
                f"the scorer returns shape {tuple(score.shape[1:])} per item, but must "
                "return one number"
            )
        return score.reshape(-1, 1)


def _n_items(samples: object) -> set[int]:
    """Return the sizes of the arrays' second axes, or zero for a missing axis."""
    return {leaf.shape[1] if np.ndim(leaf) > 1 else 0 for leaf in leaves(samples)}


def _item(samples: object, k: int | slice) -> Any:
    """Return the k-th item of each pair, (b, ...), or a slice, (b, 1, ...)."""
    return mapped(lambda leaf: leaf[:, k], samples)


class PairNetwork(BradleyTerry):
    """Module of the default net: a `TabularNetwork` that scores items.

    Parameters
    ----------
    **constants
        Parameters of `TabularNetwork`.
    """

    def __init__(self, **constants: Any) -> None:
        scorer = TabularNetwork(**constants)
        scorer.head.register_parameter("bias", None)
        super().__init__(scorer)

    def scaled_inputs(self, X: Tensor) -> Tensor:
        """Return the scorer's scaled inputs of the items, (b, 2, n_features + m)."""
        items = X.reshape(len(X) * X.shape[1], -1)
        z = cast(TabularNetwork, self.scorer).scaled_inputs(items)
        return z.reshape(*X.shape[:2], -1)

    def _score(self, item: Any) -> Tensor:
        return super()._score(
            mapped(lambda values: values.reshape(len(values), -1), item)
        )

    def squared_norm(self) -> Tensor:
        """Return the sum of squares of all weights, ()."""
        return cast(TabularNetwork, self.scorer).squared_norm()


class PairTargets(ClassTargets):
    """Labels of pairs; the larger label means that the second item was preferred."""

    likelihoods = (Bernoulli,)
    example_net = (
        "skorch.NeuralNetBinaryClassifier(sklaplace.BradleyTerry, "
        "module__scorer={}(...), criterion=torch.nn.BCEWithLogitsLoss)"
    )

    @classmethod
    def infer(cls, y: ArrayLike, *args: Any, **options: Any) -> "PairTargets":
        """Return the two labels of pairs; raise ValueError for other targets."""
        targets = super().infer(y, *args, **options)
        classes = targets.classes
        if targets.target_type != SingleLabel() or len(classes) != 2:
            raise ValueError(
                f"y has shape {np.shape(y)} and the labels {classes[:5].tolist()}. "
                "Pass one of two labels per pair; the larger means that the second "
                "item was preferred. For one-hot labels, pass y.argmax(axis=1)."
            )
        return cast(PairTargets, targets)

    @property
    def dtype(self) -> type:
        """Dtype of the codes for the binary cross-entropy of logits."""
        return np.float32

    def default_net(self, data: TrainingData, size: Size) -> Any:
        """Return the default skorch net, which scores items by their features.

        The items of all pairs, each labelled by whether it was preferred, determine the
        scales of the inputs and the strength of the penalty.
        """
        items = require_array(data.X).reshape(2 * len(data.y), -1)
        # one row per item, in the order of ``items``: the first and the second item of
        # the first pair, and so on; y is one if the second was preferred
        preferred = np.stack([1 - data.y, data.y], 1).reshape(-1, 1)
        w = None if data.sample_weight is None else np.repeat(data.sample_weight, 2)
        return penalised_classifier(
            TrainingData(items, preferred, w),
            size,
            nn.BCEWithLogitsLoss,
            factor=2.0,  # each pair counts once but has two items
            module=PairNetwork,
        )


class PairTrainer(LaplaceTrainer):
    """Trainer of networks whose logit is a difference of two scores."""

    def infer_spec(self, net: NeuralNet, dataset: Any, **options: Any) -> NetworkSpec:
        """Return the specification; raise an error if the logit is not a difference.

        `_check_difference` compares the logits of a few pairs with scores of their
        items.
        """
        spec = super().infer_spec(net, dataset, **options)
        forward = as_forward(net, spec)
        with forward.frozen():
            _check_difference(net, forward, first_rows(net, dataset))
        return spec


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceRanker(LaplaceClassifier):
    """Item scores with uncertainty, learned from pairwise preferences.

    This estimator is a `LaplaceClassifier` of pairs that also predicts the scores of
    single items. Use this estimator if the data are comparisons (which answer is
    better, who won) rather than ratings of single items.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. The module of the net is a `BradleyTerry` with a scorer, or another
        module that accepts inputs of shape (b, 2, ...) and (b, 1, ...). If None, use a
        small network for tabular data.
    subset_of_weights : str or list of str, default="all"
        Weights with a posterior, as in `LaplaceClassifier`.
    hessian_structure : str, default="full"
        Structure of the Hessian approximation, as in `LaplaceClassifier`; see Notes
        for ``"kron"``.
    prior_precision : float, array or {"auto", "validation", "marglik"}, \
            default="marglik"
        Inverse prior variance of the weights, or the name of its tuner, as in
        `LaplaceClassifier`.
    likelihood, subset_params, structure_params, curvature, curvature_params, \
            prior_structure, prior_mean, prior, refine, temperature, class_weight, \
            validation_fraction, pred_type, link_approx, dirichlet_approx, \
            n_samples, batch_size, n_jobs, memory, random_state, verbose
        As in `LaplaceClassifier`.
    residual : "none"
        Residuals are not supported, because they are not differences of two scores.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
        Labels. The first label means that the first item was preferred.
    estimator_, posterior_, n_iter_, prior_precision_, temperature_, \
            log_marginal_likelihood_value_
        As in `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : For labels of single items.

    Notes
    -----
    The scorer is called twice per pair, so ``refine="auto"`` does not refit any
    weights. ``refine=True`` refits all selected weights.

    The defaults differ from those of `LaplaceClassifier` to improve the scores. The
    prior precision maximises the evidence of all pairs, because held-out labels contain
    little information about the variance of a score. The memory for the full covariance
    is quadratic in the number of weights, so ``fit`` raises an error for networks that
    are too large. ``"kron"`` ignores that the scores of the two items of a pair have
    opposite signs in the difference. With ``"kron"``, the standard deviations of single
    scores are too small, by factors of two to three in our measurements.

    References
    ----------
    Bradley and Terry (1952), "Rank analysis of incomplete block designs: I. The method
    of paired comparisons", Biometrika 39.

    Examples
    --------
    >>> import numpy as np
    >>> from sklaplace import LaplaceRanker
    >>> rng = np.random.default_rng(0)
    >>> pairs = rng.normal(size=(200, 2, 3))
    >>> y = pairs[:, 1].sum(1) > pairs[:, 0].sum(1)  # the larger sum is preferred
    >>> ranker = LaplaceRanker(random_state=0).fit(pairs, y)
    >>> scores, std = ranker.predict_score(pairs[:, 0], return_std=True)
    >>> bool(np.corrcoef(scores, pairs[:, 0].sum(1))[0, 1] > 0.9)
    True
    """

    subset_of_weights: str | list[str] = "all"
    hessian_structure: str = "full"
    prior_precision: Any = "marglik"
    residual: Any = "none"

    _targets_kind = PairTargets

    def _check_options(self) -> LaplaceOptions:
        """Return the options; raise an error for options that pairs do not support."""
        options = super()._check_options()
        self._check_settings()  # also before training, not only in predictions
        if options.structure_params.get("weight_sharing") == "reduce":
            raise ValueError(
                "structure_params={'weight_sharing': 'reduce'} adds the gradients of "
                "a pair's items, which have opposite signs. Use 'expand', or "
                "hessian_structure='full'."
            )
        return options

    def _check_settings(self) -> None:
        """Raise an error for invalid parameters, and for a residual."""
        super()._check_settings()
        if self.residual != "none":  # it is not a difference of two scores
            raise ValueError(
                f"residual={self.residual!r} cannot be used for pairs. Use "
                "residual='none'."
            )

    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        return PairTrainer(**vars(super()._trainer(options)))

    # ----------------------------------------------------------------------- samples
    def _check_samples(
        self, X: Inputs, y: ArrayLike, *, reset: bool
    ) -> tuple[Any, Any]:
        """Return validated pairs and labels; all items must have the same shape."""
        _check_pairs(X)  # before other messages, which do not mention pairs
        pairs, y = super()._check_samples(X, y, reset=reset)
        if reset:  # a dataset or dict does not show its items
            self._item_shape = None if is_opaque(pairs) else pairs.shape[2:]
        self._check_item_shape("X", pairs)
        return pairs, y

    def _check_inputs(self, X: Inputs) -> Any:
        """Return validated pairs for prediction."""
        _check_pairs(X)
        pairs = super()._check_inputs(X)
        self._check_item_shape("X", pairs)
        return pairs

    def _check_item_shape(self, name: str, pairs: Any) -> None:
        """Raise ValueError if items have another shape than in ``fit``.

        ``pairs`` has shape (n, 2, ...), or (n, 1, ...) for single items.
        """
        # the items of a dataset or dict are unknown, in fit or here
        if self._item_shape is None or is_opaque(pairs):
            return
        if pairs.shape[2:] != self._item_shape:
            raise ValueError(
                f"{name} has items of shape {pairs.shape[2:]}, but items in fit have "
                f"{self._item_shape}."
            )

    @naming(items="items")
    def predict_score(
        self, items: object, return_std: bool = False, return_cov: bool = False
    ) -> Any:
        """Predict scores of single items; their differences are the logits of pairs.

        Parameters
        ----------
        items : array-like of shape (n, ...) or dict of arrays
            Items, each with the shape of one item of a pair.
        return_std : bool, default=False
            Whether to also return standard deviations.
        return_cov : bool, default=False
            Whether to also return the joint covariance of all scores.

        Returns
        -------
        mean : ndarray of shape (n,)
            Posterior means, in nats. Pairs determine only differences of scores. The
            constant that all scores have in common depends on the network and the
            prior.
        std : ndarray of shape (n,)
            Posterior standard deviations, in nats; only if ``return_std``. The standard
            deviations include the uncertainty of the constant that all scores have in
            common. For standard deviations of differences, use the covariance.
        cov : ndarray of shape (n, n)
            Joint posterior covariance; only if ``return_cov``.

        Raises
        ------
        ValueError
            If both ``return_std`` and ``return_cov`` are True, or if the shape of items
            differs from that in ``fit``.
        NotFittedError
            If called before ``fit``.

        See Also
        --------
        predict_proba : Probability that the first or second item is preferred.

        Notes
        -----
        The network is linearised at the trained weights, as in `predict_proba`. The
        memory for the covariance is proportional to n times the number of selected
        weights.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace import LaplaceRanker
        >>> rng = np.random.default_rng(0)
        >>> pairs = rng.normal(size=(50, 2, 3))
        >>> y = pairs[:, 1].sum(1) > pairs[:, 0].sum(1)
        >>> ranker = LaplaceRanker(random_state=0).fit(pairs, y)
        >>> low, high = ranker.predict_score([[-1, -1, -1], [1, 1, 1]])
        >>> bool(low < high)
        True
        """
        check_is_fitted(self)
        latent.check_one(return_std=return_std, return_cov=return_cov)
        single_items = self._single_items(items)
        if return_cov:
            mean, cov = self._outputs().joint(single_items)
            return mean[:, 0], cov[..., 0]
        mean, variance = self._outputs().latent(single_items)
        if return_std:
            return mean[:, 0], np.sqrt(np.maximum(variance[:, 0], 0))
        return mean[:, 0]

    def _single_items(self, items: object) -> Any:
        """Return validated items (n, ...) in the network's shape (n, 1, ...)."""
        check_arrays(items=items)
        if isinstance(items, Mapping):
            items = as_given(items, self._input_type.dtype)
            # the parent's check, because the check of this class accepts only pairs;
            # an axis of length one marks single items
            return super()._check_inputs(mapped(lambda leaf: leaf[:, None], items))
        # no check of axes or finite numbers here: items can have any axes, and `inputs`
        # below checks the numbers after casting them
        options: dict[str, Any] = {"ensure_2d": False, "ensure_all_finite": False}
        array = check_array(detached(items), dtype=None, allow_nd=True, **options)
        single_items = array[:, None]
        self._check_item_shape("items", single_items)
        return self._input_type.inputs(single_items, "items")

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of a classifier with two classes."""
        tags = super().__sklearn_tags__()
        # the items are an axis of X, which sparse matrices lack
        tags.classifier_tags.multi_label = False
        tags.input_tags.sparse = False
        tags.classifier_tags.multi_class = False
        return tags


def _check_pairs(X: Inputs) -> None:
    """Raise ValueError if arrays do not contain pairs, which need a second axis of two.

    ``X`` is an array, a list, a dict of arrays, or a dataset.
    """
    if is_opaque(X) and not isinstance(X, Mapping):  # a dataset: its shape is unknown
        return
    arrays = as_array(X, "X") if isinstance(X, list | tuple) else X
    if _n_items(arrays) != {2}:
        shapes = mapped(np.shape, arrays)
        raise ValueError(
            f"X has shape {shapes}, but pairs of items have shape (n, 2, ...). Stack "
            "the first and the second items along axis 1."
        )


def _check_difference(net: NeuralNet, forward: Forward, x: Batch) -> None:
    """Raise ValueError if a pair's logit is not the difference of two scores.

    The network is applied to single items of a batch ``x`` of pairs, and to the pairs.
    Differences within rounding errors are accepted, and so are batches of other types.
    ``net`` only raises errors here; ``forward`` is its function in evaluation mode.
    """
    if not all(isinstance(leaf, Tensor) for leaf in leaves(x)) or _n_items(x) != {2}:
        return
    message = (
        "The network {}, so it has no scores of single items. Wrap the scorer in "
        "BradleyTerry, which returns the difference of two scores."
    )
    # first and second items, each of shape (b, 1, ...)
    singles = [_item(x, slice(k, k + 1)) for k in (0, 1)]
    try:
        for item in singles:
            raw_outputs(net, item)  # only raises if the network rejects single items
    except ValueError as error:
        raise ValueError(message.format("accepts only pairs")) from error
    with torch.no_grad():
        first, second, logit = (forward(rows).double() for rows in (*singles, x))
    deviation = (logit - (second - first)).abs()
    # rounding errors are proportional to the size of the numbers; 1e-6 accepts
    # deviations of numbers that are almost zero
    size = first.abs() + second.abs() + logit.abs()
    # logits computed from probabilities are inaccurate if large
    is_compared = size < (_COARSE if forward.output_map == "logit" else torch.inf)
    if bool((deviation > _ROUNDING * size + 1e-6)[is_compared].any()):
        reason = "has logits of pairs that differ from the difference of scores"
        raise ValueError(message.format(reason))
