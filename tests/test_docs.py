"""Links between the pages of the repository lead somewhere, and the site lists all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/*/*.md")])
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_pages_have_links_to_check() -> None:
    assert {"README.md", "CONTRIBUTING.md", "architecture.md"} <= {page.name for page in PAGES}
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 50


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert listed >= {page.name for page in (ROOT / "docs").glob("*.md")}
