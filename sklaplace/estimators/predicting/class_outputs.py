"""Results of a classifier for each sample, computed batch by batch.

Probabilities of all classes of all samples are not in memory at once.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.core.checks import check_count
from sklaplace.dirichlet.links import mc_uncertainty, uncertainty_of_draws
from sklaplace.estimators.targets.classes import ClassTargets

# From more classes on, the most probable one is found batch by batch.
MANY_CLASSES = 1024


def without_variance(predict: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of a classifier refuse options of a regressor, in words."""

    @wraps(predict)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        for name in {"return_std", "return_cov"} & options.keys():
            raise TypeError(
                f"{predict.__name__} of {type(self).__name__} has no {name}, which is "
                "an option of regressors. The uncertainty of labels is returned by "
                "predict_uncertainty(X), the variance of logits by "
                "latent_mean_and_variance(X)."
            )
        return predict(self, *args, **options)

    return checked


def are_many(model: Any) -> bool:
    """Whether each sample has one label, of so many that batches are reduced."""
    check_is_fitted(model)
    targets: ClassTargets = model._targets
    return targets.target_type.is_single and targets.n_classes > MANY_CLASSES


def check_top(model: Any, k: Any) -> int:
    """Return the number of classes, at most all; raises where there is no order."""
    check_is_fitted(model)
    check_count("k", k)
    if not model._targets.target_type.has_class_names:
        raise ValueError(
            "y in fit is a matrix of labels that are 0 or 1, which are predicted one "
            "by one: there is no order of classes. Use predict_proba, whose columns "
            "are the labels."
        )
    return min(int(k), model._targets.n_classes)


def top_classes(model: Any, X: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers and probabilities of the k most probable classes, (n·r, k)."""

    def of_batch(proba: Tensor) -> Tensor:
        rows = np.ascontiguousarray(proba.cpu().numpy())
        columns, values = largest(model._normalised(rows), k)
        return torch.stack([torch.from_numpy(columns).double(), values], -1)

    found = model._map_proba(X, of_batch)
    return found[..., 0].astype(np.intp), np.ascontiguousarray(found[..., 1])


def largest(values: np.ndarray, k: int) -> tuple[np.ndarray, Tensor]:
    """Return columns (n, k) and entries (n, k) of the k largest of each row.

    In descending order; of equal ones the first.
    """
    lowest = torch.from_numpy(values).topk(k, -1).values[:, -1].numpy()
    columns = np.empty((len(values), k), dtype=np.intp)
    for n, (row, limit) in enumerate(zip(values, lowest, strict=True)):
        candidates = np.flatnonzero(row >= limit)
        columns[n] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
    return columns, torch.from_numpy(np.take_along_axis(values, columns, 1))


def log_proba_of(targets: ClassTargets, proba: np.ndarray, y: Any) -> np.ndarray:
    """Return the log-probability of the labels of each sample, (n,); finite."""
    labels = targets.check(y)
    known = ~targets.is_ignored(labels)
    codes = targets.target_type.encode(labels[known], targets.classes)
    chosen = proba[known.ravel()][np.arange(len(codes)), codes.ravel()]
    found = np.zeros(labels.shape)
    found[known] = np.log(np.maximum(chosen, np.finfo(np.float64).tiny))
    return found.reshape(len(labels), -1).sum(1)


def entropies(model: Any, X: Any, method: str) -> np.ndarray:
    """Return total, aleatoric and epistemic entropy of each label, (n·r, 3)."""
    if method == "mc":
        found = _entropies_of_draws(model, X)
    else:
        found = dirichlet.uncertainty(model._concentrations(X, method))
    if model._targets.n_classes == 1:  # a network with one logit has two
        found = np.zeros_like(found)
    return found


def _entropies_of_draws(model: Any, X: Any) -> np.ndarray:
    """Return total, aleatoric and epistemic entropy by draws, (n·r, 3)."""
    outputs = model._outputs
    outputs.model.check_draws(2)
    X = model._check_inputs(X)
    if not outputs.model.is_gaussian:
        return outputs.map_draws(
            X, lambda draws: uncertainty_of_draws(model._proba_of_draws(draws))
        ).numpy()
    (found,) = outputs.map_gaussian(
        X,
        model._of_logits(lambda m, c: mc_uncertainty(m, c, model._sobol_normals(m))),
        diagonal=model._needs_variances_only(False),
        centred=model._likelihood.is_shift_invariant,
    )
    return found
