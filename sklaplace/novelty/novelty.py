"""Novelty: dissimilarity of a sample to the training data, in tail probabilities.

Each sample has several quantities that are larger for unusual samples:

* the leverages of the last-layer features, for a small and for a large ridge, relative
  to the training samples of the predicted class;
* the leverage of the inputs and the distance from the nearest training input, if the
  inputs are an array of real numbers: a table or images, see `input_shape`;
* in classification, the network's indecision between the classes and its energy.

A normal distribution is fitted to the logarithm of each quantity on the training
samples, leave-one-out. ``score_samples`` is the sum of the logarithms of the tail
probabilities, in regression without the leverage of the inputs. The residual uses the
leverages only, or, without arrays of inputs, the leverages and the indecision.

In regression, leverages are relative to all training samples, and features have a
single ridge. This is also the case in classification if the mean features of all
classes take up too much memory.

References: Mukhoti, Kirsch, van Amersfoort, Torr and Gal (2023), "Deep deterministic
uncertainty: a new simple baseline" (feature density and entropy of the classes); Liu,
Wang, Owens and Li (2020), "Energy-based out-of-distribution detection"; Sun, Ming, Zhu
and Li (2022), "Out-of-distribution detection with deep nearest neighbors"; Fisher
(1932), "Statistical methods for research workers" (sum of the logarithms of tail
probabilities). `leverage` lists more references.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.core.serialise import FieldsOnly
from sklaplace.likelihoods import Likelihood
from sklaplace.novelty.batch import FeatureBatch, check_input_shape
from sklaplace.novelty.distance import Distance, NearestInput
from sklaplace.novelty.leverage import FeatureMoments, Leverage
from sklaplace.novelty.scale import Scale, ZScores, finite_moments

# Ridges ε as fractions of the mean eigenvalue of W. The small ridge detects deviations
# in directions where features hardly vary; the large ridge measures the distance to the
# group's mean.
RIDGES = 1e-3, 1.0
# Fraction of the samples whose leverages count as usual, for classes and for numbers.
# In regression, a residual near the data would widen all intervals.
USUAL_CLASSES, USUAL_NUMBERS = 0.95, 0.99
# Minimum number of samples for a `Scale`. Training samples count for the samples that
# are missing from the held-out samples.
MIN_SAMPLES = 20
# Ridges for rows of a table, whose columns are standardised, and for other inputs, such
# as images. The values of an image have the same unit, and a small ridge would make
# noise in rarely used pixels unusual.
ROW_RIDGE, IMAGE_RIDGE = 1e-2, 1.0


@dataclass(frozen=True)
class Novelty(FieldsOnly):
    """Dissimilarity of a sample to the training data.

    Attributes
    ----------
    likelihood : Likelihood
        Likelihood of the targets given the outputs.
    moments : FeatureMoments
        Feature sums over the training samples.
    input_moments : FeatureMoments
        Input sums over the training samples.
    samples : FeatureBatch
        Some training samples, for comparison.
    held_out : Scale or None
        Scale of the z-scores of held-out samples, if there are any.
    """

    likelihood: Likelihood
    moments: FeatureMoments
    input_moments: FeatureMoments
    samples: FeatureBatch
    held_out: Scale | None = None

    @classmethod
    def of(cls, likelihood: Likelihood, batch: FeatureBatch) -> "Novelty":
        """Build the novelty from a first batch."""
        features, inputs = batch.moments("features"), batch.moments("inputs")
        return cls(likelihood, features, inputs, batch.subsample())

    def batch(self, features: Tensor, f: Tensor, x: object) -> FeatureBatch:
        """Return new samples with features (b, i), outputs (b, c) and inputs ``x``.

        Raises
        ------
        ValueError
            If features or inputs have other shapes than in training.
        """
        check_input_shape(x, self.samples.input_shape)
        batch = FeatureBatch.of(self.likelihood, features, f, x)
        if batch.features.shape[1:] != self.samples.features.shape[1:]:
            raise ValueError(
                f"The last layer received {features.shape[1]} features per sample, "
                f"and {self.samples.features.shape[1]} in fit. Pass X in the same "
                "format as in fit, or use residual='none'."
            )
        return batch

    def without_inputs(self) -> "Novelty":
        """Return the novelty without inputs."""
        samples = self.samples.without_inputs()
        inputs = samples.moments("inputs")
        return Novelty(self.likelihood, self.moments, inputs, samples)

    def merged(self, other: "Novelty") -> "Novelty":
        """Merge this novelty with the novelty of other training samples.

        Sums are added, and the samples for comparison are chosen anew from both. Inputs
        with different shapes, such as rows padded per batch, are left out.
        """
        if self.samples.input_shape != other.samples.input_shape:
            self, other = self.without_inputs(), other.without_inputs()
        return replace(
            self,
            moments=self.moments.merged(other.moments),
            input_moments=self.input_moments.merged(other.input_moments),
            samples=self.samples.joined(other.samples).subsample(),
        )

    @cached_property
    def leverage(self) -> Leverage:
        """Leverage of features relative to the training samples.

        With a single group, only the small ridge is used, because the distance from the
        overall mean does not indicate novelty if the classes surround this mean.
        """
        has_classes = self.samples.n_groups > 1
        return Leverage(self.moments, RIDGES if has_classes else RIDGES[:1])

    @cached_property
    def _input_leverage(self) -> Leverage | None:
        """Leverage of the inputs, or None if they are not an array.

        Only columns of a table are standardised, as the values of an image have the
        same unit.
        """
        shape = self.samples.input_shape
        if not shape:
            return None
        is_table = len(shape) == 1
        ridge = ROW_RIDGE if is_table else IMAGE_RIDGE
        return Leverage(self.input_moments, (ridge,), standardises=is_table)

    @cached_property
    def distances(self) -> list[Distance]:
        """Leverages of the features and, if there are any, of the inputs."""
        distances = [Distance("features", self.leverage, self.samples)]
        if self._input_leverage is not None:
            distances.append(Distance("inputs", self._input_leverage, self.samples))
        # all leverages are infinite if every sample is alone in its group
        return [d for d in distances if d.training_logs.isfinite().any()]

    @cached_property
    def nearest(self) -> NearestInput | None:
        """Distance from the nearest training input, if the inputs are an array."""
        if self._input_leverage is None:
            return None
        nearest = NearestInput(self._input_leverage, self.samples.inputs)
        return nearest if nearest.training_logs.isfinite().any() else None

    @cached_property
    def _training_quantities(self) -> Tensor:
        """Quantities (n, q) of the training samples, leave-one-out; see `_quantities`.

        Logits have no leave-one-out values, so those of the network are used.
        """
        logs = [distance.training_logs for distance in self.distances]
        logs.append(self.samples.logit_terms)
        if self.nearest is not None:
            logs.append(self.nearest.training_logs)
        return torch.cat(logs, 1)

    def _quantities(self, batch: FeatureBatch, *, with_nearest: bool = True) -> Tensor:
        """Return the quantities (b, q) of new samples; see the module's docstring.

        In order: log leverages of the features and of the inputs, indecision and
        energy, and the log distance from the nearest training input, if there are any.
        """
        logs = [distance.logs(batch) for distance in self.distances]
        logs.append(batch.logit_terms)
        if with_nearest and self.nearest is not None:
            logs.append(self.nearest.logs(batch))
        return torch.cat(logs, 1)

    @cached_property
    def moments_of_logs(self) -> tuple[Tensor, Tensor]:
        """Means (q,) and standard deviations (q,) of the training quantities."""
        return finite_moments(self._training_quantities, self.samples.weights)

    @cached_property
    def n_residual_terms(self) -> int:
        """Number of quantities that the residual uses, starting with the first.

        These are the leverages and, without arrays of inputs, the indecision.
        """
        n_leverages = sum(len(d.leverage.ridges) for d in self.distances)
        is_classification = self.likelihood.is_classification
        takes_indecision = is_classification and not self.samples.input_shape
        return n_leverages + takes_indecision

    @cached_property
    def scale(self) -> Scale:
        """Scale of held-out samples, otherwise of training samples."""
        return self.held_out or Scale.of(self._training_scores, self._usual_share)

    @property
    def _usual_share(self) -> float:
        is_classification = self.likelihood.is_classification
        return USUAL_CLASSES if is_classification else USUAL_NUMBERS

    @cached_property
    def _training_scores(self) -> ZScores:
        """Z-scores of training samples, leave-one-out, without infinite ones."""
        mean, std = self.moments_of_logs
        z = ((self._training_quantities - mean) / std)[:, : self.n_residual_terms]
        is_finite = z.isfinite().all(1)
        return ZScores(z[is_finite], self.samples.weights[is_finite])

    def z_scores(self, batch: FeatureBatch) -> Tensor:
        """Return the standardised quantities for the residual, (b, q)."""
        n_terms, (mean, std) = self.n_residual_terms, self.moments_of_logs
        # the residual does not use the distance from the nearest training input
        quantities = self._quantities(batch, with_nearest=False)[:, :n_terms]
        return (quantities - mean[:n_terms]) / std[:n_terms]

    def log_ratios(self, batch: FeatureBatch) -> Tensor:
        """Return ``log p₀/p`` (b,) for the tail probabilities p; see `Scale`."""
        return self.scale.log_ratios(self.z_scores(batch))

    def scaled(self, held_out: list[ZScores]) -> "Novelty":
        """Return a copy whose scale is estimated from the scores of held-out samples.

        Held-out samples can have larger leverages than training samples, because the
        network was fitted to the training samples. The scores of held-out samples may
        have been computed with other, similar networks.

        With fewer than `MIN_SAMPLES` held-out samples, the training samples count for
        the samples that are missing.
        """
        # scores of networks of folds can be of other quantities, such as without the
        # leverage of inputs, and are left out
        held_out = [z for z in held_out if z.values.shape[1] == self.n_residual_terms]
        if not held_out:
            return self
        training, weights = self._training_scores, [z.weights for z in held_out]
        # together, the training samples count for the missing held-out samples
        n_missing = (MIN_SAMPLES - torch.cat(weights).sum()).clamp(min=0)
        training_weights = n_missing * (training.weights / training.weights.sum())
        scores = ZScores(
            torch.cat([training.values, *(z.values for z in held_out)]),
            torch.cat([training_weights, *weights]),
        )
        return replace(self, held_out=Scale.of(scores, self._usual_share))

    def mean_leverage(self) -> Tensor:
        """Return the mean leverage of the training samples' features, ()."""
        samples = self.samples
        values = self.leverage(samples.features, samples.groups)[:, 0]
        return samples.weights @ values / samples.weights.sum()

    @cached_property
    def target_variances(self) -> Tensor:
        """Variances of the targets of the training samples, (c,)."""
        weights = self.samples.weights / self.samples.weights.sum()
        targets = self.samples.targets
        return weights @ (targets - weights @ targets) ** 2

    def log_tail_probability(self, features: Tensor, f: Tensor, x: object) -> Tensor:
        """Return scores (b,) of features (b, i), outputs (b, c) and inputs, float64.

        A score is a sum of logarithms of tail probabilities. A higher score means that
        the sample is more similar to the training data. Training samples define all
        scores, so that neither the prior nor held-out samples change them.
        """
        mean, std = self.moments_of_logs
        quantities = self._quantities(self.batch(features, f, x))
        # the upper tail: a quantity is larger for unusual samples
        log_tails = torch.special.log_ndtr((mean - quantities) / std)
        if not self.likelihood.is_classification:
            # The leverage of the inputs hides new categories. It comes second, after
            # the leverage of the features (one ridge) and before the distance from the
            # nearest training input. In regression, the residual uses the leverages.
            first_other = self.n_residual_terms
            log_tails = log_tails[:, [0, *range(first_other, log_tails.shape[1])]]
        return log_tails.sum(1)
