"""Sphinx configuration."""

import os
import sys
from importlib.resources import files
from pathlib import Path, PurePosixPath

os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from api_groups import directives
from docutils import nodes
from sphinx_gallery.directives import imgsgnode
from sphinx_gallery.sorting import ExplicitOrder

import sklaplace

torch.set_num_threads(1)

project = "sklaplace"
author = "sklaplace developers"
copyright = "2026, sklaplace developers"
release = sklaplace.__version__
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.bibtex",
    "myst_parser",
    "api_groups",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
default_role = "literal"

# API pages
autosummary_generate = True
autosummary_context = {"public_members": directives()}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
toc_object_entries_show_parents = "hide"

# References
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"
bibtex_reference_style = "author_year"

# Publishers refuse programs that follow a DOI.
linkcheck_ignore = [r"https://doi\.org/"]

# Markdown
myst_enable_extensions = ["deflist"]

# Gallery: quickstart, tutorial, recipes in the order of a user's tasks, studies
RECIPES = (
    "plot_calibration.py",
    "plot_novelty_detection.py",
    "plot_pipeline.py",
    "plot_recalibration.py",
    "plot_active_learning.py",
    "plot_bayesian_optimisation.py",
    "plot_conformal.py",
    "plot_pretrained.py",
    "plot_transformer.py",
    "plot_multi_output.py",
    "plot_survival.py",
    "plot_time_series.py",
    "plot_gpu.py",
    "plot_save_and_load.py",
    "plot_serving.py",
    "plot_prior_path.py",
    "plot_dirichlet.py",
)
EXAMPLES = Path(__file__).parent.parent / "examples"
OTHER_EXAMPLES = sorted(
    {path.name for path in EXAMPLES.rglob("plot_*.py")} - {*RECIPES}
)
sphinx_gallery_conf = {
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("sklaplace",),
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"plot_",
    "ignore_pattern": r"(__init__|mnist)\.py",
    "capture_repr": (),
    "download_all_examples": False,
    "image_scrapers": ("matplotlib",),
    "min_reported_time": 1,
    "parallel": 2,  # scripts at a time
    "subsection_order": ExplicitOrder(
        [
            "../examples/recipes",
            "../examples/studies",
            "../examples/bayes_by_backprop",
            "../examples/laplace_bridge",
        ]
    ),
    "within_subsection_order": ExplicitOrder([*RECIPES, *OTHER_EXAMPLES]),
    "plot_gallery": "True",
    "remove_config_comments": True,
    "reset_modules": ("matplotlib",),
    "show_memory": False,
    "write_computation_times": False,
}

# HTML
html_theme = "pydata_sphinx_theme"
html_title = "sklaplace"
html_logo = html_favicon = "_static/logo.svg"
html_show_sourcelink = False
# Formulas are drawn by this one file, so that pages need no network.
mathjax_path = "tex-svg.js"
MATHJAX = files("sphinx-mathjax-offline") / "static" / "mathjax" / mathjax_path
html_static_path = ["_static", str(MATHJAX)]
html_css_files = ["sklaplace.css"]
html_js_files = ["tables.js"]
# Code has a copy button, which omits prompts; printed output has none.
copybutton_selector = (
    "div:not(.highlight-text, .sphx-glr-script-out) > div.highlight pre"
)
copybutton_exclude = ".linenos, .gp, .go"
html_theme_options = {
    "logo": {"text": "sklaplace", "alt_text": "sklaplace, start page"},
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}
html_sidebars = {
    page: []
    for page in (
        "auto_examples/*",
        "auto_examples/bayes_by_backprop/*",
        "auto_examples/laplace_bridge/*",
        "auto_examples/recipes/*",
        "auto_examples/studies/*",
        "changelog",
        "citation",
        "contributing",
        "glossary",
    )
}

# scikit-learn's pages, and labels of its user guide in docstrings that are inherited
SKLEARN = "https://scikit-learn.org/stable/modules"
SKLEARN_LABELS = {"accuracy_score": "accuracy-score", "r2_score": "r2-score"}


def link_to_sklearn(app, env, node, contnode):
    target = node["reftarget"]
    if target in SKLEARN_LABELS:
        page = f"model_evaluation.html#{SKLEARN_LABELS[target]}"
    elif target.startswith("sklearn."):
        page = f"generated/{target}.html"
    else:
        return None
    return nodes.reference("", "", contnode, refuri=f"{SKLEARN}/{page}")


def link_to_full_size(app, doctree, docname):
    """Link each image of the gallery to its file in full size."""
    if app.builder.format != "html":
        return
    folder = app.builder.get_relative_uri(docname, "index").rpartition("index")[0]
    for image in list(doctree.findall(imgsgnode)):
        uri = f"{folder}_images/{PurePosixPath(image['uri']).name}"
        link = nodes.reference("", "", refuri=uri, internal=True)
        image.replace_self(nodes.paragraph("", "", link))
        link += image


def setup(app):
    app.connect("missing-reference", link_to_sklearn)
    app.connect("doctree-resolved", link_to_full_size)
