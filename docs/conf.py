"""The site of the documentation, for Sphinx. `make docs` builds it; docs/README.md says how pages are written."""

import sys
from pathlib import Path

import tomllib

import ndpy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

project = "ndpy"
author = copyright = PROJECT["authors"][0]["name"]
version = release = ndpy.__version__

extensions = ["myst_parser", "public", "sphinx.ext.graphviz", "sphinx_click"]
exclude_patterns = ["_build", "README.md"]

# A link to a heading is #its-words, as on GitHub.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
myst_url_schemes = {"http": None, "https": None, "mailto": None}

smartquotes = False
html_theme = "furo"
html_title = f"ndpy {version}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = html_show_sourcelink = False
graphviz_output_format = "svg"
python_maximum_signature_line_length = 100
add_module_names = True
