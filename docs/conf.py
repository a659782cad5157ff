"""How Sphinx builds these pages. `make docs` turns every warning into an error, and needs no network."""

from agentmem._version import __version__

project = "agentmem"
author = "the agentmem developers"
copyright = "2026, the agentmem developers"
release = version = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build", "changelog.d"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Other projects' names cannot be resolved without the network, and there is no intersphinx for that reason.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|transformers|collections|concurrent|pathlib|contextlib|threading|enum)\..*"),
    # a default of <factory> cannot be parsed, so Sphinx cuts the signature at its commas
    ("py:class", r"(~agentmem\..*|dict|tuple)\[.*"),
]

copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"agentmem {version}"
html_show_sourcelink = False
