"""A hook of MkDocs: the Markdown files at the root of the repository are pages of the site, too.

README.md is the index. Links are written for readers of the repository; here they are rewritten for the site,
which has all pages in one folder, and copies of other files that a page links to.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
ORIGINS = {page: name for name, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def origin(page: str) -> str:
    """The path in the repository of a page of the site."""
    return ORIGINS.get(page, f"docs/{page}")


def in_repository(link: str, page: str) -> str:
    """The path in the repository that a link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin(page)), link))


def site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def on_files(files: Files, *, config: Any) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    linked = {
        in_repository(link, file.src_uri)
        for file in files.documentation_pages()
        for link in LINK.findall((ROOT / origin(file.src_uri)).read_text())
    }
    for path in sorted(linked):
        if site_path(path).startswith("files/") and (ROOT / path).is_file():
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    return LINK.sub(lambda found: site_path(in_repository(found[1], page.file.src_uri)), markdown)
