"""How Sphinx builds these pages. `make docs` turns every warning into an error, and needs no network."""

from sphinx.application import Sphinx

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
    ("py:.*", r"(torch|numpy|transformers|abc|collections|concurrent|pathlib|contextlib|threading|enum)\..*"),
    ("py:class", r"(PreTrained\w+|StoreView)"),
    # what only the library itself passes to its constructors
    ("py:class", r"agentmem\.(_lmdb|adapter|checkpoints|crowd|explain\.live|ledger|tiers|branch\.BranchOwner).*"),
    # type variables
    ("py:.*", r"agentmem\.(session\.T|editing\.BranchT)"),
    (
        "py:class",
        r"agentmem\.(batch\.batch\.Member|verbs\.Verbs|hinting\.Hinting|config\.Resident|sinking\.SinkReport|kv\.record\.Record)",
    ),
    # the protocols that a session and a branch satisfy
    ("py:.*", r"agentmem\.search\.protocols\..*"),
    # a default of <factory> cannot be parsed, so Sphinx cuts the signature at its commas
    ("py:class", r"(~agentmem\..*|dict|tuple)\[.*"),
]

copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"agentmem {version}"
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Keep napoleon from taking the words before a colon, in a property's first line, for its type."""
    app.connect("autodoc-process-docstring", _shield_first_line, priority=400)  # before napoleon's 500


def _shield_first_line(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]  # an empty comment
