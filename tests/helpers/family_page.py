"""The two tables of docs/families.md."""

from __future__ import annotations

from tests.helpers.launch import ROOT


def families_that(do: str) -> list[str]:
    """Families under the heading "Families that ..."; those of a part of a family's models, which convert, left out."""
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    section = page.split(f"## Families that {do}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]
    return [name for cell in cells if " with " not in cell for name in cell.split(", ")]
