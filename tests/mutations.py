"""Mistakes that the tests must detect.

``python tests/mutations.py`` makes each mistake in a copy of the repository and runs
the tests that should fail. The script prints one line per mistake. It returns 1 if the
tests miss a mistake, or if the text to replace no longer exists. Words after the
command select the mistakes whose description contains one of the words.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = "sklaplace", "tests", "pyproject.toml", "README.md"
FAILED = 1  # of pytest's exit codes, that of failed tests


@dataclass(frozen=True)
class Mutation:
    """A text that occurs once in a file, its replacement, and the tests that notice."""

    mistake: str
    file: str
    text: str
    instead: str
    tests: str

    def count(self, root: Path) -> int:
        """Return how often the text occurs."""
        path = root / self.file
        return path.read_text().count(self.text) if path.exists() else 0


MUTATIONS = [
    Mutation(
        "diagrams linked to the module of an estimator instead of its page",
        "sklaplace/estimators/base.py",
        "sklaplace.{name}.html",
        "{name}.html",
        "estimators/test_diagram.py::test_a_diagram_links_to_the_page_of_the_estimator",
    ),
    Mutation(
        "levels of the CRPS weighted equally",
        "sklaplace/metrics/regression.py",
        "_pinball(residuals, levels) @ np.diff(edges)",
        "_pinball(residuals, levels).mean(axis=1)",
        "metrics/test_regression.py"
        "::test_crps_weights_levels_by_the_range_that_they_stand_for",
    ),
    Mutation(
        "coverage of a category divided by the number of all samples",
        "sklaplace/metrics/coverage.py",
        "inside / divisor",
        "inside / weight.sum()",
        "metrics/test_coverage.py::test_intervals_of_each_category",
    ),
    Mutation(
        "points of the projection made in inference mode",
        "sklaplace/dirichlet/logits.py",
        "@torch.inference_mode(False)  # otherwise later gradients would fail\n",
        "",
        "dirichlet/test_projection.py::test_gradients_after_inference_mode",
    ),
    Mutation(
        "variational posteriors pickled on their GPU",
        "sklaplace/estimators/base.py",
        'moved_entries(state, _WITH_TENSORS, "cpu")',
        "dict(state)",
        "test_devices.py::test_what_was_fitted_on_a_gpu_is_stored_without_one",
    ),
    Mutation(
        "a device without float64 accepted",
        "sklaplace/estimators/options/given_net.py",
        "    check_device(net)\n",
        "",
        "networks/test_net_checks.py"
        "::test_a_device_without_float64_is_refused_before_training",
    ),
    Mutation(
        "half of the diagonal of SWAG forgotten",
        "sklaplace/posterior/swag.py",
        "(self.diagonal / 2).sqrt()",
        "self.diagonal.sqrt()",
        "posterior/test_swag.py::test_draws_have_the_moments_of_the_gaussian",
    ),
    Mutation(
        "weight decay left out of the descent",
        "sklaplace/curvature/descent.py",
        "(g + decay * leaf)",
        "g",
        "curvature/test_descent.py::test_weight_decay_of_the_optimizer",
    ),
    Mutation(
        "descent in training mode",
        "sklaplace/curvature/descent.py",
        "module.eval().requires_grad_(False)",
        "module.train().requires_grad_(False)",
        "curvature/test_descent.py::test_iterates_are_those_of_plain_descent",
    ),
    Mutation(
        "empirical Fisher doubled",
        "sklaplace/curvature/ggn.py",
        "Factored(likelihood.gradient(f, y).unsqueeze(-1))",
        "Factored(2 * likelihood.gradient(f, y).unsqueeze(-1))",
        "curvature/test_ggn.py::test_empirical_fisher_is_that_of_the_gradients",
    ),
    Mutation(
        "sampled Fisher summed over draws, not averaged",
        "sklaplace/curvature/ggn.py",
        " * float(n_draws**-0.5)",
        "",
        "curvature/test_ggn.py::test_sampled_fisher_tends_to_the_ggn",
    ),
    Mutation(
        "identity curvature without weights of single outputs",
        "sklaplace/curvature/ggn.py",
        "return unit.weigh_outputs(output_weights(likelihood, y, f.shape[1]))",
        "return unit",
        "curvature/test_ggn.py::test_identity_leaves_out_ignored_positions",
    ),
    Mutation(
        "identity curvature without the noise levels of columns",
        "sklaplace/curvature/ggn.py",
        "likelihood.hessian(f) if likelihood.has_noise else ones",
        "ones",
        "estimators/test_noise_levels.py::test_evidence_equals_a_fit_with_these_levels",
    ),
    Mutation(
        "curvature of other noise levels multiplied once, not from both sides",
        "sklaplace/curvature/structures/full.py",
        "d[:, None] * self.hessian * d",
        "d[:, None] * self.hessian",
        "estimators/test_noise_levels.py::test_evidence_is_that_of_the_dense_formula",
    ),
    Mutation(
        "the empirical Fisher of other noise levels as if of first order",
        "sklaplace/posterior/gaussian.py",
        "factors**power)",
        "factors)",
        "estimators/test_noise_levels.py::test_evidence_equals_a_fit_with_these_levels",
    ),
    Mutation(
        "noise levels without the degrees of freedom that weights take",
        "sklaplace/posterior/tuning/levels.py",
        "n - posterior.curvature_order * by_output",
        "n - 0 * by_output",
        "estimators/test_noise_levels.py"
        "::test_levels_maximise_the_evidence_of_linear_regression",
    ),
    Mutation(
        "the basis of the low-rank structure on the device of its first use",
        "sklaplace/curvature/structures/lowrank.py",
        "return self._omega.to(device)",
        "return self._omega",
        "test_devices.py::test_the_basis_of_lowrank_follows_the_device",
    ),
    Mutation(
        "inputs at several positions taken for features of a sample",
        "sklaplace/curvature/jacobian.py",
        "isinstance(first.a, Tensor)\n            and first.has_one_position\n",
        "first.a is not None\n",
        "curvature/structures/test_kron.py::test_one_sample_of_a_convolution_alone",
    ),
    Mutation(
        "exact Hessian halved",
        "sklaplace/curvature/derivatives.py",
        "return (hessian + hessian.T) / 2",
        "return (hessian + hessian.T) / 4",
        "curvature/test_ggn.py::test_exact_hessian",
    ),
    Mutation(
        "sample weights left out of the curvature",
        "sklaplace/curvature/ggn.py",
        ".weigh_samples(weights)",
        "",
        "curvature/structures/test_base.py::test_integer_weights_are_repeated_rows",
    ),
    Mutation(
        "Kronecker factor divided by batches, not samples",
        "sklaplace/curvature/structures/kron.py",
        "n = unit * (n_samples if weights is None else weights.double().sum())",
        "n = unit",
        "curvature/structures/test_kron.py::test_inputs_are_weighted_as_rows",
    ),
    Mutation(
        "Kronecker factor divided without sample weights",
        "sklaplace/curvature/structures/kron.py",
        "n = unit * (n_samples if weights is None else weights.double().sum())",
        "n = unit * n_samples",
        "curvature/structures/test_kron.py::test_inputs_are_weighted_as_rows",
    ),
    Mutation(
        "sketch of rank k without the inverse between its factors",
        "sklaplace/curvature/structures/lowrank.py",
        "factor = torch.linalg.solve_triangular(root, shifted.T, upper=False).T",
        "factor = shifted",
        "curvature/structures/test_lowrank.py",
    ),
    Mutation(
        "covariance of outputs doubled",
        "sklaplace/curvature/structures/base.py",
        "rows.gram(v)).double() * largest",
        "rows.gram(v)).double() * largest * 2",
        "posterior/test_predictive.py::test_glm_is_the_push_forward_of_the_posterior",
    ),
    Mutation(
        "draws of the weights with twice their standard deviation",
        "sklaplace/posterior/gaussian.py",
        "self.precision.sample(noise)",
        "2 * self.precision.sample(noise)",
        "curvature/structures/test_base.py::test_draws_have_the_posterior_covariance",
    ),
    Mutation(
        "draws around the network's weights, not the posterior mean",
        "sklaplace/posterior/gaussian.py",
        "return self.mean + ",
        "return self.weights + ",
        "posterior/test_gaussian.py::test_draws_are_around_the_mean_and_not_the_networks_weights",
    ),
    Mutation(
        "temperature left out of the posterior precision",
        "sklaplace/posterior/gaussian.py",
        "scale**self.curvature_order / h.temperature",
        "scale**self.curvature_order",
        "posterior/test_gaussian.py::test_temperature_scales_the_curvature_at_question_time",
    ),
    Mutation(
        "evidence without the prior's log-determinant",
        "sklaplace/posterior/gaussian.py",
        "self.logdet() - self._prior.logdet() + self.scatter()",
        "self.logdet() + self.scatter()",
        "posterior/test_gaussian.py::test_evidence_is_that_of_the_formula",
    ),
    Mutation(
        "evidence without the prior at the mean",
        "sklaplace/posterior/gaussian.py",
        "self.logdet() - self._prior.logdet() + self.scatter()",
        "self.logdet() - self._prior.logdet()",
        "posterior/test_gaussian.py::test_evidence_is_that_of_the_formula",
    ),
    Mutation(
        "refit without the prior's gradient",
        "sklaplace/posterior/linear_model.py",
        "backward(gradient).double() + rho * offset",
        "backward(gradient).double()",
        "posterior/test_linearised.py::test_the_minimum_of_the_linearised_objective",
    ),
    Mutation(
        "linearised mean without the refitted weights",
        "sklaplace/posterior/predictive.py",
        "if not posterior.is_refitted:",
        "if True:",
        "posterior/test_predictive.py::test_glm_is_the_push_forward_of_the_posterior",
    ),
    Mutation(
        "logits not centred",
        "sklaplace/dirichlet/logits.py",
        "variances = diagonal - 2 * rows + rows.mean(-1, keepdim=True)",
        "variances = diagonal.double()",
        "dirichlet/test_logits.py::test_moments_are_those_of_the_centred_gaussian",
    ),
    Mutation(
        "points of link mc with a seed for each batch",
        "sklaplace/estimators/probabilistic_classifier.py",
        "like.shape[1], seed)",
        "like.shape[1], seed + like.shape[0])",
        "estimators/test_contracts.py::test_contract"
        "[frozen: neither_batches_nor_order_matter]",
    ),
    Mutation(
        "noise left out of predictive standard deviations",
        "sklaplace/likelihoods/regression.py",
        " + self._noise_variances(noise)\n\n    def joint_moments",
        "\n\n    def joint_moments",
        "estimators/test_contracts.py::test_contract[frozen numbers: numbers_agree]",
    ),
    Mutation(
        "Bayes by Backprop without the divergence",
        "sklaplace/variational/elbo.py",
        "return nll + (factor * self.kl_weight / self._total_weight) * kl",
        "return nll + 0 * kl",
        "variational/test_elbo.py::test_loss_and_gradients_are_those_written_out",
    ),
    Mutation(
        "dropout masks drawn for each sample",
        "sklaplace/estimators/dropout.py",
        "1 if rest else n_heads",
        "shape[0]",
        "estimators/test_dropout.py",
    ),
    Mutation(
        "all networks of an ensemble from one seed",
        "sklaplace/estimators/ensemble.py",
        "int(seed)",
        "int(seeds[0])",
        "estimators/test_ensemble.py",
    ),
    Mutation(
        "key of the cache without refine",
        "sklaplace/estimators/fitting/fit_cache.py",
        ", options.refine is True)",
        ")",
        "estimators/test_memory.py::test_a_grid_over_refine",
    ),
    Mutation(
        "key of the cache without the source of classes",
        "sklaplace/core/cache.py",
        "                self.save(_code(part))",
        "                pass",
        "core/test_cache.py::test_code_counts_by_source_and_by_what_is_loaded",
    ),
    Mutation(
        "skorch net unpickled without pickle",
        "sklaplace/core/serialise.py",
        "    if isinstance(made, BaseEstimator):",
        "    if False:",
        "core/test_serialise.py::test_a_net_is_not_unpickled",
    ),
    Mutation(
        "class of any module named by a file",
        "sklaplace/core/serialise.py",
        "if is_allowed and",
        "if home and",
        "core/test_serialise.py::test_a_file_cannot_name_what_may_do_harm",
    ),
    Mutation(
        "any class called by a file",
        "sklaplace/core/serialise.py",
        "if call not in _CALLABLE and not is_class_of_user:",
        "if False:",
        "core/test_serialise.py::test_a_file_cannot_call_what_may_do_harm",
    ),
    Mutation(
        "evidence of normalised targets as that of y",
        "sklaplace/estimators/laplace.py",
        "return posterior.log_marginal_likelihood() - log_unit",
        "return posterior.log_marginal_likelihood()",
        "estimators/test_normalize_y.py::test_evidence_is_that_of_the_density_of_y",
    ),
    Mutation(
        "given noise in the units of the network",
        "sklaplace/estimators/laplace.py",
        "noise = noise / self._targets.noise_unit",
        "noise = noise / 1.0",
        "estimators/test_normalize_y.py::test_evidence_is_that_of_the_density_of_y",
    ),
]


def copied(target: Path) -> None:
    """Copy the files for the tests, but no compiled code, which hides some edits."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target / name)


def outcome(mutation: Mutation, root: Path) -> str:
    """Return ``caught``, ``missed``, or why the outcome is unknown."""
    if (n := mutation.count(root)) != 1:
        return f"found {n} times in {mutation.file}"
    path = root / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.text, mutation.instead))
    variables = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not benchmark"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{mutation.tests}"]
    try:
        run = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(before)
    if run.returncode == FAILED:
        return "caught"
    return f"pytest returned {run.returncode}" if run.returncode else "missed"


def outcomes(words: list[str]) -> Iterator[tuple[Mutation, str, float]]:
    """Yield each mutation with its outcome and its time in seconds."""
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in mutation.mistake for word in words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copied(root)
        for mutation in chosen:
            start = time.monotonic()
            yield mutation, outcome(mutation, root), time.monotonic() - start


def main(words: list[str]) -> int:
    """Print a table; return 1 if a mutation was not caught."""
    all_caught = True
    for mutation, found, seconds in outcomes(words):
        all_caught &= found == "caught"
        print(f"{found:8} {seconds:4.0f} s  {mutation.mistake}", flush=True)  # noqa: T201
    return 0 if all_caught else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
