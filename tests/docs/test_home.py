"""The home page leads to every page of the menu, and README names the tutorial."""

from __future__ import annotations

import re

from tests.helpers.house import ROOT
from tests.helpers.prose import links_of


def test_the_home_page_has_the_pages_of_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1].split("\n\n")[0]
    listed = {page for page in re.findall(r": (\S+\.md)$", menu, re.M) if not page.startswith("adr/")}
    home = set(links_of((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert len(listed) > 25
    assert listed - {"index.md"} <= home
    assert any(page.startswith("adr/") for page in home)
