"""How the documentation is built; see build.sh."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]
# the networks are small; more threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import mathml  # noqa: E402
import reference  # noqa: E402

import explain  # noqa: E402

project = "explain"
author = "the authors of explain"
project_copyright = "the authors of explain, MIT licence"
version = release = explain.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = [
    "_build",
    "gallery/**/*.ipynb",
    "gallery/**/*.py",
    "gallery/**/*.md5",
    "gallery/**/*.zip",
]
# `name` in docstrings links to what has that name, and is code where nothing has
default_role = "py:obj"
nitpicky = False
suppress_warnings = ["ref.python"]  # two rooms may have a name in common

# Docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Pages
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = json.loads((ROOT / "assets" / "report" / "numbers.json").read_text("utf-8"))
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"explain {version}"
html_static_path = ["_static"]
html_css_files = ["explain.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples" / "gallery"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/\d\d_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_scrapers": ("matplotlib", "shown.scraped"),
    "capture_repr": ("_repr_html_", "__repr__"),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "min_reported_time": 3600,
    "default_thumb_file": str(HERE / "_static" / "words.png"),
    "reference_url": {"explain": None},
    "doc_module": ("explain",),
    "backreferences_dir": None,
    "matplotlib_animations": False,
    "write_computation_times": False,
    "notebook_extensions": set(),
    "ignore_repr_types": r"PIL\.|matplotlib|explain\.(explanation|result|concepts|photo_concepts)"
    r"|explain\.(render|training)",
}


def outside_links(app, page, source):  # type: ignore[no-untyped-def]
    """Files of Markdown beside docs/ are no pages: links to them give the file."""
    source[0] = re.sub(r"\]\((\.\./[^)]*\.md)\)", r"](path:\1)", source[0])


def setup(app):  # type: ignore[no-untyped-def]
    """Write the pages of the reference, and have docstrings of modules keep their tables."""
    app.connect("source-read", outside_links)
    app.add_html_math_renderer("mathml", (mathml.inline, None), (mathml.block, None))
    reference.write(HERE / "reference")
    app.connect("autodoc-process-docstring", reference.with_tables, priority=100)
    app.connect("missing-reference", reference.resolved)
    app.connect("html-page-context", reference.without_ways_back)
