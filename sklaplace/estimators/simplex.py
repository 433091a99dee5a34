"""SimplexPredictor: whole distributions over class probabilities, and what they say."""

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from sklaplace import dirichlet
from sklaplace.core.checks import check_option
from sklaplace.dirichlet.distribution import check_set
from sklaplace.dirichlet.links import mc_uncertainty, uncertainty_of_draws
from sklaplace.estimators.probabilities import ClassPredictor


class SimplexPredictor(ClassPredictor):
    """The part of classifiers that answers with distributions; not for direct use."""

    dirichlet_approx: str

    def _check_dirichlet(self) -> None:
        check_option(
            "dirichlet_approx", self.dirichlet_approx, dirichlet.APPROXIMATIONS
        )

    def _concentrations(self, X: Any, method: Any) -> np.ndarray:
        """Concentrations (n·r, K) of r labels per row."""
        check_is_fitted(self)
        self._check_dirichlet()
        if method is None:
            method = self.dirichlet_approx
        check_option("method", method, dirichlet.APPROXIMATIONS)
        approximate = dirichlet.APPROXIMATIONS[method]
        diagonal = self._variances_are_enough(method in dirichlet.DIAGONAL)
        (alpha,) = self._of_logits(X, approximate, diagonal=diagonal)
        # a one-logit network has a column for a class that y did not have
        return alpha[:, : self._n_options()]

    def _variances_are_enough(self, for_one_label: bool) -> bool:
        """Whether covariances between logits may be left out."""
        # labels in columns are predicted one by one
        return for_one_label or not self._labelling.has_names

    def predict_dirichlet(self, X: Any, method: str | None = None) -> np.ndarray:
        """Dirichlet distribution over class probabilities.

        `sklaplace.dirichlet` has its mean, variances, intervals, draws and more.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        method : {"projection", "bridge", "bridge_norm", "bridge_norm_published"}, \
                optional
            In place of ``dirichlet_approx``.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels, 2) or (n, K, ...)
            Concentrations; positive. Of a matrix of labels each has two: a Beta
            distribution.

        Raises
        ------
        ValueError
            If there is no such method.

        Notes
        -----
        With ``pred_type="nn"``, of the Gaussian that has mean and covariance of the
        drawn logits.

        ``"projection"`` needs covariances between classes and takes O(K³) per row:
        about 10 microseconds for 10 classes, half a millisecond for 100 and 40 for
        1,000. The bridges need variances alone, and O(K).

        Of the bridges: concentrations grow with the size of the logits as well as with
        certainty, so that their sum does not detect unknown rows, and the mean does not
        feel the size of the variances.

        References
        ----------
        Minka (2000), "Estimating a Dirichlet distribution"; MacKay (1998), "Choice of
        basis for Laplace approximation"; Hobbhahn, Kristiadi and Hennig (2022), "Fast
        predictive uncertainty for classification with Bayesian deep networks".
        """
        alpha = self._concentrations(X, method)
        return self._labelling.by_class(alpha)

    def predict_uncertainty(self, X: Any, method: str | None = None) -> np.ndarray:
        """How uncertain the label is, and how much of that data could remove.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        method : {"projection", "bridge", "bridge_norm", "bridge_norm_published", \
                "mc"}, optional
            Distribution over probabilities that is split: a Dirichlet, the parts of
            which are known in closed form, or ``"mc"``: ``n_samples`` draws. None takes
            ``dirichlet_approx``, and draws with ``pred_type="nn"``.

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

        References
        ----------
        Depeweg, Hernández-Lobato, Doshi-Velez and Udluft (2018),
        "Decomposition of uncertainty in Bayesian deep learning for efficient and
        risk-sensitive learning".
        """
        check_is_fitted(self)
        if method is None:
            self._check_dirichlet()
            method = self.dirichlet_approx if self._has_gaussian else "mc"
        check_option("method", method, ["mc", *dirichlet.APPROXIMATIONS])
        if method == "mc":
            found = self._sampled_uncertainty(X)
        else:
            found = dirichlet.uncertainty(self._concentrations(X, method))
        if self._n_options() == 1:  # of the two that a one-logit network draws
            found = np.zeros_like(found)
        return self._labelling.by_class(found)

    def _sampled_uncertainty(self, X: Any) -> np.ndarray:
        """Total, aleatoric and epistemic entropy of draws, (n·r, 3)."""
        self._check_draws(2)
        if not self._has_gaussian:
            drawn = self._of_own_draws(
                X, lambda draws: uncertainty_of_draws(self._proba_of_draws(draws))
            )
            return drawn.numpy()
        (found,) = self._of_logits(
            X,
            lambda mean, cov: mc_uncertainty(mean, cov, self._normal_draws(mean)),
            diagonal=self._variances_are_enough(False),
        )
        return found

    def predict_set(
        self,
        X: Any,
        q: float = 0.05,
        k_max: int = 10,
        *,
        reference: str = "top",
        method: str | None = None,
    ) -> np.ndarray:
        """Classes that may well be the most probable one: an uncertainty-aware top-k.

        One class where the network is sure, several where it is not. A class belongs
        to the set if its probability is, at the upper end of its distribution, at least
        that of the top class at the lower end. There is no promise of coverage: that of
        conformal prediction needs rows to calibrate on.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Rows to predict.
        q : float, default=0.05
            Tail probability of both ends; sets shrink as it grows.
        k_max : int, default=10
            Classes in a set, at most.
        reference : {"top", "previous"}, default="top"
            Whether a class is compared with the top class, or with the one before it in
            descending order ("next class"), which gives larger sets.
        method : {"projection", "bridge", "bridge_norm", "bridge_norm_published"}, \
                optional
            In place of ``dirichlet_approx``.

        Returns
        -------
        ndarray of shape (n, K), (n, n_labels, 2) or (n, K, ...)
            Boolean; True for members, of which there is one at least. Columns in the
            order of ``classes_``.

        Raises
        ------
        ValueError
            If an option has no such value.

        References
        ----------
        Hobbhahn, Kristiadi and Hennig (2022), "Fast predictive uncertainty for
        classification with Bayesian deep networks", UAI, section 4.
        """
        check_set(q, k_max, reference)
        alpha = self._concentrations(X, method)
        members = dirichlet.plausible_classes(alpha, q, k_max, reference)
        return self._labelling.by_class(members)
