"""Configuration of the documentation site, built by ``make docs``."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import vllm_relay  # noqa: E402

project = "vllm-relay"
version = release = vllm_relay.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "vllm-relay"
# Links to sections, as in the repository.
myst_heading_anchors = 3
autodoc_typehints = "signature"


def attach_pages(app: Any, name: str, source: list[str]) -> None:
    """Links to pages outside this folder become links to their files, which the site attaches."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(?:#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", attach_pages)
