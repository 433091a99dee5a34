"""LaplaceClassifier: class probabilities that know what they do not know."""

from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from sklaplace import dirichlet, links
from sklaplace.base import BaseLaplace
from sklaplace.data import TrainingData
from sklaplace.likelihoods import Bernoulli, Categorical, ClassLikelihood
from sklaplace.links import LINKS
from sklaplace.networks import default_classifier
from sklaplace.options import check_option
from sklaplace.posterior import GaussianPosterior

_draws = lru_cache(maxsize=8)(links.normal_draws)


class LaplaceClassifier(ClassifierMixin, BaseLaplace):
    """Laplace approximation around a skorch classifier."""

    _likelihoods = (Categorical, Bernoulli)
    _stratify = True
    _target_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        estimator: Any = None,
        *,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        curvature: str = "ggn",
        prior_precision: Any = "auto",
        prior_structure: str = "scalar",
        prior_mean: Any = 0.0,
        refine: Any = "auto",
        temperature: float = 1.0,
        validation_fraction: float = 0.2,
        pred_type: str = "glm",
        link_approx: str = "auto",
        n_samples: int = 100,
        batch_size: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.subset_of_weights = subset_of_weights
        self.hessian_structure = hessian_structure
        self.curvature = curvature
        self.prior_precision = prior_precision
        self.prior_structure = prior_structure
        self.prior_mean = prior_mean
        self.refine = refine
        self.temperature = temperature
        self.validation_fraction = validation_fraction
        self.pred_type = pred_type
        self.link_approx = link_approx
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.random_state = random_state
        self.verbose = verbose

    # --------------------------------------------------------------------- fit
    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_option("link_approx", self.link_approx, ["auto", *LINKS])

    def _encode(self, y: Any, *, reset: bool) -> np.ndarray:
        """Labels as 0 … K-1, in the dtype that the criterion takes."""
        if reset:
            check_classification_targets(y)
            self._encoder = LabelEncoder().fit(self._classes_of(np.asarray(y)))
            self.classes_ = self._encoder.classes_
        unknown = np.setdiff1d(np.asarray(y), self.classes_)
        if len(unknown):
            raise ValueError(
                f"y_val has labels that y does not: {unknown[:5].tolist()}. Tune on "
                "rows of the classes that the network knows."
            )
        codes = self._encoder.transform(y)
        return codes.astype(self._code_dtype())

    def _classes_of(self, y: np.ndarray) -> np.ndarray:
        """Labels that outputs stand for: a frozen net knows its own."""
        found = np.unique(y)
        if not self._is_frozen():
            return found
        known = _known_classes(self._net())
        if known is None or known.dtype.kind != found.dtype.kind:
            return found
        return known if np.isin(found, known).all() else found

    def _code_dtype(self) -> type:
        net = self._net()
        criterion = getattr(net, "criterion", None)
        kind = criterion if isinstance(criterion, type) else type(criterion)
        binary = (torch.nn.BCEWithLogitsLoss, torch.nn.BCELoss)
        return np.float32 if issubclass(kind, binary) else np.int64

    def _n_outputs(self) -> int:
        return len(self.classes_)

    def _default_net(self, data: TrainingData) -> Any:
        return default_classifier(
            data.X, data.y, data.sample_weight, len(self.classes_)
        )

    def _log_proba(self, posterior: GaussianPosterior) -> Any:
        link = self._link()
        likelihood = cast(ClassLikelihood, posterior.likelihood)
        tiny = torch.finfo(torch.float64).tiny

        def log_proba(mean: Tensor, cov: Tensor) -> Tensor:
            logits = likelihood.class_logits(mean, cov)
            return link(*logits).clamp(min=tiny).log()

        return log_proba

    def _link(self) -> Any:
        """The link chosen; its draws are the same for all rows and all calls."""

        def link(mean: Tensor, cov: Tensor) -> Tensor:
            n_classes = mean.shape[1]
            name = self.link_approx
            if name == "auto":
                name = links.choose_link(n_classes)
            draws = _draws(self.n_samples, n_classes, self._seed).to(mean.device)
            return LINKS[name](mean, cov, draws)

        return link

    # ----------------------------------------------------------------- predict
    def _logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        return self._likelihood().class_logits(mean, cov)

    def _likelihood(self) -> ClassLikelihood:
        return cast(ClassLikelihood, self.posterior_.likelihood)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, (n, K), averaged over the posterior."""
        link = self._link()
        (proba,) = self._collect(X, lambda m, v: (link(*self._logits(m, v)),))
        # a one-logit network has a column for a class that y did not have
        proba = proba[:, : len(self.classes_)]
        return proba / proba.sum(1, keepdims=True)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`, (n, K)."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Most probable class, (n,)."""
        proba = self.predict_proba(X)
        threshold = getattr(self.estimator_, "threshold", None)
        if threshold is not None and proba.shape[1] == 2:
            return self.classes_[(proba[:, 1] > threshold).astype(int)]
        return self.classes_[proba.argmax(1)]

    def predict_dirichlet(self, X: Any) -> np.ndarray:
        """Concentrations of a Dirichlet over class probabilities, (n, K)."""

        def bridge(mean: Tensor, cov: Tensor) -> tuple[Tensor]:
            centred = links.centre(*self._logits(mean, cov))
            return (dirichlet.laplace_bridge(*centred),)

        return self._collect(X, bridge)[0][:, : len(self.classes_)]

    def sample_proba(
        self, X: Any, n_samples: int = 1, random_state: Any = 0
    ) -> np.ndarray:
        """Joint draws of class probabilities, (n, K, n_samples)."""
        outputs = torch.as_tensor(self._sample_outputs(X, n_samples, random_state))
        proba = self._likelihood().probabilities(outputs.mT).mT
        return proba[:, : len(self.classes_)].numpy()

    def latent_mean_and_variance(
        self, X: Any, full_cov: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean (n, K) and variance (n, K) or (n, K, K) of the class logits."""

        def moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
            mean, cov = self._logits(mean, cov)
            return mean, cov if full_cov else cov.diagonal(dim1=1, dim2=2)

        mean, variance = self._collect(X, moments)
        return mean, variance


def _known_classes(net: Any) -> np.ndarray | None:
    """Labels that a fitted net was trained on, if it says."""
    try:
        return np.asarray(net.classes_)
    except AttributeError:
        return None
