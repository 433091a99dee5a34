"""LaplaceClassifier: class probabilities under a posterior over the weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.checks import check_option
from sklaplace.dirichlet.links import LINKS, Link, choose_link
from sklaplace.estimators.fitting.laplace_fit import HeldOutScore
from sklaplace.estimators.fitting.summary import reporting_for
from sklaplace.estimators.laplace import BaseLaplace
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.targets.classes import is_ignored
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.estimators.training.samples import Samples
from sklaplace.likelihoods import ClassificationLikelihood
from sklaplace.networks.arrays import as_array


@dataclass(eq=False, repr=False, kw_only=True)
class LaplaceClassifier(BaseLaplace, ProbabilisticClassifier):
    """Laplace approximation of a skorch classifier.

    The posterior over (some of) the weights of the network is a Gaussian around their
    trained values. Class probabilities are averaged over it, so that they are less
    confident far from the training data. Prefer it to the network alone where
    overconfident predictions are costly; accuracy stays about that of the network.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``; a
        ``sklearn.frozen.FrozenEstimator`` around a trained net keeps its weights; None
        uses a small network for tabular data.
    likelihood : object or None, default=None
        Likelihood of the targets given the outputs, for a criterion without a built-in
        one; see `sklaplace.likelihoods`. None uses that of the criterion.
    subset_of_weights : {"last_layer", "all", "trainable", "subnetwork"} or list of \
            str, default="last_layer"
        Weights that are treated as random: those of the last layers, all, those with
        ``requires_grad``, single ones, or parameters by name (or by that of a module
        that contains them).
    subset_params : dict, default=None
        Options of the subset. ``subnetwork`` takes ``n_weights`` (100), and ``by``
        (``"magnitude"``, ``"swag"``, ``"variance"``, ``"random"``), the score that
        selects them after training; ``by="swag"`` takes ``n_snapshots`` (100),
        ``steps_per_snapshot`` (1) and ``lr`` (0.01), the iterates of gradient descent
        whose variances are the scores. Or ``indices``, their indices in the flattened
        network.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Structure of the Hessian approximation. ``full`` takes memory quadratic in the
        number of weights, ``lowrank`` that of ``rank`` networks.
    structure_params : dict, default=None
        Options of the structure. ``kron`` takes ``weight_sharing`` (``"expand"`` or
        ``"reduce"``); ``lowrank`` takes ``rank`` (100), the number of eigenvectors, and
        ``tolerance`` (1e-12), the fraction of the largest eigenvalue below which they
        are dropped; ``gp``, ``nystrom`` and ``variational`` take ``n_points`` (100),
        the number of inducing points.
    curvature : {"ggn", "ggn_mc", "ef", "hessian", "identity"}, default="ggn"
        Approximation of the Hessian: the generalised Gauss-Newton matrix, its
        Monte-Carlo estimate from targets that the network draws, the empirical Fisher
        matrix, the Hessian itself (``full``, and small networks, only), or products of
        the Jacobian alone, whatever the loss.
    curvature_params : dict, default=None
        Options of the curvature. ``ggn_mc`` takes ``n_draws`` (10).
    prior_precision : float, array or {"auto", "validation", "marglik"}, default="auto"
        Inverse prior variance of the weights. ``"marglik"`` maximises the marginal
        likelihood of the training data, ``"validation"`` the score of samples that the
        network did not see. ``"auto"`` is the second where there are such samples; else
        predictions near the data stay the network's own, with a warning. The samples
        are taken from ``X_val``, else from what the net's ``train_split`` holds out,
        else from ``validation_fraction``. With few samples, ``"auto"`` trains a network
        without each fold of them. A frozen net is never trained.
    prior_structure : {"scalar", "layerwise", "diag"}, default="scalar"
        One precision for all weights, one per parameter tensor (not for ``nystrom`` and
        ``variational``), or one per weight (for ``full``, ``lowrank`` and ``diag``).
    prior_mean : float or array of shape (P,), default=0.0
        Prior mean of the weights.
    prior : GaussianPosterior or None, default=None
        ``posterior_`` of an estimator that was fitted to an earlier task, around a
        network with the same weights: that Gaussian is then the prior, in place of
        ``prior_precision``, ``prior_structure`` and ``prior_mean``, which stay at their
        defaults, and nothing is tuned. Outputs are matched by their number. Exact for
        ``full`` and ``diag``; see the user guide on the others, of which ``gp`` and
        ``lowrank`` are refused.
    refine : bool or "auto", default="auto"
        Whether the weights are refitted to the maximum a posteriori of the linearised
        network under the prior; predictions then use them, the network keeps its own.
        ``"auto"`` leaves that to the tuner for a last layer, and is False where
        nothing is tuned, other weights are selected, or the loss is not convex in the
        outputs. Under True these other weights need ``pred_type="glm"``, and losses
        that are not convex are refused, and so is ``prior``.
    residual : float or {"auto", "none"}, default="auto"
        Variance of a Gaussian process that is added to the logits, and grows with the
        distance from the training samples until predictions there are uncertain: its
        variance at a distance that 99 % of the samples do not exceed. ``"auto"`` is
        0.5 with ``prior_precision="auto"``, and otherwise ``"none"``, under which the
        weights alone are random. Networks without features, see `score_samples`, have
        none. See the :ref:`User Guide <far>`.
    temperature : float, default=1.0
        Divides the log-likelihood in the posterior; values below one sharpen it.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for tuning, from a net that is trained here
        and holds out none itself, if there are at least 50 distinct samples; 100 with
        ``prior_precision="auto"``, which has networks of folds for fewer.
    pred_type : {"glm", "nn"}, default="glm"
        Predictive distribution: that of the linearised network, or of the network under
        ``n_samples`` draws of the weights. Tuning uses the first.
    n_samples : int, default=100
        Draws of the ``"mc"`` link, of ``predict_uncertainty(X, "mc")``, and of the
        weights for ``pred_type="nn"``.
    batch_size : int or None, default=None
        Samples per batch for curvature and prediction; None fits them into a fixed
        memory budget. Results do not depend on it.
    n_shards : int or None, default=None
        Parts that the training samples are divided into, in whole batches: the
        curvature is summed within each, and then over all, in order. None is one for
        every four batches, and at most 32. Only the last digits depend on it.
    n_jobs : int or None, default=None
        Workers that compute shards, and batches of predictions, by joblib: processes,
        or what ``joblib.parallel_config`` says, such as ``"dask"``. Each uses one
        thread, and results are the same to the last bit for every number, 1 included,
        and every backend. None computes here, on as many threads as torch uses; -1 is
        one worker per core.
    distributed : bool, default=False
        Whether all processes of the default group of ``torch.distributed`` fit
        together, each on a part of the shards. All are given the same data and
        parameters, and get the same posterior.
    memory : None, str, path or joblib.Memory, default=None
        Cache of the trained network and its curvature, so that a grid search over
        prior, noise, temperature or link trains once per fold. Needs a
        ``random_state``. An edit of your module trains anew, an edit of a function
        that the module calls does not: clear the folder then. Loading from the folder
        can run any code, as with pickle: use a folder that you alone may write to.
    random_state : int, RandomState or None, default=None
        Seeds training, the held-out samples and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        What is printed: nothing (0); the phases of a fit with their time, what was
        chosen, and a line on a net that has weights and is trained anew (1); also
        progress bars of long loops, in fits and predictions, if tqdm is installed (2).
        No number depends on it.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, by label, which multiply ``sample_weight``;
        ``"balanced"`` gives all classes the same total weight. They also apply to
        held-out samples.
    link_approx : {"auto", "mean_field", "mc", "gumbel", "probit", \
            "probit_uncentred", "sodpp", "bridge", "bridge_norm"}, default="auto"
        Approximation of the class probabilities under Gaussian logits; see
        `sklaplace.dirichlet.links.choose_link` for the rule of ``"auto"``.
    dirichlet_approx : {"projection", "bridge", "bridge_norm", \
            "bridge_norm_published", "bridge_conditioned", \
            "bridge_norm_conditioned"}, default="projection"
        Dirichlet approximation of the distribution over class probabilities: the
        closest one in Kullback-Leibler divergence, or the Laplace bridge, without or
        with a correction for large variances, of logits that are centred or, as
        published, conditioned on a sum of zero.

    Attributes
    ----------
    estimator_ : skorch net
        The trained network; a copy where it was frozen.
    posterior_ : GaussianPosterior
        Gaussian over the selected weights.
    classes_ : ndarray of shape (K,)
        Class labels; for a matrix of labels the numbers of its columns.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.
    prior_precision_ : float or ndarray
        Prior precision in use.
    temperature_ : float
        Temperature in use: ``temperature`` unless `tune` chose another.
    log_marginal_likelihood_value_ : float
        Laplace approximation of the log marginal likelihood, in nats.

    See Also
    --------
    LaplaceClassifierCV : Chooses the prior precision by cross-validation.
    LaplaceRegressor : Laplace approximation of a skorch regressor.

    Notes
    -----
    Linearised predictive: Immer, Korzepa and Bauer (2021). Kronecker structure:
    Ritter, Botev and Barber (2018). Last layer: Kristiadi, Hein and Hennig (2020).
    Evidence: MacKay (1992). Why the last layer is refitted before its evidence is
    trusted: Antorán et al. (2022).

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

    Around a network of one's own:

    >>> import torch
    >>> from skorch import NeuralNetClassifier
    >>> net = NeuralNetClassifier(
    ...     torch.nn.Linear, module__in_features=4, module__out_features=3,
    ...     criterion=torch.nn.CrossEntropyLoss, lr=0.1, verbose=0,
    ... )
    >>> LaplaceClassifier(net, random_state=0).fit(X, y).predict(X[:2])
    array([0, 0])
    """

    class_weight: dict[Any, float] | str | None = None
    link_approx: str = "auto"
    dirichlet_approx: str = "projection"

    # --------------------------------------------------------------------- fit
    def _trainer(self, options: LaplaceOptions) -> LaplaceTrainer:
        is_linearised = options.pred_type == "glm"
        needs = is_linearised and not self._needs_variances_only(self._link().diagonal)
        return replace(super()._trainer(options), takes_covariances=needs)

    def _score(self, likelihood: ClassificationLikelihood) -> HeldOutScore:
        tiny = torch.finfo(torch.float64).tiny
        link = self._link()

        def log_proba(mean: Tensor, cov: Tensor) -> Tensor:
            logits = likelihood.class_logits(mean, cov)
            proba = self._proba_of_gaussian(link, *logits, single=True)
            return proba.clamp(min=tiny).log()

        return HeldOutScore(
            log_proba,
            diagonal=self._needs_variances_only(link.diagonal),
            is_centred=link.centred,
            is_cheap=link.cheap,
        )

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> "LaplaceClassifier":
        """Add samples to the posterior; the network keeps its weights.

        The result is that of one fit on all samples around the same weights, prior and
        temperature, whatever the order. Before any fit, this is ``fit``.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            New samples.
        y : array-like of shape (n,)
            Their labels, of the classes in fit.
        classes : array-like of shape (K,), optional
            All classes that there will be; for the first call, if ``y`` lacks some.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the samples, as in fit.

        Returns
        -------
        object
            The estimator.

        Raises
        ------
        ValueError
            If a label is not among the classes. The estimator is then unchanged.

        See Also
        --------
        fit : Trains the network, too.
        tune : Chooses prior and noise anew.

        Notes
        -----
        One pass over the new samples. Prior and noise are not tuned again, and the
        network is not trained: ``learning_curve(exploit_incremental_learning=True)``,
        which calls this method, is flat.

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
            with reporting_for(self):
                return self._fit(Samples(X, y, sample_weight, classes=classes))
        if not self._targets.is_ignored(as_array(y, "y")).all():
            self._add_samples(X, y, sample_weight)
        return self

    def _check_classes(self, classes: np.ndarray, y: Any) -> None:
        """Raise for labels that ``classes`` lacks, or classes other than the fitted."""
        fitted = getattr(self, "classes_", classes)
        if not np.array_equal(fitted, classes):
            raise ValueError(
                f"classes={classes.tolist()} are not those of the first call, "
                f"{fitted.tolist()}. Leave classes out, or fit anew."
            )
        labels = np.asarray(y)
        ignored = is_ignored(labels, inner_net(self.estimator))
        unknown = np.setdiff1d(labels[~ignored], classes)
        if len(unknown):
            raise ValueError(
                f"y has labels that classes lacks: {unknown[:5].tolist()}. List all of "
                "them."
            )

    # ----------------------------------------------------------------- predict
    def _map_proba(self, X: Any, function: Callable[[Tensor], Tensor]) -> np.ndarray:
        outputs = self._outputs
        if not outputs.model.is_gaussian:
            return super()._map_proba(X, function)
        link = self._link()
        (proba,) = outputs.map_gaussian(
            self._check_inputs(X),
            self._of_logits(lambda m, S: function(self._proba_of_gaussian(link, m, S))),
            diagonal=self._needs_variances_only(link.diagonal),
            centred=self._is_centred(link.centred),
        )
        return proba

    def _link(self) -> Link:
        return LINKS[self._link_name()]

    def _link_name(self) -> str:
        """Return the link in use; it may have been set after fit."""
        check_option("link_approx", self.link_approx, ["auto", *LINKS])
        if self.link_approx == "auto":
            return choose_link(self._targets.n_classes, self.n_samples)
        return self.link_approx

    def _proba_of_gaussian(
        self, link: Link, mean: Tensor, cov: Tensor, *, single: bool = False
    ) -> Tensor:
        """Return probabilities (b, K) of Gaussian logits."""
        # scrambling takes time: no points for links that use none
        points = mean.new_empty(0, mean.shape[1])
        if link.draws:
            points = self._sobol_normals(mean)
        return (link.score if single else link.function)(mean, cov, points)
