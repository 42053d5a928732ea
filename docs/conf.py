"""Sphinx settings of the documentation site: `make docs` builds it from the Markdown pages into build/site.

The pages are written for GitHub too, so they hold no Sphinx directives. This file adds the navigation, and it replaces
links to folders, which a site cannot show.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
with (ROOT / "pyproject.toml").open("rb") as file:
    PROJECT = tomllib.load(file)["project"]

project = "quantkit"
release = PROJECT["version"]
copyright = "the quantkit authors"
html_title = f"quantkit {release}"

extensions = ["myst_parser"]
# The source folder is the repository, so that links between the README and the pages work as on GitHub.
include_patterns = [*(f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "bench/README"))]
include_patterns += ["docs/**.md", "bench/results/*.md"]
exclude_patterns = [".*", "build", "dist", "demo-output", "quantkit"]
root_doc = "docs/index"
nitpicky = True
smartquotes = False  # -- and quotes in prose are often those of a command
myst_heading_anchors = 4  # GitHub's anchors
myst_links_external_new_tab = False

html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "friendly", "monokai"

REST = "*"  # the pages of the folder that are not listed, by name
# The pages below a page, by caption.
NAVIGATION: dict[str, dict[str, list[str]]] = {
    "docs/index": {
        "Start": ["Home <self>", "Install and first steps </README>"],
        "Convert": ["methods/index", "formats", "artifact", "gpu", "sweeps"],
        "Evaluate": ["evaluating/index", "engines", "/bench/results/README"],
        "Serve and publish": ["serving", "publishing"],
        "Reference": ["commands", "api", "troubleshooting", "glossary", "/CHANGELOG"],
        "Contribute": [
            *("/CONTRIBUTING", "contributing/architecture", "contributing/add-a-method", "contributing/add-a-format"),
            *("contributing/add-an-engine", "contributing/add-a-figure", "contributing/testing", "/bench/README"),
            "decisions/index",
        ],
    },
    "docs/methods/index": {
        "": [
            *("gptq", "awq", "rtn", "nf4", "int8", "fp8", "ctranslate2", "gguf", "gguf-types", "gguf-architectures"),
            *("float", "keep", "calibration", "bits-by-layer", REST),
        ],
    },
    "docs/evaluating/index": {
        "": ["protocols", "divergence", "speed-and-memory", "comparing", "pitfalls", REST],
    },
    "docs/decisions/index": {"": [REST]},
    "bench/results/README": {"": [REST]},
}
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
REDIRECT = '<!doctype html><title>quantkit</title><meta http-equiv="refresh" content="0; url={0}">'


def adapt(_app: Any, page: str, source: list[str]) -> None:
    """Add a page's navigation, and make links to folders fit for a site."""
    folder = (ROOT / page).parent

    def without_folder(link: re.Match[str]) -> str:
        target = folder / link[2]
        if not target.is_dir():
            return link[0]
        names = (name for name in ("index.md", "README.md") if (target / name).is_file())
        name = next(names, None)
        return f"[{link[1]}]({link[2].rstrip('/')}/{name})" if name else link[1]

    text = LINK.sub(without_folder, source[0])
    for caption, pages in NAVIGATION.get(page, {}).items():
        listed = [Path(page).name, *pages]
        rest = sorted(path.stem for path in folder.glob("*.md") if path.stem not in listed) if REST in pages else []
        options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
        names = [*(name for name in pages if name != REST), *rest]
        text += "\n\n" + "\n".join(["```{toctree}", *options, "", *names, "```"]) + "\n"
    source[0] = text


def redirect(app: Any, error: Exception | None) -> None:
    """Make the site's own index.html lead to the home page."""
    if error is None and app.builder.format == "html":
        path = app.builder.get_target_uri(root_doc)
        (Path(app.outdir) / "index.html").write_text(REDIRECT.format(path), encoding="utf-8")


def setup(app: Any) -> None:
    """Connect this file's functions to Sphinx."""
    app.connect("source-read", adapt)
    app.connect("build-finished", redirect)
