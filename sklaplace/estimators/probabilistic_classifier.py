"""ProbabilisticClassifier: class probabilities, and distributions over them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.core.checks import as_seed, check_option, naming, warn_user
from sklaplace.core.random import cached_sobol_normals
from sklaplace.dirichlet.distribution import check_set
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.predicting import class_outputs, latent
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.estimators.targets.classes import ClassTargets, likelihood_of
from sklaplace.estimators.training.samples import Samples
from sklaplace.likelihoods import ClassificationLikelihood
from sklaplace.networks.data import count_rows


class ProbabilisticClassifier(ClassifierMixin, BaseEstimator, ABC):
    """Predictions of a classifier, from the distribution of its outputs.

    Subclasses fit, and provide `_outputs`, the distribution of outputs.
    """

    _targets_kind: ClassVar[type[ClassTargets]] = ClassTargets
    _targets: ClassTargets

    @property
    @abstractmethod
    def _outputs(self) -> BatchedOutputs:
        """The distribution of outputs of the fitted network."""

    # ----------------------------------------------------------------- targets
    def _infer_targets(self, y: Any, samples: Samples) -> ClassTargets:
        """Return the classes of the targets in fit; sets ``classes_``, too."""
        self._targets = self._targets_kind.infer(
            y,
            inner_net(self.estimator),
            self.likelihood,
            getattr(self, "class_weight", None),
            is_frozen=is_frozen(self.estimator),
            classes=samples.classes,
        )
        self.classes_ = self._targets.classes
        return self._targets

    def _check_loss(self, loss: float, rate: str = "the learning rate") -> None:
        """Warn of a training loss, in nats per label, far above that of guessing."""
        guessing = np.log(self._targets.n_classes)
        if guessing > 0 and loss > 2 * guessing:
            warn_user(
                f"The network's training loss, {loss:.3g} nats per label, is larger "
                f"than that of guessing, {guessing:.3g}: its training has diverged or "
                f"not begun. Lower {rate}, scale the inputs or train longer.",
            )

    # ------------------------------------------------------------ distributions
    @property
    def _likelihood(self) -> ClassificationLikelihood:
        return cast(ClassificationLikelihood, self.network_spec_.likelihood)

    def _sobol_normals(self, like: Tensor) -> Tensor:
        """Return standard-normal points (s, K) for logits (b, K): always the same."""
        points = cached_sobol_normals(self.n_samples, like.shape[1], self._seed)
        return points.to(like)

    def _of_logits(
        self, function: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], tuple[Tensor]]:
        """Return a function of Gaussian logits as one of Gaussian outputs."""
        class_logits = self._likelihood.class_logits
        return lambda mean, cov: (function(*class_logits(mean, cov)),)

    def _is_centred(self, method_is_centred: bool) -> bool:
        return self._likelihood.is_shift_invariant and method_is_centred

    def _needs_variances_only(self, method_needs_variances_only: bool) -> bool:
        """Whether covariances between logits are not used."""
        # labels of a matrix are predicted one by one
        is_matrix = not self._targets.target_type.has_class_names
        return method_needs_variances_only or is_matrix

    def _proba_of_draws(self, draws: Tensor) -> Tensor:
        """Return probabilities (b·r, K, s) of drawn outputs (b, c, s)."""
        proba = self._likelihood.probabilities(draws.mT)  # (b, s, K) or (b, s, r, K)
        by_label = proba.movedim(1, -1)
        return by_label.reshape(-1, *by_label.shape[-2:])

    def _normalised(self, proba: np.ndarray) -> np.ndarray:
        """Return probabilities (n·r, K) of the classes in fit; rows sum to one."""
        # a network with one logit has two columns, also for a single class in fit
        proba = proba[:, : self._targets.n_classes]
        proba /= proba.sum(1, keepdims=True)
        return proba

    def _class_probabilities(self, X: Any) -> np.ndarray:
        """Return probabilities (n·r, K) of r labels per sample; rows sum to one."""
        return self._normalised(self._map_proba(X, lambda proba: proba))

    def _map_proba(self, X: Any, function: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return a function of each batch's probabilities (b·r, K), not normalised."""
        X, of = self._check_inputs(X), self._proba_of_draws
        return self._outputs.map_draws(X, lambda f: function(of(f).mean(-1))).numpy()

    def _concentrations(self, X: Any, method: Any) -> np.ndarray:
        """Return Dirichlet concentrations (n·r, K) of r labels per sample."""
        check_option(
            "dirichlet_approx", self.dirichlet_approx, dirichlet.APPROXIMATIONS
        )
        method = self.dirichlet_approx if method is None else method
        check_option("method", method, dirichlet.APPROXIMATIONS)
        approximation = dirichlet.APPROXIMATIONS[method]
        (alpha,) = self._outputs.map_gaussian(
            self._check_inputs(X),
            self._of_logits(approximation),
            diagonal=self._needs_variances_only(approximation.diagonal),
            centred=self._is_centred(approximation.centred),
        )
        return alpha[:, : self._targets.n_classes]

    def _log_proba_of(self, X: Any, y: Any) -> np.ndarray:
        """Return the log-probability of the labels of each sample, (n,); finite."""
        proba = self._class_probabilities(X)
        return class_outputs.log_proba_of(self._targets, proba, y)

    # ------------------------------------------------------------- public methods
    @class_outputs.without_variance
    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, averaged over the posterior.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            Rows sum to one; columns in the order of ``classes_``. For a matrix of
            labels: that each of them is one.

        See Also
        --------
        predict : Most probable class.
        predict_dirichlet : Distribution over the probabilities.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.predict_proba(X[[0, 149]]).round(1)
        array([[1., 0., 0.],
               [0., 0., 1.]])
        """
        proba = self._class_probabilities(X)
        return self._targets.target_type.probabilities(proba)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            In nats; ``-inf`` where a probability is zero.

        See Also
        --------
        predict_proba : The probabilities.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> bool((model.predict_log_proba(X) < 0).all())
        True
        """
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    @class_outputs.without_variance
    def predict(self, X: Any) -> np.ndarray:
        """Most probable class under `predict_proba`.

        A net with a ``threshold`` (``skorch.NeuralNetBinaryClassifier``) keeps it.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.

        Returns
        -------
        ndarray of shape (n,), (n, n_labels) or (n, ...)
            Labels; of a matrix of labels zeros and ones.

        See Also
        --------
        predict_proba : Probabilities of all classes.
        predict_top_k : Several classes, the most probable one first.
        predict_set : The classes that are plausibly the most probable one.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.predict(X[[0, 149]])
        array([0, 2])
        """
        if class_outputs.are_many(self):
            return self.predict_top_k(X, 1)[0][:, 0]
        proba = self.predict_proba(X)
        threshold = getattr(self.estimator_, "threshold", None)
        return self._targets.target_type.predict(proba, self.classes_, threshold)

    def predict_top_k(self, X: Any, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
        """Most probable classes under `predict_proba`, and their probabilities.

        Batch by batch: memory for the probabilities of all classes of all samples, as
        for the words of a language model, is not needed.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        k : int, default=5
            Number of classes; all of them, where there are fewer.

        Returns
        -------
        classes : ndarray of shape (n, k) or (n, k, ...)
            Labels, the most probable one first; of equally probable ones that which
            comes first in ``classes_``.
        proba : ndarray of shape (n, k) or (n, k, ...)
            Their probabilities.

        Raises
        ------
        ValueError
            If y in fit was a matrix of labels.

        See Also
        --------
        predict_set : As many classes as the uncertainty demands.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> classes, proba = model.predict_top_k(X[[0, 149]], k=2)
        >>> classes
        array([[0, 1],
               [2, 1]])
        """
        k = class_outputs.check_top(self, k)
        columns, proba = class_outputs.top_classes(self, X, k)
        unflatten = self._targets.target_type.unflatten
        return unflatten(self.classes_[columns]), unflatten(proba)

    @naming(X="X", y="y", sample_weight="sample_weight")
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        y : array-like of shape (n,), (n, n_labels) or (n, ...)
            Their labels.
        sample_weight : array-like of shape (n,), optional
            Weights of the samples.

        Returns
        -------
        float
            Fraction of the samples whose labels are all correct; for dense labels, of
            the positions. Labels that the criterion ignores do not count.

        Raises
        ------
        ValueError
            If it ignores all of them, or y has labels of another type than in fit.

        See Also
        --------
        predict : The labels that are compared.
        sklaplace.metrics.expected_calibration_error : Whether probabilities are right.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> round(model.score(X, y), 2)
        0.98
        """
        predicted = self.predict(X)
        return self._targets.accuracy(y, predicted, sample_weight)

    def sample_proba(
        self, X: Any, n_samples: int = 1, random_state: Any = 0
    ) -> np.ndarray:
        """Draws of class probabilities from the posterior, joint over samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        n_samples : int, default=1
            Number of draws; each is one function, evaluated for all samples.
        random_state : int, RandomState or None, default=0
            Seeds the draws.

        Returns
        -------
        ndarray of shape (n, K, n_samples)
            (n, n_labels, n_samples) for a matrix of labels, and (n, K, ...,
            n_samples) for maps.

        See Also
        --------
        predict_proba : Their mean.
        sample_latent : Draws of the logits.

        Notes
        -----
        Memory is n_samples times the number of selected weights.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.sample_proba(X[:2], n_samples=5).shape
        (2, 3, 5)
        """
        outputs = self._outputs
        seed = as_seed("random_state", random_state)
        draws = torch.as_tensor(outputs.sample(self._check_inputs(X), n_samples, seed))
        drawn = self._likelihood.probabilities(draws.mT)  # (n, s, K) or (n, s, r, K)
        proba = self._normalised(drawn.reshape(-1, drawn.shape[-1]).numpy())
        proba = self._targets.target_type.probabilities(proba)
        by_draw = proba.reshape(*drawn.shape[:2], *proba.shape[1:])
        return np.moveaxis(by_draw, 1, -1)

    def latent_mean_and_variance(
        self, X: Any, full_cov: bool = False, joint: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the class logits.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        full_cov : bool, default=False
            Return covariances between classes, not variances alone.
        joint : bool, default=False
            Return covariances between samples as well.

        Returns
        -------
        mean : ndarray of shape (n, K)
            Means.
        variance : ndarray of shape (n, K), (n, K, K) or, if joint, (n·K, n·K)
            For a matrix of labels: of one logit per label. For maps positions are the
            last axes. Joint covariances are in the order of ``mean.ravel()``.

        See Also
        --------
        sample_latent : Draws from this distribution.
        predict_proba : Probabilities in place of logits.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> mean, variance = model.latent_mean_and_variance(X[:2])
        >>> mean.shape, variance.shape
        ((2, 3), (2, 3))
        """
        latent.check_one_covariance(full_cov=full_cov, joint=joint)
        outputs, target_type = self._outputs, self._targets.target_type
        if joint:
            return latent.joint_moments(
                outputs, self._check_inputs(X), self._class_logits
            )
        moments = partial(target_type.latent_moments, self._likelihood)
        mean, variance = outputs.latent(self._check_inputs(X), full_cov, moments)
        return mean, variance

    def sample_latent(
        self, X: Any, n_samples: int = 1, random_state: Any = 0
    ) -> np.ndarray:
        """Draws of the class logits from the posterior, joint over samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        n_samples : int, default=1
            Number of draws; each is one function, evaluated for all samples.
        random_state : int, RandomState or None, default=0
            Seeds the draws: those of `sample_proba` with the same seed.

        Returns
        -------
        ndarray of shape (n, K, n_samples)
            Shaped like the mean of `latent_mean_and_variance`, and an axis of draws.

        See Also
        --------
        latent_mean_and_variance : Mean and variance of the draws.
        sample_proba : Draws of the probabilities.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.sample_latent(X[:2], n_samples=5).shape
        (2, 3, 5)
        """
        outputs, X = self._outputs, self._check_inputs(X)
        return latent.joint_draws(
            outputs, X, n_samples, random_state, self._class_logits
        )

    def _class_logits(self, outputs: Tensor) -> Tensor:
        """Return class logits (m, K) of outputs (m, c)."""
        moments = self._targets.target_type.latent_moments
        return moments(self._likelihood, outputs, torch.zeros_like(outputs))[0]

    def predict_dirichlet(self, X: Any, method: str | None = None) -> np.ndarray:
        """Dirichlet distribution over class probabilities.

        `sklaplace.dirichlet` has its mean, variances, intervals, draws and more.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        method : str, optional
            In place of ``dirichlet_approx``, of which it may have any value.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels, 2) or (n, K, ...)
            Concentrations; positive. Of a matrix of labels each has two: a Beta
            distribution.

        Raises
        ------
        ValueError
            If there is no such method.

        See Also
        --------
        predict_proba : Probabilities, averaged over the posterior.
        sklaplace.dirichlet.interval : Intervals of the probabilities.
        sklaplace.plotting.DirichletDisplay : The density of one prediction.

        Notes
        -----
        With ``pred_type="nn"``, of the Gaussian that has mean and covariance of the
        drawn logits.

        ``"projection"`` needs covariances between classes and takes O(K³) per sample:
        about 10 microseconds for 10 classes, half a millisecond for 100 and 40 for
        1,000. The bridges need variances alone, and O(K).

        Of the bridges: concentrations grow with the size of the logits as well as with
        confidence, so that their sum does not detect out-of-distribution samples, and
        the mean hardly depends on the size of the variances.

        References
        ----------
        Minka (2000), "Estimating a Dirichlet distribution"; MacKay (1998), "Choice of
        basis for Laplace approximation"; Hobbhahn, Kristiadi and Hennig (2022), "Fast
        predictive uncertainty for classification with Bayesian deep networks".

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> alpha = model.predict_dirichlet(X[:2])
        >>> bool((alpha > 0).all())
        True
        """
        alpha = self._concentrations(X, method)
        return self._targets.target_type.unflatten(alpha)

    def predict_uncertainty(self, X: Any, method: str | None = None) -> np.ndarray:
        """Total, aleatoric and epistemic uncertainty of the label.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        method : str, optional
            Distribution over probabilities that is split: a Dirichlet, by any value of
            ``dirichlet_approx``, the parts of which are known in closed form, or
            ``"mc"``: ``n_samples`` draws. None takes ``dirichlet_approx``, and draws
            with ``pred_type="nn"``.

        Returns
        -------
        ndarray of shape (n, 3), (n, n_labels, 3) or (n, 3, ...)
            Entropy in nats: total, aleatoric (expected under known probabilities) and
            epistemic (mutual information of label and weights). The first is the sum of
            the others, and at most ``log K``.

        Raises
        ------
        ValueError
            If there is no such method.

        See Also
        --------
        score_samples : A score for samples unlike the training data.
        sklaplace.plotting.UncertaintyDisplay : The three over a plane.

        References
        ----------
        Depeweg, Hernández-Lobato, Doshi-Velez and Udluft (2018),
        "Decomposition of uncertainty in Bayesian deep learning for efficient and
        risk-sensitive learning".

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> total, aleatoric, epistemic = model.predict_uncertainty(X[[0, 70]]).T
        >>> bool(total[0] < total[1])
        True
        """
        is_gaussian = self._outputs.model.is_gaussian
        if method is None:
            check_option(
                "dirichlet_approx", self.dirichlet_approx, dirichlet.APPROXIMATIONS
            )
            method = self.dirichlet_approx if is_gaussian else "mc"
        check_option("method", method, ["mc", *dirichlet.APPROXIMATIONS])
        found = class_outputs.entropies(self, X, method)
        return self._targets.target_type.unflatten(found)

    def score_samples(self, X: Any) -> np.ndarray:
        """Minus the epistemic uncertainty of the label: the higher, the more normal.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to score.

        Returns
        -------
        ndarray of shape (n,)
            Minus the mutual information of label and weights by draws, in nats; the
            mean over several labels. See `predict_uncertainty`.

        See Also
        --------
        predict_uncertainty : Total and aleatoric uncertainty as well.
        sklaplace.metrics.ood_auroc : How well the score detects other samples.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import DeepEnsembleClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = DeepEnsembleClassifier(n_estimators=2, random_state=0).fit(X, y)
        >>> model.score_samples(X[:3]).shape
        (3,)
        """
        found = class_outputs.entropies(self, X, "mc")[:, 2]
        return -found.reshape(count_rows(X), -1).mean(1)

    def predict_set(
        self,
        X: Any,
        q: float = 0.05,
        k_max: int = 10,
        *,
        reference: str = "top",
        method: str | None = None,
    ) -> np.ndarray:
        """Uncertainty-aware top-k: classes that are plausibly the most probable one.

        One class where the prediction is confident, several where it is not. A class
        belongs to the set if an upper quantile of its probability is at least a lower
        quantile of that of the top class. Coverage is not guaranteed: for that,
        conformal prediction needs calibration samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        q : float, default=0.05
            Tail probability of both ends; sets shrink as it grows.
        k_max : int, default=10
            Classes in a set, at most.
        reference : {"top", "previous"}, default="top"
            Whether a class is compared with the top class, or with the one before it in
            descending order ("next class"), which gives larger sets.
        method : str, optional
            In place of ``dirichlet_approx``, of which it may have any value.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels, 2) or (n, K, ...)
            Boolean; True for members, of which there is one at least. Columns in the
            order of ``classes_``.

        Raises
        ------
        ValueError
            If an option has no such value.

        See Also
        --------
        predict_top_k : A fixed number of classes.
        sklaplace.dirichlet.plausible_classes : The rule, for any Dirichlet.

        References
        ----------
        Hobbhahn, Kristiadi and Hennig (2022), "Fast predictive uncertainty for
        classification with Bayesian deep networks", UAI, section 4.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(prior_precision=1.0, random_state=0).fit(X, y)
        >>> model.predict_set(X[[0, 77]])
        array([[ True, False, False],
               [False,  True,  True]])
        """
        check_set(q, k_max, reference)
        alpha = self._concentrations(X, method)
        members = dirichlet.plausible_classes(alpha, q, k_max, reference)
        return self._targets.target_type.unflatten(members)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        likelihood = self.likelihood or likelihood_of(inner_net(self.estimator))
        multi_target = getattr(likelihood, "multi_target", "multilabel")
        tags.classifier_tags.multi_label = multi_target == "multilabel"
        tags.input_tags.three_d_array = True
        return tags
