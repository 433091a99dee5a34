"""LaplaceClassifier: class probabilities under a posterior over the weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sklaplace.core.trees import Inputs
from sklaplace.data.arrays import as_array
from sklaplace.dirichlet.links import LINKS, Link, choose_link
from sklaplace.estimators.laplace import BaseLaplace
from sklaplace.estimators.options.constraints import keys_and, one_of, option
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.predicting.closed_forms import Classes
from sklaplace.estimators.predicting.output_model import unchanged
from sklaplace.estimators.predicting.predictive_module import PredictiveModule
from sklaplace.estimators.probabilistic_classifier import (
    ProbabilisticClassifier,
    Reduction,
    normals,
)
from sklaplace.estimators.targets.classes import is_ignored, normalised
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.samples import Samples
from sklaplace.likelihoods import ClassificationLikelihood
from sklaplace.posterior.tuning.problem import HeldOutScore


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceClassifier(BaseLaplace, ProbabilisticClassifier):
    """Laplace approximation of a skorch classifier.

    The posterior over some or all of the network's weights is a Gaussian around their
    trained values. Class probabilities are averaged over the posterior, which makes
    them less confident far from the training data. Prefer this estimator to the plain
    network if overconfident predictions are costly. Its accuracy is about the same as
    that of the plain network.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``. A trained net in a
        ``sklearn.frozen.FrozenEstimator`` keeps its weights. If None, use a small
        network for tabular data, including data frames; see :doc:`/user_guide/tables`.
    likelihood : object or None, default=None
        Likelihood of the targets given the outputs, for criteria without a built-in
        likelihood; see `sklaplace.likelihoods`. If None, use the likelihood of the
        criterion.
    subset_of_weights : {"last_layer", "all", "trainable", "subnetwork"} or list of \
            str, default="last_layer"
        Weights with a posterior: the last layer or layers, all weights, all weights
        that require gradients, individually selected weights, or parameters and modules
        by name; see :ref:`subset`.
    subset_params : dict, default=None
        Options of ``"subnetwork"``: either ``n_weights`` (100) and ``by``, the score
        that selects the weights after training (``"magnitude"``, ``"swag"``,
        ``"variance"`` or ``"random"``), or ``indices`` of weights in the flattened
        network. The options of ``"swag"`` are described in the :ref:`User Guide
        <subset>`.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Structure of the Hessian approximation; see :ref:`structure`. The memory for
        ``full`` is quadratic in the number of weights.
    structure_params : dict, default=None
        Options of the structure. ``kron`` accepts ``weight_sharing`` (``"expand"`` or
        ``"reduce"``). ``lowrank`` accepts ``rank`` (100), the number of eigenvectors,
        and ``tolerance`` (1e-12), the smallest eigenvalue to keep, relative to the
        largest. ``gp``, ``nystrom`` and ``variational`` accept ``n_points`` (100), the
        number of inducing points.
    curvature : {"ggn", "ggn_mc", "ef", "hessian", "identity"}, default="ggn"
        Approximation of the Hessian: the generalised Gauss-Newton matrix (GGN), a Monte
        Carlo estimate of the GGN, the empirical Fisher matrix, the exact Hessian (only
        for ``full`` and small networks), or ``JᵀJ`` with the Jacobian ``J``; see
        :ref:`curvature`.
    curvature_params : dict, default=None
        Options of the curvature. ``ggn_mc`` accepts ``n_draws`` (10), the number of
        draws.
    prior_precision : float, array or {"auto", "validation", "marglik"}, default="auto"
        Inverse prior variance of the weights. ``"marglik"`` maximises the marginal
        likelihood of the training data. ``"validation"`` maximises the score of
        held-out samples. ``"auto"`` also uses held-out samples. Without held-out
        samples, ``"auto"`` preserves the network's own predictions near the data, and
        issues a warning. With few samples or the default network, ``"auto"`` trains one
        network per cross-validation fold; see :ref:`validation-samples`.
    prior_structure : {"scalar", "layerwise", "diag"} or list of str, default="scalar"
        One precision for all weights, one per parameter tensor (not for ``nystrom`` and
        ``variational``), or one per weight (only for ``full``, ``lowrank`` and
        ``diag``). With a list of module or parameter names, there is one precision per
        name; see :ref:`prior-structure`.
    prior_mean : float or array of shape (P,), default=0.0
        Prior mean of the weights.
    prior : GaussianPosterior, array of shape (P, P) or None, default=None
        ``posterior_`` of an estimator fitted to an earlier task, whose network has the
        same layers; see :ref:`prior-task`. This posterior replaces ``prior_precision``,
        ``prior_structure`` and ``prior_mean``, which must have their default values. No
        hyperparameters are tuned. Not available for ``gp`` and ``lowrank``. An array is
        interpreted as a prior precision matrix, and requires
        ``hessian_structure="full"``.
    refine : bool or "auto", default="auto"
        Whether to refit the weights to the maximum a posteriori estimate of the
        linearised network; see :ref:`refine`. Only predictions use the refitted
        weights. With ``"auto"``, held-out samples decide whether to refit a last layer,
        for every ``prior_precision``. Without held-out samples, only ``"marglik"``
        refits. ``"auto"`` means False with ``prior``, if weights outside the last layer
        are selected, or if the loss is not convex in the outputs. True requires a
        convex loss, no ``prior``, and ``pred_type="glm"`` for weights outside the last
        layer.
    residual : float or {"auto", "none"}, default="auto"
        Variance s² of a Gaussian process that is added to the logits; see the
        :ref:`User Guide <far>`. At x, the variance is s² (0.05 / p(x))ᵃ, where p(x) is
        the share of samples from the data's distribution that are less similar to the
        training samples than x. For p(x) > 0.05, a is 2; otherwise, held-out samples
        choose a (``residual_steepness_``). ``"auto"`` means 0.5, or ``"none"`` with
        ``prior``. The residual requires a network with features.
    temperature : float, default=1.0
        Divisor of the log-likelihood in the posterior. Values below one sharpen the
        posterior.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for tuning, if the net is trained in ``fit``
        and holds out no samples itself, and if there are at least 50 distinct samples.
        ``prior_precision="auto"`` holds out samples only if you pass your own net and
        at least 100 samples, and uses cross-validation otherwise.
    pred_type : {"glm", "nn"}, default="glm"
        Whether to predict with the linearised network (``"glm"``), or with the network
        under ``n_samples`` draws of the weights (``"nn"``). Tuning always uses
        ``"glm"``.
    n_samples : int, default=100
        Number of draws for ``link_approx="mc"``, for ``predict_uncertainty(X, "mc")``
        and for ``pred_type="nn"``.
    batch_size : int or None, default=None
        Number of samples per batch for curvature and prediction. If None, limit batches
        to a fixed memory budget. Results do not depend on the batch size.
    n_jobs : int or None, default=None
        Number of joblib workers, each with one thread; see :doc:`/large_data`. If None,
        compute in the current process, with all of torch's threads, or with one thread
        for the default network. If -1, use one worker per core. Results are bitwise
        identical for all numbers of workers, including 1, and for all joblib backends.
    memory : None, str, path or joblib.Memory, default=None
        Cache of the trained network and its curvature, for grid searches that train
        only once per fold; see :ref:`memory`. Requires a ``random_state``. If you edit
        a function that the module calls, clear the folder. As with pickle, loading can
        run arbitrary code: use a folder that only you can write to.
    random_state : int, RandomState or None, default=None
        Seed for training, held-out samples and draws. With None, results differ between
        fits. The global random generators do not change.
    verbose : int, default=0
        Verbosity level. 0 prints nothing. 1 prints the phases of a fit with their
        times, the chosen values, and a note if an initialised net is trained again. 2
        adds progress bars for long loops, if tqdm is installed.
    class_weight : dict, "balanced" or None, default=None
        Class weights by label, which multiply ``sample_weight``, also for held-out
        samples. ``"balanced"`` assigns the same total weight to each class.
    link_approx : {"auto", "mean_field", "mc", "gumbel", "probit", \
            "probit_uncentred", "sodpp", "bridge", "bridge_norm"}, default="auto"
        Link approximation: the approximation of the class probabilities under Gaussian
        logits; see :ref:`link`. ``"auto"`` follows
        `sklaplace.dirichlet.links.choose_link`.
    dirichlet_approx : {"projection", "bridge", "bridge_norm", \
            "bridge_norm_published", "bridge_conditioned", \
            "bridge_norm_conditioned"}, default="projection"
        Dirichlet approximation of the distribution over class probabilities: the
        closest Dirichlet in Kullback-Leibler divergence, or a variant of the Laplace
        bridge; see :ref:`dirichlet`.

    Attributes
    ----------
    estimator_ : skorch net
        The trained network, or a copy of the frozen network.
    posterior_ : GaussianPosterior
        Gaussian over the selected weights.
    classes_ : ndarray of shape (K,)
        Class labels, or column indices for a matrix of labels.
    n_features_in_ : int
        Number of features (size of the second axis); only for arrays.
    feature_names_in_ : ndarray of str
        Column names; only for data frames with string columns.
    n_iter_ : int
        Number of training epochs of the network.
    prior_precision_ : float or ndarray
        Prior precision in use. A given ``prior`` is stored in ``posterior_.earlier``.
    residual_steepness_ : float
        Power a of the residual's variance: the largest of 0.5, 0.75, ..., 2 whose
        log-likelihood of the held-out samples is at most 0.0025 nats per sample below
        the best, or with fewer than 100 samples, at most 0.25 nats in total. Without
        held-out samples, a is 2.
    temperature_ : float
        Temperature in use, which differs from ``temperature`` only after `tune`.
    log_marginal_likelihood_value_ : float
        Laplace approximation of the log marginal likelihood, in nats.

    See Also
    --------
    LaplaceClassifierCV : Chooses the prior precision by cross-validation.
    LaplaceRegressor : Laplace approximation of a skorch regressor.

    Notes
    -----
    The linearised predictive distribution follows Immer, Korzepa and Bauer (2021); the
    Kronecker-factored structure, Ritter, Botev and Barber (2018); the last-layer
    approximation, Kristiadi, Hein and Hennig (2020); and the evidence, MacKay (1992).
    Antorán et al. (2022) explain why the last layer must be refitted before its
    evidence is used.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LaplaceClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    >>> bool(model.score(X, y) > 0.9)
    True

    With your own network:

    >>> import torch
    >>> from skorch import NeuralNetClassifier
    >>> net = NeuralNetClassifier(
    ...     torch.nn.Linear, module__in_features=4, module__out_features=3,
    ...     criterion=torch.nn.CrossEntropyLoss, lr=0.1, verbose=0,
    ... )
    >>> LaplaceClassifier(net, random_state=0).fit(X, y).predict(X[:2])
    array([0, 0])
    """

    link_approx: str = option("auto", one_of(keys_and(LINKS, "auto")))

    # whether scores of held-out samples use a faster link in single precision
    _tunes_in_single: ClassVar[bool] = True

    # --------------------------------------------------------------------- fit
    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        """Return the trainer; covariances of the outputs must fit into memory.

        Only linearised predictions use covariances, and only with some links.
        """
        is_linearised = options.pred_type == "glm"
        needed = is_linearised and not self._needs_variances_only(self._link().diagonal)
        return replace(super()._trainer(options), takes_covariances=needed)

    def _score(
        self, likelihood: ClassificationLikelihood, *, is_given: bool
    ) -> HeldOutScore:
        """Return the log loss of the link's probabilities on held-out samples.

        Tuning evaluates the score many times, so it can use a faster link in single
        precision (``link.score``). The link approximates the expected softmax of
        Gaussian logits. ``is_given`` states that the user passed the samples.
        """
        link = self._link()
        return HeldOutScore(
            partial(
                _log_proba,
                likelihood,
                link.score if self._tunes_in_single else link.function,
                self._points(link),
            ),
            diagonal=self._needs_variances_only(link.diagonal),
            is_centred=link.centred,  # without the mean over logits
            is_given=is_given,
            is_cheap=link.cheap,
        )

    def partial_fit(
        self,
        X: Inputs,
        y: ArrayLike,
        classes: Any = None,
        sample_weight: ArrayLike | None = None,
    ) -> "LaplaceClassifier":
        """Add samples to the posterior; the network keeps its weights.

        The result is the same as that of a single fit to all samples, in any order,
        with the same network weights, prior and temperature. Before the first fit, this
        method is equivalent to ``fit``.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            New samples.
        y : array-like of shape (n,)
            Labels of the new samples, which must be among the classes from ``fit``.
        classes : array-like of shape (K,), optional
            All classes, including those that appear only in later calls. Required in
            the first call if ``y`` does not contain all classes.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights, as in ``fit``.

        Returns
        -------
        object
            The estimator.

        Raises
        ------
        ValueError
            If a label is not one of the classes. The estimator is then unchanged.

        See Also
        --------
        fit : Also trains the network.
        tune : Tunes prior and noise again.

        Notes
        -----
        This method requires one pass over the new samples. Neither the prior nor the
        noise is tuned again, and the network is not retrained. scikit-learn's
        ``learning_curve(exploit_incremental_learning=True)`` calls this method, so its
        learning curve is flat.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(prior_precision=1.0).fit(X[::2], y[::2])
        >>> model.partial_fit(X[1::2], y[1::2]).classes_
        array([0, 1, 2])
        """
        if classes is not None:
            classes = np.unique(classes)
            self._check_classes(classes, y)
        if not hasattr(self, "posterior_"):
            with self._reported():
                return self._fit(Samples(X, y, sample_weight, classes=classes))
        # there is nothing to add if the criterion ignores all labels
        if not self._targets.is_ignored(as_array(y, "y")).all():
            self._add_samples(X, y, sample_weight)
        return self

    def _check_classes(self, classes: np.ndarray, y: ArrayLike) -> None:
        """Raise ValueError if ``classes`` has changed, or if it lacks some labels.

        ``classes`` is sorted. Labels that the criterion ignores need no class.
        """
        fitted = getattr(self, "classes_", classes)  # the same in the first call
        if not np.array_equal(fitted, classes):
            raise ValueError(
                f"classes={classes.tolist()} differ from the classes of the first "
                f"call, {fitted.tolist()}. Omit classes, or fit again."
            )
        labels = np.asarray(y)
        ignored = is_ignored(labels, inner_net(self.estimator), classes)
        unknown = np.setdiff1d(labels[~ignored], classes)
        if len(unknown):
            raise ValueError(
                f"y has labels that are not in classes: {unknown[:5].tolist()}. Add "
                "them to classes."
            )

    # ----------------------------------------------------------------- predict
    def to_module(self) -> PredictiveModule:
        """Return a torch module that predicts without the estimator.

        ``torch.export`` and ``torch.onnx.export`` write the module to files that can be
        loaded without this package.

        Read more in :doc:`/user_guide/deployment`.

        Returns
        -------
        torch.nn.Module
            Differentiable module on the network's device. Its computations are in
            float64 from the last layer on. For b samples, the module returns the mean
            and variance of `latent_mean_and_variance`, (b, K), and the probabilities of
            `predict_proba`.

        Raises
        ------
        ValueError
            If the predictions have no closed form. A closed form requires a posterior
            over a last Linear layer without parametrisations, a net without its own
            ``infer`` method, ``pred_type="glm"``, and a link other than ``"gumbel"``
            (the default for more than 16 classes).

        See Also
        --------
        predictive : Joint covariances with gradients, for all weights.

        Examples
        --------
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(prior_precision=1.0, random_state=0).fit(X, y)
        >>> mean, variance, proba = model.to_module()(torch.from_numpy(X[:3]))
        >>> proba.shape
        torch.Size([3, 3])
        """
        outputs, link = self._outputs(), self._link()
        # the link's probabilities as a function that torch can export
        if link.exported is None:
            names = [name for name, each in LINKS.items() if each.exported]
            raise ValueError(
                f"link_approx={self._link_name()!r} has no closed form. Set one of "
                f"{', '.join(names)} with set_params; no new fit is needed."
            )
        # the points of the link (draws of standard normal numbers, or none) depend only
        # on the shape and dtype of the logits, so zeros serve as mean and covariance
        zeros = torch.zeros(1, self.network_spec_.n_outputs, dtype=torch.float64)
        logits, _ = self._likelihood.class_logits(zeros, zeros)
        points = self._points(link)(logits)
        return PredictiveModule.of(
            outputs,
            Classes(
                self._likelihood,
                link.exported,
                points,
                self._targets.target_type,
                self._targets.n_classes,
            ),
            n_inputs=getattr(self, "n_features_in_", 0),
            diagonal=self._needs_variances_only(link.diagonal),
            is_centred=self._centres(link),
        )

    def _map_proba(self, X: Inputs, reduce: Reduction = unchanged) -> np.ndarray:
        """Return probabilities under Gaussian logits, or averaged over draws.

        The link is the approximation that converts Gaussian logits to probabilities.
        ``reduce`` is applied to the probabilities of each batch.
        """
        # other output models have draws, whose probabilities the parent averages
        outputs = self._outputs()
        if not outputs.model.is_gaussian:
            return super()._map_proba(X, reduce)
        link, n_classes = self._link(), self._targets.n_classes
        of_logits = partial(
            _reduced_proba, link.function, self._points(link), n_classes, reduce
        )
        return self._map_logits(outputs, X, of_logits, link)

    def _points(self, link: Link) -> Callable[[Tensor], Tensor]:
        """Return the function from logits (b, K) to the points (s, K) of a link."""
        # scrambling takes time: create points only for links that use them
        if link.draws:
            return partial(normals, self.n_samples, self._seed)
        return no_points

    def _link(self) -> Link:
        return LINKS[self._link_name()]

    def _link_name(self) -> str:
        """Return the name of the link in use, which can be changed after ``fit``."""
        if self.link_approx == "auto":
            return choose_link(self._targets.n_classes, self.n_samples)
        return self.link_approx


Points = Callable[[Tensor], Tensor]


def no_points(like: Tensor) -> Tensor:
    """Return no points, (0, K), for links that use no draws."""
    return like[:0]


def _log_proba(
    likelihood: ClassificationLikelihood,
    link: Callable[[Tensor, Tensor, Tensor], Tensor],
    points: Points,
    mean: Tensor,
    cov: Tensor,
) -> Tensor:
    """Return finite log probabilities (b, K) for Gaussian outputs, for tuning.

    The link maps the moments of the logits, and its ``points``, to probabilities.
    """
    mean, cov = likelihood.class_logits(mean, cov)
    proba = link(mean, cov, points(mean))
    return proba.clamp(min=torch.finfo(torch.float64).tiny).log()


def _reduced_proba(
    link: Callable[[Tensor, Tensor, Tensor], Tensor],
    points: Points,
    n_classes: int,
    reduce: Reduction,
    mean: Tensor,
    cov: Tensor,
) -> Tensor:
    """Return ``reduce`` of the link's probabilities (b, K) for Gaussian logits."""
    return reduce(normalised(link(mean, cov, points(mean)), n_classes))
