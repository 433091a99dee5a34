"""Sphinx extension: group parameters and methods, and fold the details of methods."""

import inspect
from functools import cached_property

from docutils import nodes
from public_names import members, public_objects
from sklearn.base import BaseEstimator
from sphinx import addnodes
from sphinx.errors import ExtensionError

# Parameters and methods of the estimators, in the order of the API pages
PARAMETERS = {
    "Network": """estimator likelihood class_weight normalize_y n_estimators""",
    "Posterior": """subset_of_weights subset_params hessian_structure structure_params
        curvature curvature_params refine residual temperature posterior
        posterior_params kl_weight kl_schedule bound n_snapshots steps_per_snapshot lr
        max_rank""",
    "Prior and noise": """prior_precision prior_precisions prior_structure prior_mean
        prior prior_scale prior_params sigma_noise validation_fraction cv scoring""",
    "Prediction": """pred_type n_samples link_approx dirichlet_approx""",
    "Computing": """batch_size n_jobs memory random_state verbose""",
}
METHODS = {
    "Fitting": """fit partial_fit tune recalibrate conformalize set_params""",
    "Prediction": """predict predict_proba predict_log_proba predict_top_k predict_set
        predict_score predict_interval predict_quantiles predict_uncertainty
        predict_dirichlet""",
    "Distribution of the outputs": """sample_proba sample_y sample_latent
        latent_mean_and_variance predictive""",
    "Evaluation": """score score_samples log_marginal_likelihood
        log_marginal_likelihood_value_""",
    "Export": "to_module",
}


def is_estimator(value):
    """Whether a public object is an estimator class."""
    return inspect.isclass(value) and issubclass(value, BaseEstimator)


def grouped(names, groups):
    """Sort names into groups, and drop empty groups."""
    listed = {title: text.split() for title, text in groups.items()}
    unknown = sorted(set(names).difference(*listed.values()))
    if unknown:
        raise ExtensionError(f"Add {unknown} to a group in docs/api_groups.py.")
    found = {title: [n for n in order if n in names] for title, order in listed.items()}
    return {title: group for title, group in found.items() if group}


def directives():
    """Return autodoc's directives for the members of each class, in groups."""
    found = {}
    for path, kind in public_objects().items():
        if inspect.isclass(kind):
            names = sorted(members(kind))
            groups = grouped(names, METHODS) if is_estimator(kind) else {"": names}
            found[path] = {
                title: [(directive_of(kind, name), name) for name in group]
                for title, group in groups.items()
            }
    return found


def directive_of(kind, name):
    """Return autodoc's directive for a method or property of a class."""
    member = inspect.getattr_static(kind, name)
    is_property = isinstance(member, property | cached_property)
    return "autoproperty" if is_property else "automethod"


def group_parameters(content):
    """Split the parameters of an estimator into one list per group, with a title."""
    field = next(content.findall(nodes.field))
    items = {}
    for item in field.findall(nodes.definition_list_item):
        items[item[0][0].astext()] = item
        item[0]["ids"].append(f"parameter-{item[0][0].astext().split(', ')[0]}")
    single = [name for name in items if ", " not in name]
    groups = grouped(single, PARAMETERS)
    if len(single) < len(items):
        groups["As in other estimators"] = [name for name in items if ", " in name]
    field[1].clear()
    for title, names in groups.items():
        field[1] += nodes.paragraph("", title, classes=["group"])
        field[1] += nodes.definition_list("", *(items[name] for name in names))


def fold_details(content):
    """Show the summary and the examples of a method; fold everything else."""
    body = [node for node in content if not isinstance(node, nodes.comment)]
    ends = [k for k, node in enumerate(body) if node.astext() == "Examples"]
    end = ends[0] if ends else len(body)
    summary, details, examples = body[:1], body[1:end], body[end + 1 :]
    if details:
        opening = "<details><summary>Parameters and details</summary>"
        details.insert(0, nodes.raw("", opening, format="html"))
        details.append(nodes.raw("", "</details>", format="html"))
    content[:] = [*summary, *examples, *details]


def arrange(app, doctree):
    """Arrange the description of each class on an API page."""
    for desc in doctree.findall(addnodes.desc):
        if desc["objtype"] in {"method", "property"}:
            fold_details(desc[-1])
        elif is_estimator(public_objects().get(desc[0]["ids"][0])):
            group_parameters(desc[-1])


def setup(app):
    """Register the extension."""
    app.add_js_file("unfold.js")
    app.connect("doctree-read", arrange)
