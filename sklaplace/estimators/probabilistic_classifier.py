"""ProbabilisticClassifier: class probabilities, and distributions over them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.core.checks import as_seed, check_count, check_option, naming, warn_user
from sklaplace.core.random import RandomState, cached_sobol_normals
from sklaplace.core.trees import Inputs
from sklaplace.data.dataset import TrainingData, count_rows
from sklaplace.dirichlet import APPROXIMATIONS
from sklaplace.dirichlet.distribution import check_set
from sklaplace.dirichlet.links import LINKS, Link, mc_uncertainty, uncertainty_of_draws
from sklaplace.estimators.base import NetEstimator, without_class
from sklaplace.estimators.options.constraints import one_of, option
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.predicting import latent
from sklaplace.estimators.predicting.conformal import Conformal, check_no_categories
from sklaplace.estimators.predicting.output_model import BatchedOutputs, unchanged
from sklaplace.estimators.targets.base import likelihood_of
from sklaplace.estimators.targets.classes import ClassTargets, normalised
from sklaplace.estimators.training.samples import Samples
from sklaplace.likelihoods import ClassificationLikelihood

# Above this number of classes, the most probable class is found batch by batch.
MANY_CLASSES = 1024

# Above this number of classes, Dirichlet distributions use covariances only among the
# most probable classes, if each logit has weights of its own.
MAX_COVARIANCES = 100
# Number of these classes.
N_LEADING = 16

# Maps the probabilities (b·r, K) of a batch to the values to keep.
Reduction = Callable[[Tensor], Tensor]


@without_class
@dataclass(eq=False, repr=False, kw_only=True)
class ProbabilisticClassifier(ClassifierMixin, NetEstimator):
    """Predictions of a classifier, from the distribution of its outputs.

    Subclasses implement `_fit` and `_outputs`, the distribution of outputs.
    """

    class_weight: dict[Any, float] | str | None = option(
        None, one_of({"balanced"}), Mapping, None
    )
    dirichlet_approx: str = option("projection", one_of(APPROXIMATIONS.keys()))

    _targets_kind: ClassVar[type[ClassTargets]] = ClassTargets

    # ----------------------------------------------------------------- targets
    def _infer_targets(self, y: ArrayLike, samples: Samples) -> ClassTargets:
        """Return the classes of the targets passed to ``fit``, and set ``classes_``."""
        self._targets = self._targets_kind.infer(
            y,
            inner_net(self.estimator),
            self.likelihood,
            self.class_weight,
            is_frozen=is_frozen(self.estimator),
            classes=samples.classes,
        )
        self.classes_ = self._targets.classes
        return self._targets

    def _check_loss(
        self, loss: float, data: TrainingData, rate: str = "the learning rate"
    ) -> None:
        """Warn if the training loss (nats per label) is that of guessing.

        ``rate`` names the learning rate in the message.
        """
        if loss > self._targets.notable_loss(data):
            warn_user(
                f"The network's training loss, {loss:.3g} nats per label, is no better "
                "than the loss of guessing: training has diverged or has not begun. "
                f"Lower {rate}, train longer, or scale the inputs, for example with "
                "sklearn.preprocessing.StandardScaler in a Pipeline."
            )

    # ------------------------------------------------------------ distributions
    @property
    def _likelihood(self) -> ClassificationLikelihood:
        return cast(ClassificationLikelihood, self.network_spec_.likelihood)

    def _map_logits(
        self,
        outputs: BatchedOutputs,
        X: Inputs,
        function: Callable[..., Tensor],
        kind: dirichlet.Approximation | Link,
        n_leading: int = 0,
    ) -> np.ndarray:
        """Return a function's values for the Gaussians over class logits, (n·r, ...).

        There are r labels per sample. ``kind`` states whether the function requires
        covariances, and centred logits (without their mean). The likelihood converts
        the moments of outputs to those of logits, batch by batch. With ``n_leading``,
        the function takes variances, and covariances among the leading outputs; see
        `BatchedOutputs.map_gaussian`.
        """
        (values,) = outputs.map_gaussian(
            self._check_inputs(X),
            partial(_apply_to_logits, self._likelihood, function),
            diagonal=n_leading > 0 or self._needs_variances_only(kind.diagonal),
            centred=self._centres(kind),
            n_leading=n_leading,
        )
        return values

    def _centres(self, kind: dirichlet.Approximation | Link) -> bool:
        """Return whether to subtract the mean over logits, which a softmax ignores."""
        return self._likelihood.is_shift_invariant and kind.centred

    def _needs_variances_only(self, diagonal: bool) -> bool:
        """Return whether only the variances of the logits are needed.

        ``diagonal`` states that a method uses no covariances between logits.
        """
        # each label of a matrix is predicted separately
        is_matrix = not self._targets.target_type.has_class_names
        return diagonal or is_matrix

    def _has_many_own_weights(self, outputs: BatchedOutputs) -> bool:
        """Return whether there are many classes, each with weights of its own.

        Their logits are hardly correlated then, except those of classes that are easily
        confused. If they share uncertain weights, all of them are correlated.
        """
        spec: Any = outputs.network.spec
        n_classes = self._targets.n_classes
        has_many = spec.n_outputs == n_classes > MAX_COVARIANCES  # no maps
        return has_many and outputs.model.is_gaussian and spec.layout.is_separable

    def _map_proba(self, X: Inputs, reduce: Reduction = unchanged) -> np.ndarray:
        """Return probabilities (n·r, K) of r labels per sample; rows sum to one.

        ``reduce`` is applied to the probabilities (b·r, K) of each batch.
        """
        outputs, n_classes = self._outputs(), self._targets.n_classes
        of_batch = partial(_mean_proba, self._likelihood, n_classes, reduce)
        return outputs.map_draws(self._check_inputs(X), of_batch)[0]

    def _concentrations(self, X: Inputs, method: Any) -> np.ndarray:
        """Return Dirichlet concentrations (n·r, K) of r labels per sample."""
        outputs = self._outputs()  # raises if not fitted
        method = self.dirichlet_approx if method is None else method
        check_option("method", method, dirichlet.APPROXIMATIONS)
        approximation = dirichlet.APPROXIMATIONS[method]
        if approximation.of_many is not None and self._has_many_own_weights(outputs):
            function = approximation.of_many
            return self._map_logits(outputs, X, function, approximation, N_LEADING)
        # passed twice: the object is a function, and states what the function requires
        alpha = self._map_logits(outputs, X, approximation, approximation)
        # a network with one logit has two columns, even if fit had a single class
        return alpha[:, : self._targets.n_classes]

    def _entropies(self, X: Inputs, method: str) -> np.ndarray:
        """Return total, aleatoric and epistemic entropy of each label, (n·r, 3).

        There are r labels per sample. ``method`` is "mc", for draws, or an
        approximation by a Dirichlet distribution.
        """
        if method != "mc":
            entropies = dirichlet.uncertainty(self._concentrations(X, method))
        else:
            entropies = self._entropies_of_draws(X)
        # if fit had a single class, a network with one logit still predicts two
        return entropies if self._targets.n_classes > 1 else np.zeros_like(entropies)

    def _entropies_of_draws(self, X: Inputs) -> np.ndarray:
        """Return the entropies of `_entropies`, estimated from draws of the logits."""
        outputs = self._outputs()
        outputs.model.check_variance()  # raises for a single draw
        # Gaussian logits are drawn here; other models bring draws of the network
        if outputs.model.is_gaussian:
            function = partial(_sampled_entropies, self.n_samples, self._seed)
            # draws require what the Monte Carlo link requires
            return self._map_logits(outputs, X, function, LINKS["mc"])
        of_batch = partial(_entropies_of_draws, self._likelihood)
        return outputs.map_draws(self._check_inputs(X), of_batch)[0]

    def _log_proba_of(self, X: Inputs, y: ArrayLike) -> np.ndarray:
        """Return the finite log-probability of each sample's labels, (n,)."""
        return self._targets.log_proba_of(y, self._map_proba(X))

    def _conformity(self, model: Any, X: Inputs, y: Any) -> np.ndarray:
        """Return conformity scores (n, 1), which are larger for less likely labels.

        ``model`` is this estimator, or a clone that was fitted without a fold. The
        score of a label that the criterion ignores is NaN.
        """
        _, labels = self._check_samples(X, y, reset=False)
        codes = self._targets.encode(labels).reshape(-1, 1).astype(np.intp)
        scores = self._class_scores(model, X)
        # codes of ignored labels are negative
        of_labels = np.take_along_axis(scores, codes.clip(min=0), axis=1)
        return np.where(codes >= 0, of_labels, np.nan)

    def _class_scores(self, model: Any, X: Inputs) -> np.ndarray:
        """Return the conformity scores of all classes under a model, (n, K).

        A score is one minus the probability. A model of a fold can lack some classes,
        which then have the probability zero.
        """
        proba = model.predict_proba(X)
        scores = np.ones((len(proba), len(self.classes_)))
        scores[:, np.searchsorted(self.classes_, model.classes_)] -= proba
        return scores

    # ------------------------------------------------------------- public methods
    def predict_proba(self, X: Inputs) -> np.ndarray:
        """Predict class probabilities, averaged over the posterior.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            Class probabilities. Each row sums to one, and the columns are in the order
            of ``classes_``. For a matrix of labels, each column contains the
            probability that a label is one.

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
        array([[1. , 0. , 0. ],
               [0. , 0.1, 0.9]])
        """
        proba = self._map_proba(X)
        return self._targets.target_type.probabilities(proba)

    def predict_log_proba(self, X: Inputs) -> np.ndarray:
        """Return the logarithm of `predict_proba`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            Log-probabilities in nats; ``-inf`` if a probability is zero.

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

    def predict(self, X: Inputs) -> np.ndarray:
        """Predict the most probable class under `predict_proba`.

        The ``threshold`` of a ``skorch.NeuralNetBinaryClassifier`` is applied.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.

        Returns
        -------
        ndarray of shape (n,), (n, n_labels) or (n, ...)
            Class labels; zeros and ones for a matrix of labels.

        See Also
        --------
        predict_proba : Probabilities of all classes.
        predict_top_k : Several classes, most probable first.
        predict_set : All classes that could plausibly be the most probable class.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.predict(X[[0, 149]])
        array([0, 2])
        """
        check_is_fitted(self)
        is_single = self._targets.target_type.is_single
        # this does not store the probabilities of all classes for all samples, but
        # applies no threshold, which only nets for two classes have
        if is_single and self._targets.n_classes > MANY_CLASSES:
            return self.predict_top_k(X, 1)[0][:, 0]  # labels (n, 1)
        proba = self.predict_proba(X)
        threshold = getattr(self.estimator_, "threshold", None)
        return self._targets.target_type.predict(proba, self.classes_, threshold)

    def predict_top_k(self, X: Inputs, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
        """Predict the most probable classes and their probabilities.

        Predictions are made batch by batch, so the probabilities of all classes are
        never stored for all samples. This saves memory if there are many classes, such
        as the vocabulary of a language model.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        k : int, default=5
            Number of classes. If there are fewer than ``k`` classes, all classes are
            returned.

        Returns
        -------
        classes : ndarray of shape (n, k) or (n, k, ...)
            Labels, most probable first. Equally probable labels are in the order of
            ``classes_``.
        proba : ndarray of shape (n, k) or (n, k, ...)
            Probabilities of these classes.

        Raises
        ------
        ValueError
            If the ``y`` passed to ``fit`` was a matrix of labels.

        See Also
        --------
        predict_set : A number of classes that depends on the uncertainty.

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
        check_is_fitted(self)
        k = check_count("k", k)
        target_type = self._targets.target_type
        if not target_type.has_class_names:
            raise ValueError(
                "y was a matrix of labels in fit, and such labels have no order. Use "
                "predict_proba, whose columns are the labels."
            )
        k = min(k, self._targets.n_classes)
        # pairs (n·r, k, 2) of a class index and its probability, both as floats
        largest = self._map_proba(X, partial(_largest, k))
        columns, proba = largest[..., 0].astype(np.intp), largest[..., 1]
        unflatten = target_type.unflatten
        return unflatten(self.classes_[columns]), unflatten(np.ascontiguousarray(proba))

    @naming(X="X", y="y", sample_weight="sample_weight")
    def score(
        self, X: Inputs, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> float:
        """Return the accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        y : array-like of shape (n,), (n, n_labels) or (n, ...)
            Labels of the samples.
        sample_weight : array-like of shape (n,), optional
            Sample weights.

        Returns
        -------
        float
            Fraction of samples with all labels correct; for dense labels, the fraction
            of correct positions. Labels that the criterion ignores are not counted.

        Raises
        ------
        ValueError
            If the criterion ignores all labels, or if the label type of ``y`` differs
            from that in ``fit``.

        See Also
        --------
        predict : The predicted labels.
        sklaplace.metrics.expected_calibration_error : Calibration of the probabilities.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> round(model.score(X, y), 2)
        0.99
        """
        predicted = self.predict(X)
        return self._targets.accuracy(y, predicted, sample_weight)

    def sample_proba(
        self, X: Inputs, n_samples: int = 1, random_state: RandomState = 0
    ) -> np.ndarray:
        """Draw class probabilities from the posterior, jointly over samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        n_samples : int, default=1
            Number of draws. Each draw is one function, evaluated at all samples.
        random_state : int, RandomState or None, default=0
            Seed of the draws.

        Returns
        -------
        ndarray of shape (n, K, n_samples)
            Class probabilities. The shape is (n, n_labels, n_samples) for a matrix of
            labels, and (n, K, ..., n_samples) for dense labels.

        See Also
        --------
        predict_proba : Mean of the draws.
        sample_latent : Draws of the logits.

        Notes
        -----
        Memory use is proportional to ``n_samples`` times the number of selected
        weights.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> model.sample_proba(X[:2], n_samples=5).shape
        (2, 3, 5)
        """
        outputs = self._outputs()
        seed = as_seed("random_state", random_state)
        draws = torch.as_tensor(outputs.sample(self._check_inputs(X), n_samples, seed))
        drawn = self._likelihood.probabilities(draws.mT)  # (n, s, K) or (n, s, r, K)
        # target types expect one row per label, here for each sample and draw: flatten
        # both axes, convert to the format of the targets, and restore the axes
        proba = normalised(drawn.reshape(-1, drawn.shape[-1]), self._targets.n_classes)
        by_class = self._targets.target_type.probabilities(proba.numpy())
        by_draw = by_class.reshape(*drawn.shape[:2], *by_class.shape[1:])
        return np.moveaxis(by_draw, 1, -1)

    def latent_mean_and_variance(
        self, X: Inputs, full_cov: bool = False, joint: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and variance of the class logits.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        full_cov : bool, default=False
            Whether to return covariances between classes, instead of only variances.
        joint : bool, default=False
            Whether to also return covariances between samples.

        Returns
        -------
        mean : ndarray of shape (n, K)
            Means.
        variance : ndarray of shape (n, K), (n, K, K) or, if joint, (n·K, n·K)
            Variances or covariances. For a matrix of labels, each label has one logit.
            For dense labels, the last axes are the positions. Joint covariances are in
            the order of ``mean.ravel()``.

        See Also
        --------
        sample_latent : Draws from this distribution.
        predict_proba : Probabilities instead of logits.

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
        latent.check_one(full_cov=full_cov, joint=joint)
        outputs, X = self._outputs(), self._check_inputs(X)
        return latent.moments(outputs, X, self._latent, full_cov, joint)

    def sample_latent(
        self, X: Inputs, n_samples: int = 1, random_state: RandomState = 0
    ) -> np.ndarray:
        """Draw class logits from the posterior, jointly over samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        n_samples : int, default=1
            Number of draws. Each draw is one function, evaluated at all samples.
        random_state : int, RandomState or None, default=0
            Seed of the draws. With the same seed, `sample_proba` uses the same draws.

        Returns
        -------
        ndarray of shape (n, K, n_samples)
            Class logits. The shape is that of the mean of `latent_mean_and_variance`,
            followed by an axis of draws.

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
        outputs, X = self._outputs(), self._check_inputs(X)
        return latent.joint_draws(outputs, X, n_samples, random_state, self._latent)

    @property
    def _latent(self) -> latent.Latent:
        """Function that maps moments of the outputs to moments of the class logits."""
        return partial(self._targets.target_type.latent_moments, self._likelihood)

    def predict_dirichlet(self, X: Inputs, method: str | None = None) -> np.ndarray:
        """Predict a Dirichlet distribution over class probabilities.

        The functions in `sklaplace.dirichlet` compute the mean, variances, intervals
        and draws of this distribution.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        method : str, optional
            Approximation to use instead of ``dirichlet_approx``. The same values are
            allowed.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels, 2) or (n, K, ...)
            Positive concentrations. For a matrix of labels, there are two
            concentrations per label, which define a Beta distribution.

        Raises
        ------
        ValueError
            If the method is unknown.

        See Also
        --------
        predict_proba : Probabilities, averaged over the posterior.
        sklaplace.dirichlet.interval : Intervals of the probabilities.
        sklaplace.plotting.DirichletDisplay : The density of one prediction.

        Notes
        -----
        With ``pred_type="nn"``, the method approximates a Gaussian with the mean and
        covariance of the drawn logits.

        ``"projection"`` needs covariances between classes and costs O(K³) per sample:
        about 10 microseconds for 10 classes, half a millisecond for 100, and 40
        milliseconds for 1,000. If there are more than 100 classes and the weights of a
        last linear layer are uncertain, it uses the covariances among the 16 most
        probable classes only, and treats all other logits as independent. This takes
        two passes through the network, and about 1.5 milliseconds for 1,000 classes.
        ``"bridge"``, ``"bridge_norm"`` and ``"bridge_norm_published"`` need only
        variances, and cost O(K) per sample.

        The concentrations from a Laplace bridge grow with the confidence and with the
        size of the logits, so their sum does not detect out-of-distribution samples.
        The mean of the Dirichlet distribution from a bridge hardly depends on the size
        of the variances of the logits.

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

    def predict_uncertainty(self, X: Inputs, method: str | None = None) -> np.ndarray:
        """Compute the total, aleatoric and epistemic uncertainty of the label.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        method : str, optional
            Distribution over class probabilities. The values of ``dirichlet_approx``
            select a Dirichlet distribution in closed form, and ``"mc"`` selects
            ``n_samples`` draws. If None, use ``dirichlet_approx``, or ``"mc"`` if all
            predictions use draws (as with ``pred_type="nn"``).

        Returns
        -------
        ndarray of shape (n, 3), (n, n_labels, 3) or (n, 3, ...)
            Entropies in nats: total, aleatoric (expected entropy if the probabilities
            were known) and epistemic (mutual information of label and weights). The
            total entropy is the sum of the aleatoric and the epistemic entropy, and is
            at most ``log K``.

        Raises
        ------
        ValueError
            If the method is unknown.

        See Also
        --------
        score_samples : Score that detects samples unlike the training data.
        sklaplace.plotting.UncertaintyDisplay : Plot of the uncertainties over a plane.

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
        is_gaussian = self._outputs().model.is_gaussian
        if method is None:
            method = self.dirichlet_approx if is_gaussian else "mc"
        check_option("method", method, ["mc", *dirichlet.APPROXIMATIONS])
        entropies = self._entropies(X, method)
        return self._targets.target_type.unflatten(entropies)

    def score_samples(self, X: Inputs) -> np.ndarray:
        """Return the negative epistemic uncertainty, lower for unusual samples.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to score.

        Returns
        -------
        ndarray of shape (n,)
            Negative mutual information of label and weights, in nats, estimated from
            draws, and averaged if there are several labels. See `predict_uncertainty`.

        See Also
        --------
        predict_uncertainty : Also returns total and aleatoric uncertainty.
        sklaplace.metrics.ood_auroc : How well the score detects out-of-distribution
            samples.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import DeepEnsembleClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = DeepEnsembleClassifier(n_estimators=2, random_state=0).fit(X, y)
        >>> model.score_samples(X[:3]).shape
        (3,)
        """
        # after the total and the aleatoric entropy
        epistemic = self._entropies(X, "mc")[:, 2]
        return -epistemic.reshape(count_rows(X), -1).mean(1)

    def predict_set(
        self,
        X: Inputs,
        q: float = 0.05,
        k_max: int = 10,
        *,
        reference: str = "top",
        method: str | None = None,
        categories: ArrayLike | None = None,
    ) -> np.ndarray:
        """Predict all classes that could plausibly be the most probable class.

        A set has one class for confident predictions, and several classes for uncertain
        predictions (uncertainty-aware top-k). A set contains a class if an upper
        quantile of its probability is at least as large as a lower quantile of the
        probability of the top class. Only ``method="conformal"``, which requires a call
        to `conformalize`, guarantees coverage. A conformal set contains the top class,
        and all other classes that are sufficiently probable. For conformal sets,
        ``k_max`` and ``reference`` are ignored.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Samples to predict.
        q : float, default=0.05
            Tail probability of both quantiles. Larger values lead to smaller sets. For
            conformal sets, ``1 - q`` is the guaranteed coverage.
        k_max : int, default=10
            Maximum number of classes in a set. There is no maximum for conformal sets.
        reference : {"top", "previous"}, default="top"
            Class to compare each class with: the top class (``"top"``), or the
            preceding class in descending order of probability (``"previous"``, also
            called "next class"), which leads to larger sets.
        method : str, optional
            Method to use instead of ``dirichlet_approx``: one of its values, or
            ``"conformal"``.
        categories : array-like of shape (n,), optional
            Category of each sample, if `conformalize` received categories. Conformal
            sets then have the coverage within each category.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels, 2) or (n, K, ...)
            Boolean mask of the sets, with columns in the order of ``classes_``. Each
            set has at least one class.

        Raises
        ------
        ValueError
            If an option is invalid, if conformity scores are missing or too few for the
            coverage, or if categories are missing, unknown or of no use.

        See Also
        --------
        conformalize : Explains the guarantee of conformal sets.
        predict_top_k : A fixed number of classes.
        sklaplace.dirichlet.plausible_classes : The rule for any Dirichlet distribution.

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
        q, k_max = check_set(q, k_max, reference)
        if method == "conformal":

            def members(conformal: Conformal, samples: Inputs) -> np.ndarray:
                models = conformal.models or [self]  # those of folds, if there are any
                scores = [self._class_scores(model, samples) for model in models]
                return conformal.members(scores, 1 - q)

            is_member = self._predict_conformal(X, categories, members)
            # add the top class: otherwise, a set could be empty
            top = self.predict_proba(X).argmax(axis=1)[:, None]
            np.put_along_axis(is_member, top, True, axis=1)
            return is_member
        check_no_categories(categories)
        alpha = self._concentrations(X, method)
        is_member = dirichlet.plausible_classes(alpha, q, k_max, reference)
        return self._targets.target_type.unflatten(is_member)

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of classifiers, with those of the criterion.

        Likelihoods without the attribute ``multi_target`` support several labels.
        """
        tags = super().__sklearn_tags__()
        likelihood = self.likelihood or likelihood_of(inner_net(self.estimator))
        multi_target = getattr(likelihood, "multi_target", "multilabel")
        tags.classifier_tags.multi_label = multi_target == "multilabel"
        tags.input_tags.three_d_array = True
        tags.input_tags.sparse = True
        return tags


# The functions of batches below do not refer to the estimator, so that workers receive
# the values that they need, but no networks.
def _apply_to_logits(
    likelihood: ClassificationLikelihood,
    function: Callable[..., Tensor],
    mean: Tensor,
    cov: Tensor,
    *among: Tensor,
) -> tuple[Tensor]:
    """Convert moments of outputs to those of class logits, and apply a function.

    ``among`` are any further arguments of the function; see `map_gaussian`.
    """
    return (function(*likelihood.class_logits(mean, cov), *among),)


def normals(n_samples: int, seed: int, like: Tensor) -> Tensor:
    """Return fixed standard-normal points (s, K) for logits (b, K)."""
    return cached_sobol_normals(n_samples, like.shape[1], seed).to(like)


def _proba_of_draws(likelihood: ClassificationLikelihood, draws: Tensor) -> Tensor:
    """Return the probabilities (b·r, K, s) of r labels for drawn outputs (b, c, s)."""
    proba = likelihood.probabilities(draws.mT)  # (b, s, K) or (b, s, r, K)
    by_label = proba.movedim(1, -1)
    return by_label.reshape(-1, *by_label.shape[-2:])


def _mean_proba(
    likelihood: ClassificationLikelihood,
    n_classes: int,
    reduce: Reduction,
    draws: Tensor,
) -> Tensor:
    """Return the reduced probabilities, averaged over draws (b, c, s) of outputs."""
    proba = _proba_of_draws(likelihood, draws).mean(-1)
    return reduce(normalised(proba, n_classes))


def _sampled_entropies(n_samples: int, seed: int, mean: Tensor, cov: Tensor) -> Tensor:
    """Return entropies (b·r, 3) under Gaussian logits, estimated from draws."""
    return mc_uncertainty(mean, cov, normals(n_samples, seed, mean))


def _entropies_of_draws(likelihood: ClassificationLikelihood, draws: Tensor) -> Tensor:
    """Return entropies (b·r, 3) under drawn outputs (b, c, s)."""
    return uncertainty_of_draws(_proba_of_draws(likelihood, draws))


def _largest(k: int, proba: Tensor) -> Tensor:
    """Return the columns and values of the k largest entries of each row, (b, k, 2).

    The entries are sorted in descending order, and tied entries by column. The order of
    ties in ``topk`` is not defined, so it yields only the k-th largest value. NumPy
    then sorts the candidates, which have at least this value.
    """
    values = np.ascontiguousarray(proba.cpu().numpy())
    lowest = torch.from_numpy(values).topk(k, -1).values[:, -1].numpy()
    columns = np.empty((len(values), k), dtype=np.intp)
    for n, (row, limit) in enumerate(zip(values, lowest, strict=True)):
        candidates = np.flatnonzero(row >= limit)  # more than k with ties
        columns[n] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
    pairs = columns.astype(np.float64), np.take_along_axis(values, columns, 1)
    return torch.from_numpy(np.stack(pairs, -1))
