"""The documentation site, as far as it can be told without building it: `make docs` does that."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_of_the_site(page):
    """Of other files, the path as code: the site does not have them."""
    text = (DOCS / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    wrong = [t for t in targets if DOCS not in (found := (DOCS / page).parent.joinpath(t).resolve()).parents
             or not found.is_file()]  # fmt: skip
    assert not wrong


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == PAGES
