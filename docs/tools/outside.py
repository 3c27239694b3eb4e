"""A hook of mkdocs: what pages link to outside of docs/ is part of the site, pages as pages and sources as listings.

Links are written for a reader of the repository. Here they are turned towards the site's own addresses, so that mkdocs
checks every one of them.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "repository"  # of the site, for everything that is not from docs/
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def address(path: str) -> str:
    """Place in the site of a file of the repository; sources become pages that list them, folders their README."""
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}/{path}.md" if path.endswith(".py") else f"{FOLDER}/{path}"


def origin(src_uri: str) -> str:
    """The file of the repository that a page of the site is made from."""
    return src_uri.removeprefix(f"{FOLDER}/") if src_uri.startswith(f"{FOLDER}/") else f"docs/{src_uri}"


def turned(text: str, path: str, found: set[str]) -> str:
    """`text` of the repository's file `path` with the site's links; adds to `found` the files that it links to."""

    def turn(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / there).exists():
            return match[0]  # mkdocs says so
        if (ROOT / there).is_dir() and not (ROOT / there / "README.md").is_file():
            return opening[1:-2]  # the folder has no page
        found.add(there)
        return f"{opening}{posixpath.relpath(address(there), posixpath.dirname(address(path)))}{anchor})"

    parts = _CODE.split(text)
    return "".join(part if i % 2 else _LINK.sub(turn, part) for i, part in enumerate(parts))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say below every page which version it describes."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"moe-prophet {version}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside of docs/ that a page links to, and those that they link to."""
    waiting = {origin(file.src_uri) for file in files.documentation_pages()}
    done: set[str] = set()
    while waiting - done:
        path = sorted(waiting - done)[0]
        done.add(path)
        source = ROOT / path
        source = source / "README.md" if source.is_dir() else source
        if source.suffix == ".md":
            turned(source.read_text(encoding="utf-8"), source.relative_to(ROOT).as_posix(), waiting)
        if not path.startswith("docs/") and source.is_file():
            files.append(_added(path, source, config))
    return files


def _added(path: str, source: Path, config: MkDocsConfig) -> File:
    if source.suffix == ".py":
        listing = f"# {path}\n\n```python\n{source.read_text(encoding='utf-8')}\n```\n"
        return File.generated(config, address(path), content=listing)
    return File.generated(config, address(path), abs_src_path=str(source))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn a page's links towards the site."""
    path = origin(page.file.src_uri)
    return markdown if page.file.src_uri.endswith(".py.md") else turned(markdown, path, set())
