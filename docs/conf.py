"""Sphinx configuration."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import torch

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
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.bibtex",
    "myst_parser",
]
exclude_patterns = ["_build"]
templates_path = []
default_role = "literal"

# API pages
autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# References
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"
bibtex_reference_style = "author_year"

# Gallery
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"plot_",
    "ignore_pattern": r"__init__\.py",
    "download_all_examples": False,
    "image_scrapers": ("matplotlib",),
    "min_reported_time": 1,
    "plot_gallery": "True",
    "remove_config_comments": True,
    "reset_modules": ("matplotlib",),
    "show_memory": False,
    "write_computation_times": False,
}

# HTML
html_theme = "pydata_sphinx_theme"
html_title = "sklaplace"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}
html_sidebars = {"quickstart": [], "choices": [], "changelog": [], "contributing": []}
