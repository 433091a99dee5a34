"""LaplaceClassifier: class probabilities that know what they do not know."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from skorch import NeuralNetBinaryClassifier
from torch import Tensor

from sklaplace import links
from sklaplace.base import BaseLaplace, unchanged_on_error
from sklaplace.data import TrainingData
from sklaplace.labelling import Labelling, labelling_of
from sklaplace.likelihoods import (
    CRITERIA,
    Bernoulli,
    Categorical,
    ClassLikelihood,
    DataFit,
    Likelihood,
)
from sklaplace.links import LINKS
from sklaplace.options import check_count, check_option
from sklaplace.posterior import GaussianPosterior
from sklaplace.simplex import SimplexPredictor

# torch's default, which is an ordinary label where nobody has asked for it
_NO_INDEX = -100


class LaplaceClassifier(ClassifierMixin, SimplexPredictor, BaseLaplace):
    """Class probabilities that know what they do not know, from a skorch net.

    A Laplace approximation: a Gaussian over (some of) the network's weights around
    their trained values. Probabilities are averaged over it, so that they become
    less certain far from the training rows. Prefer it to the network alone where
    wrong certainty costs; accuracy stays about the network's own.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``; a
        ``sklearn.frozen.FrozenEstimator`` around a net keeps its weights; None
        makes a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    subset_of_weights : {"last_layer", "all", "trainable", "subnetwork"} or list of \
            str, default="last_layer"
        Weights that are treated as random: those of the last layer, all, those with
        ``requires_grad``, single ones, or parameters by name (or by that of a module
        that contains them).
    subset_params : dict, default=None
        Options of the subset. ``subnetwork`` takes ``n_weights`` (100), and ``by``
        (``"magnitude"``, ``"swag"``, ``"variance"``, ``"random"``), which chooses them
        once the network has been trained; or ``indices``, their places in the
        flattened network.
    hessian_structure : {"kron", "diag", "full", "lowrank", "gp", "nystrom", \
            "variational"}, default="kron"
        Part of the curvature that is kept. ``full`` takes memory quadratic in the
        number of weights, ``lowrank`` that of ``rank`` networks.
    structure_params : dict, default=None
        Options of the structure. ``kron`` takes ``weight_sharing`` (``"expand"``, or
        ``"reduce"``), ``lowrank`` takes ``rank`` (100), the number of
        eigenvectors to keep, and ``tolerance`` (1e-12), the share of the largest
        eigenvalue below which they are dropped. ``gp``, ``nystrom`` and ``variational``
        take ``n_points`` (100), the number of rows that stand for all.
    curvature : {"ggn", "ggn_mc", "ef", "hessian"}, default="ggn"
        Approximation of the Hessian: the generalised Gauss-Newton matrix, the same
        by targets that the network draws, the empirical Fisher matrix, or the Hessian
        itself (``full``, and small networks, only).
    curvature_params : dict, default=None
        Options of the curvature. ``ggn_mc`` takes ``n_draws`` (10).
    prior_precision : float, array or {"auto", "validation", "marglik"}, default="auto"
        One over the prior variance of a weight. ``"marglik"`` maximises the
        evidence on training rows, ``"validation"`` the score on rows that the
        network did not see, ``"auto"`` is the second where there are such rows and
        the first otherwise. Rows are taken from ``X_val``, else from what the
        net's ``train_split`` holds out, else from ``validation_fraction``.
    prior_structure : {"scalar", "layerwise", "diag"}, default="scalar"
        One precision for all weights, one per parameter tensor, or one per weight
        (not for ``kron``).
    prior_mean : float or array of shape (P,), default=0.0
        Prior mean of the weights.
    prior : GaussianPosterior or None, default=None
        ``posterior_`` of an estimator that was fitted to an earlier task, around a
        network with the same weights: the prior is then that Gaussian, in place of
        ``prior_precision``, ``prior_structure`` and ``prior_mean``, which stay at their
        defaults, and nothing is tuned. Outputs are matched by their number. Exact for
        ``full`` and ``diag``; see the guide on the others, of which ``gp`` and
        ``lowrank`` are refused.
    refine : bool or "auto", default="auto"
        Whether the weights are refitted to the most probable ones under the prior, of
        the linearised network; predictions then use them, the network keeps its own.
        ``"auto"`` leaves that to the tuner for the last layer, and is False where
        nothing is tuned, or more weights are selected.
    temperature : float, default=1.0
        Divides the log-likelihood in the posterior; below one sharpens it.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, by label, which multiply ``sample_weight``:
        ``"balanced"`` gives all classes the same in total. Rows to tune on have them,
        too.
    validation_fraction : float, default=0.2
        Share of rows to hold out for tuning, from a net that is trained here and
        holds nothing out itself, if there are at least 50 distinct rows.
    pred_type : {"glm", "nn"}, default="glm"
        Predictive: the linearised network, or the network itself under ``n_samples``
        draws of the weights. What is tuned is tuned for the first.
    link_approx : {"auto", "mean_field", "mc", "gumbel", "probit", "sodpp", \
            "bridge", "bridge_norm"}, default="auto"
        How a Gaussian over logits becomes probabilities; see
        `sklaplace.links.choose_link` for the rule of ``"auto"``.
    dirichlet_approx : {"projection", "bridge", "bridge_norm", \
            "bridge_norm_published"}, default="projection"
        How a Gaussian over logits becomes a Dirichlet distribution: the closest one, or
        the Laplace bridge, as it is or with a correction for large variances.
    n_samples : int, default=100
        Draws of the ``"mc"`` link and of ``predict_uncertainty(X, "mc")``, and of the
        weights for ``pred_type="nn"``.
    batch_size : int or None, default=None
        Rows per batch for curvature and prediction; None fits them into a fixed
        memory budget. Results do not depend on it.
    memory : None, str, path or joblib.Memory, default=None
        Where the trained network and its curvature are kept, so that a grid search
        over prior, noise, temperature or link trains once per fold. Needs a
        ``random_state``.
    random_state : int, RandomState or None, default=None
        Seeds training, the rows held out and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

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
    log_marginal_likelihood_value_ : float
        Laplace evidence of the training rows, in nats.

    See Also
    --------
    LaplaceClassifierCV : The prior precision by cross-validation.
    LaplaceRegressor : The same for numbers, with intervals.

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

    _likelihoods: tuple[type, ...] = (Categorical, Bernoulli)
    _target_options: ClassVar[dict[str, Any]] = {"multi_output": True}
    _labelling: Labelling

    def __init__(
        self,
        estimator: Any = None,
        *,
        likelihood: Any = None,
        subset_of_weights: str | list[str] = "last_layer",
        subset_params: dict[str, Any] | None = None,
        hessian_structure: str = "kron",
        structure_params: dict[str, Any] | None = None,
        curvature: str = "ggn",
        curvature_params: dict[str, Any] | None = None,
        prior_precision: Any = "auto",
        prior_structure: str = "scalar",
        prior_mean: Any = 0.0,
        prior: Any = None,
        refine: Any = "auto",
        temperature: float = 1.0,
        class_weight: dict[Any, float] | str | None = None,
        validation_fraction: float = 0.2,
        pred_type: str = "glm",
        link_approx: str = "auto",
        dirichlet_approx: str = "projection",
        n_samples: int = 100,
        batch_size: int | None = None,
        memory: Any = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.likelihood = likelihood
        self.subset_of_weights = subset_of_weights
        self.subset_params = subset_params
        self.hessian_structure = hessian_structure
        self.structure_params = structure_params
        self.curvature = curvature
        self.curvature_params = curvature_params
        self.prior_precision = prior_precision
        self.prior_structure = prior_structure
        self.prior_mean = prior_mean
        self.prior = prior
        self.refine = refine
        self.temperature = temperature
        self.class_weight = class_weight
        self.validation_fraction = validation_fraction
        self.pred_type = pred_type
        self.link_approx = link_approx
        self.dirichlet_approx = dirichlet_approx
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.memory = memory
        self.random_state = random_state
        self.verbose = verbose

    # --------------------------------------------------------------------- fit
    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_link()
        self._check_dirichlet()

    def _check_link(self) -> None:
        check_option("link_approx", self.link_approx, ["auto", *LINKS])

    def _check_held_out(self, dataset: Any, held_out: Any) -> None:
        """Refuse targets of a split's own that are not numbered as the net's are."""
        while isinstance(held_out, torch.utils.data.Subset):
            held_out = held_out.dataset
        numbered = np.array_equal(self.classes_, np.arange(len(self.classes_)))
        if held_out is not None and held_out is not dataset and not numbered:
            raise ValueError(
                "train_split brings rows with targets of their own, which cannot be "
                f"matched with the labels {self.classes_[:5].tolist()}. Number the "
                "classes from 0, or pass X_val and y_val to fit."
            )

    def _check_loss(self, data_fit: DataFit) -> None:
        loss = float(data_fit.loss / data_fit.n_targets)
        n_options = self._n_options()
        guessing = np.log(n_options)
        if n_options > 1 and loss > 2 * guessing:
            warnings.warn(
                f"The network's training loss, {loss:.3g} nats per label, is larger "
                f"than that of guessing, {guessing:.3g}: its training has diverged or "
                "not begun. Lower the learning rate, scale the inputs or train longer.",
                UserWarning,
                stacklevel=2,
            )

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        if np.asarray(y).ndim <= 2:
            return super()._validated(X, y, reset=reset)
        X = validate_data(self, X, reset=reset, dtype=None, allow_nd=True)
        y = check_array(y, dtype=None, allow_nd=True, input_name="y")
        check_consistent_length(X, y)
        return X, y

    @property
    def _stratify(self) -> bool:
        return self._labelling.is_single

    def _labels(self, y: Any, name: str = "y") -> np.ndarray:
        """Targets as an array, as the labelling wants them."""
        return self._labelling.labels(y, name)

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        return self._labelling.adapted(likelihood)

    def _asked_likelihood(self) -> Any:
        """The likelihood given, or that of the criterion; None for unknown ones."""
        if self.likelihood is not None:
            return self.likelihood
        return CRITERIA.get(self._criterion(), (None, ""))[0]

    def _criterion(self) -> type:
        """Class of the net's criterion."""
        criterion = getattr(self._net(), "criterion", None)
        return criterion if isinstance(criterion, type) else type(criterion)

    def _encode(self, y: Any, *, reset: bool, name: str = "y") -> np.ndarray:
        """Labels as 0 … K-1, in the dtype that the criterion takes; -1 is ignored."""
        if reset:
            self._labelling = labelling_of(y, self._asked_likelihood())
        labels = self._labels(y, name)
        ignored = self._is_ignored(labels)
        if reset:
            if ignored.all():
                raise ValueError(
                    "All rows have the label that the criterion ignores. Pass some "
                    "with classes."
                )
            self.classes_ = self._classes_of(labels[~ignored])
        unknown = np.setdiff1d(labels[~ignored], self.classes_)
        if len(unknown):
            raise ValueError(
                f"{name} has labels that y in fit does not: {unknown[:5].tolist()}. "
                "Use rows of the classes that the network knows."
            )
        # what the criterion knows it by, where a row has others beside it
        index = _ignore_index(self._net())
        codes = np.full(labels.shape, -1 if index is None else min(index, -1))
        codes[~ignored] = self._labelling.codes(labels[~ignored], self.classes_)
        if reset:
            self._class_weights = self._weights_of_classes(codes[~ignored])
        return codes.astype(self._code_dtype())

    def _is_ignored(self, labels: np.ndarray) -> np.ndarray:
        """Rows that the criterion is told to ignore, (n,)."""
        none = np.zeros(labels.shape, dtype=bool)
        index = _ignore_index(self._net())
        if index is None or labels.dtype.kind not in "iuf":
            return none
        ignored: np.ndarray = labels == index
        return ignored

    def _weights_of_classes(self, codes: np.ndarray) -> np.ndarray | None:
        """``class_weight`` as an array (K,); classes without rows weigh one."""
        if self.class_weight is None:
            return None
        if not self._labelling.is_single:
            raise ValueError(
                f"class_weight={self.class_weight!r} weighs rows by their one label, "
                "and y has several. Use criterion__pos_weight (criterion__weight for "
                "maps), or sample_weight."
            )
        weights = np.ones(len(self.classes_))
        if isinstance(self.class_weight, Mapping):  # also of classes yet to come
            codes = np.arange(len(weights))
        present = np.unique(codes)
        weights[present] = compute_class_weight(
            self.class_weight,
            classes=self.classes_[present],
            y=self.classes_[codes],
        )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError(
                f"class_weight={self.class_weight!r} has entries that are not finite, "
                "or negative. Choose numbers from 0."
            )
        return weights

    def _own_weights(self, y: np.ndarray) -> np.ndarray | None:
        codes = y.astype(np.int64)
        weights: np.ndarray | None = None
        if self._class_weights is not None:
            weights = np.asarray(self._class_weights[codes])
        known: np.ndarray = (codes >= 0).reshape(len(codes), -1).max(1)
        if known.all():
            return weights
        kept = known.astype(np.float64)
        return kept if weights is None else weights * kept

    def _classes_of(self, y: np.ndarray) -> np.ndarray:
        """Labels that outputs stand for: a frozen net knows its own."""
        found = self._labelling.classes(y)
        announced = getattr(self, "_announced", None)
        if not self._labelling.has_names:
            if announced is not None and not np.array_equal(announced, found):
                raise ValueError(
                    f"classes={announced.tolist()} are not the numbers of the columns "
                    f"of y, {found.tolist()}. Leave classes out."
                )
            return found
        if announced is not None:
            found = announced
        if not self._is_frozen():
            return found
        known = _known_classes(self._net())
        if known is None or known.dtype.kind != found.dtype.kind:
            return found
        known = known[~self._is_ignored(known)]
        return known if np.isin(found, known).all() else found

    def _code_dtype(self) -> type:
        binary = (torch.nn.BCEWithLogitsLoss, torch.nn.BCELoss)
        has_floats = issubclass(self._criterion(), binary)
        return np.float32 if has_floats or not self._labelling.has_names else np.int64

    def _n_outputs(self) -> int:
        return len(self.classes_)

    def _new_net(self, data: TrainingData) -> Any:
        net = super()._new_net(data)
        if not (self._labelling.is_single or self._is_frozen()):
            _check_takes_columns(net)
        return net

    def _default_net(self, data: TrainingData) -> Any:
        return self._labelling.default_net(data, len(self.classes_))

    def _log_proba(self, posterior: GaussianPosterior) -> Any:
        link = self._link()
        likelihood = cast(ClassLikelihood, posterior.likelihood)
        tiny = torch.finfo(torch.float64).tiny

        def log_proba(mean: Tensor, cov: Tensor) -> Tensor:
            logits = likelihood.class_logits(mean, cov)
            return link(*logits).clamp(min=tiny).log()

        return log_proba

    def _link_name(self) -> str:
        self._check_link()
        check_count("n_samples", self.n_samples)  # may have been set after fit
        if self.link_approx == "auto":
            return links.choose_link(self._n_options(), self.n_samples)
        return str(self.link_approx)

    def _needs_variances_only(self) -> bool:
        return self._variances_are_enough(self._link_name() in links.DIAGONAL)

    def _link(self) -> Any:
        """The link chosen; its draws are the same for all rows and all calls."""
        name = self._link_name()

        def link(mean: Tensor, cov: Tensor) -> Tensor:
            # scrambling takes time: no points for links that use none
            draws = mean.new_empty(0, mean.shape[1])
            if name in links.SAMPLED:
                draws = self._normal_draws(mean)
            return LINKS[name](mean, cov, draws)

        return link

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> "LaplaceClassifier":
        """Add rows to the posterior; the network keeps its weights.

        The result is that of one fit on all rows around the same weights, prior and
        temperature, whatever the order. Before any fit, it is the first one.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            New rows.
        y : array-like of shape (n,)
            Their labels, of classes that are known.
        classes : array-like of shape (K,), optional
            All classes that there will be; for the first call, if ``y`` lacks some.
        sample_weight : array-like of shape (n,), optional
            Non-negative weights of the rows.

        Returns
        -------
        self : object
            The estimator.

        Raises
        ------
        ValueError
            If a label is new. The estimator is then as it was.

        Notes
        -----
        One pass over the new rows, as in ``fit``. Prior and noise are not tuned again.
        """
        if classes is not None:
            self._require_known(np.unique(classes), y)
        if hasattr(self, "posterior_"):
            if not self._is_ignored(np.asarray(y)).all():
                self._add_rows(X, y, sample_weight)
            return self
        with unchanged_on_error(self):
            self._announced = None if classes is None else np.unique(classes)
            self.fit(X, y, sample_weight)
        del self._announced
        return self

    def _require_known(self, classes: np.ndarray, y: Any) -> None:
        """Refuse labels that ``classes`` lacks, or classes other than the fitted."""
        fitted = getattr(self, "classes_", classes)
        if not np.array_equal(fitted, classes):
            raise ValueError(
                f"classes={classes.tolist()} are not those of the first call, "
                f"{fitted.tolist()}. Leave classes out, or fit anew."
            )
        labels = np.asarray(y)
        unknown = np.setdiff1d(labels[~self._is_ignored(labels)], classes)
        if len(unknown):
            raise ValueError(
                f"y has labels that classes lacks: {unknown[:5].tolist()}. List all of "
                "them."
            )

    # ----------------------------------------------------------------- predict
    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, averaged over the posterior.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            Rows sum to one; columns in the order of ``classes_``. For a matrix of
            labels: that each of them is one.
        """
        check_is_fitted(self)
        return self._labelling.probabilities(self._class_probabilities(X))

    def _class_probabilities(self, X: Any) -> np.ndarray:
        """Probabilities (n·r, K) of r labels per row; rows sum to one."""
        if self._predictive().gaussian is None:
            proba = self._averaged(X)
        else:
            proba = self._linked(X)
        return self._over_options(proba)

    def _log_proba_of(self, X: Any, y: Any) -> np.ndarray:
        """Log-probability of the labels of each row, (n,); finite."""
        labels = self._labels(y)
        known = ~self._is_ignored(labels)
        codes = self._labelling.codes(labels[known], self.classes_)
        proba = self._class_probabilities(X)[known.ravel()]
        chosen = proba[np.arange(len(codes)), codes.ravel()]
        found = np.zeros(labels.shape)
        found[known] = np.log(np.maximum(chosen, np.finfo(np.float64).tiny))
        total: np.ndarray = found.reshape(len(labels), -1).sum(1)
        return total

    def _linked(self, X: Any) -> np.ndarray:
        """Probabilities (n·r, K) of Gaussian logits."""
        diagonal = self._needs_variances_only()
        (proba,) = self._of_logits(X, self._link(), diagonal=diagonal)
        return proba

    def _averaged(self, X: Any) -> np.ndarray:
        """Probabilities (n·r, K), the mean of those under drawn weights."""
        found = self._of_draws(
            X,
            self.n_samples,
            self._seed,
            lambda draws: self._proba_of_draws(draws).mean(-1),
        )
        proba: np.ndarray = found.numpy()
        return proba

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels) or (n, K, ...)
            In nats; ``-inf`` where a probability is zero.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Most probable class under `predict_proba`.

        A net with a ``threshold`` (``skorch.NeuralNetBinaryClassifier``) keeps it.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.

        Returns
        -------
        ndarray of shape (n,), (n, n_labels) or (n, ...)
            Labels; of a matrix of labels zeros and ones.
        """
        proba = self.predict_proba(X)
        threshold = getattr(self.estimator_, "threshold", None)
        return self._labelling.decided(proba, self.classes_, threshold)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        y : array-like of shape (n,), (n, n_labels) or (n, ...)
            Their labels.
        sample_weight : array-like of shape (n,), optional
            Weights of the rows.

        Returns
        -------
        float
            Share of the rows whose labels are all right; for maps, share of the
            positions. Labels that the criterion ignores do not count.

        Raises
        ------
        ValueError
            If it ignores all of them, or y has labels of another kind than in fit.
        """
        predicted, labels = self.predict(X), self._labels(y)
        check_consistent_length(predicted, labels, sample_weight)
        known = ~self._is_ignored(labels)
        if not self._labelling.has_names:  # a row is right as a whole
            labels, known = labels.astype(predicted.dtype), known[:, 0]
        if not known.any():
            raise ValueError(
                "All labels are those that the criterion ignores, so that there is "
                "nothing to score. Pass some rows with classes."
            )
        weights = None
        if sample_weight is not None:
            rows = np.asarray(sample_weight).reshape(-1, *[1] * (known.ndim - 1))
            weights = np.broadcast_to(rows, known.shape)[known]
        found = accuracy_score(labels[known], predicted[known], sample_weight=weights)
        return float(found)

    def sample_proba(
        self, X: Any, n_samples: int = 1, random_state: Any = 0
    ) -> np.ndarray:
        """Draws of class probabilities from the posterior, joint across rows.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        n_samples : int, default=1
            Number of draws; each is one function, evaluated on all rows.
        random_state : int, RandomState or None, default=0
            Seeds the draws.

        Returns
        -------
        ndarray of shape (n, K, n_samples)
            (n, n_labels, n_samples) for a matrix of labels, and (n, K, ...,
            n_samples) for maps.

        Notes
        -----
        Memory is n_samples times the number of selected weights.
        """
        outputs = torch.as_tensor(self._sample_outputs(X, n_samples, random_state))
        drawn = self._likelihood().probabilities(
            outputs.mT
        )  # (n, s, K) or (n, s, r, K)
        proba = self._over_options(drawn.reshape(-1, drawn.shape[-1]).numpy())
        handed = self._labelling.probabilities(proba)
        by_draw = handed.reshape(*drawn.shape[:2], *handed.shape[1:])
        return np.moveaxis(by_draw, 1, -1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        kind = getattr(self._asked_likelihood(), "columns", "labels")
        tags.classifier_tags.multi_label = kind == "labels"
        return tags

    def latent_mean_and_variance(
        self, X: Any, full_cov: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the class logits.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        full_cov : bool, default=False
            Return covariances between classes, not variances alone.

        Returns
        -------
        mean : ndarray of shape (n, K)
        variance : ndarray of shape (n, K) or (n, K, K)
            For a matrix of labels: of one logit per label. For maps positions are the
            last axes.
        """

        def moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
            return self._labelling.latent(self._likelihood(), mean, cov)

        mean, variance = self._moments(X, moments, full_cov)
        return mean, variance


def _check_takes_columns(net: Any) -> None:
    """Refuse a net that skorch itself keeps to one label per row."""
    kind = type(net).__name__
    if isinstance(net, NeuralNetBinaryClassifier):
        raise ValueError(
            f"estimator is a {kind}, which takes one label per row, and y has several. "
            "Use skorch.NeuralNet with criterion=torch.nn.BCEWithLogitsLoss."
        )
    if getattr(net.train_split, "stratified", False):
        raise ValueError(
            f"The train_split of estimator, a {kind}, keeps shares of classes, which "
            "several labels per row do not have. Use skorch.NeuralNet, or "
            "train_split=None."
        )


def _ignore_index(net: Any) -> int | None:
    """Label of rows to ignore, where a net's criterion has been given one."""
    criterion = getattr(net, "criterion", None)
    if isinstance(criterion, torch.nn.Module):
        index = getattr(criterion, "ignore_index", _NO_INDEX)
        return None if index == _NO_INDEX else int(index)
    return vars(net).get("criterion__ignore_index") if net is not None else None


def _known_classes(net: Any) -> np.ndarray | None:
    """Labels that a fitted net was trained on, if it says."""
    try:
        return np.asarray(net.classes_)
    except AttributeError:
        return None
