"""How the site is made: `make docs` writes build/docs/index.html from the Markdown pages here and from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

sys.path.insert(0, str(Path(__file__).parent))  # for the directive of our own

from snows.version import __version__

project = "snows"
author = "The snows developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "command_pages"]
html_theme = "furo"
html_title = f"snows {release}"
html_show_copyright = False
html_static_path, html_css_files = ["static"], ["snows.css"]
highlight_language = "text"  # of blocks that name none: lines for a shell
pygments_style, pygments_dark_style = "tango", "monokai"

smartquotes = False  # --out stays two hyphens
default_role = "code"  # docstrings write `name`

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3  # sections can be linked to, as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80  # longer ones have a line for each parameter

html_math_renderer = "mathml"


def setup(app: Sphinx) -> None:
    """Formulas become MathML, which browsers draw themselves: the site loads nothing from elsewhere."""
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_formula, None))


def _inline_formula(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _formula(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode
