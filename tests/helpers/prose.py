"""Measures the project's pages: words, sentences, long lines, links, and wordings that a native speaker would not use.

python -m tests.helpers.prose [PAGE ...]          # a table with a line for every page, or for these

Sentences are those of paragraphs and list items. Code, tables, headings, front matter and pictures are no sentences. A
span of code or a path counts as one word.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.house import ROOT

MOST_WORDS = {"benchmarks/planner/README.md": 900}
MOST_WORDS_PER_SENTENCE = 18.0  # mean over a page
MOST_WORDS_IN_A_SENTENCE = 30
MOST_CHARACTERS_IN_A_LINE = 120

# Each is a wording to lose and the pattern that finds it.
WORDS_TO_LOSE = {
    "goes along": r"\b(?:go|goes|going|went) along\b",
    "in the mean": r"\bin the mean\b",
    "is slept": r"\b(?:is|are|was|were) slept\b",
    "of its own": r"\bof its own\b",
    "looks (noun)": r"\b(?:an?|the|each|every|closer|next|two|between) looks?\b(?! (?:at|for|like|up|into)\b)",
    "what X does is": r"\bwhat (?:\S+ ){1,4}(?:does|do) is\b",
}

_FENCE = re.compile(r"^\s*(```|~~~)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_LABEL = re.compile(r"\*\*[^*]{1,60}[.:]\*\*")  # "**Context.**" opens a paragraph as a heading would
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*(?:\([^()]*\))?[^()\s]*)\)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(*_\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|Eq|Fig|al|approx|no)\.")
_WORD = re.compile(r"\w")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What is measured of a page.

    name: path relative to the repository. words: all that stand in the file, as `wc -w` counts. sentences: words of
    each. longest: the longest sentence. wide: numbers of the lines that are too long. lost: (line, wording to lose).
    missing: relative links that point at nothing.
    """

    name: str
    words: int
    sentences: tuple[int, ...]
    longest: str
    wide: tuple[int, ...]
    lost: tuple[tuple[int, str], ...]
    missing: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Words per sentence."""
        return sum(self.sentences) / len(self.sentences) if self.sentences else 0.0


def pages() -> list[Path]:
    """The pages that are held to the limits, relative to the repository."""
    names = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "findings/README.md")]
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "prophet").rglob("*.md")]
    return names + sorted(path.relative_to(ROOT) for path in found)


def measured(name: Path) -> Page:
    """Measure a page that is given relative to the repository."""
    return measure(name.as_posix(), (ROOT / name).read_text(encoding="utf-8"))


def measure(name: str, text: str) -> Page:
    """Measure `text` as the page `name`, whose place decides where its relative links point."""
    sentences = list(sentences_of(text))
    return Page(
        name=name,
        words=len(text.split()),
        sentences=tuple(word_count(s) for s in sentences),
        longest=max(sentences, key=word_count, default=""),
        wide=tuple(n for n, line in enumerate(text.splitlines(), 1) if too_wide(line)),
        lost=tuple(lost_in(text)),
        missing=tuple(link for link in links_of(text) if not points_at_something(name, link)),
    )


def word_count(sentence: str) -> int:
    """Words of a sentence; a lone dash or sign is none."""
    return sum(1 for word in sentence.split() if _WORD.search(word))


def too_wide(line: str) -> bool:
    """Whether a line is too long. Rows of tables may be, and the target of a link does not count."""
    if line.lstrip().startswith("|"):
        return False
    return len(_LINK.sub(r"[\2]", line)) > MOST_CHARACTERS_IN_A_LINE


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) without front matter and code; a line of code is passed on as an empty one."""
    lines = text.splitlines()
    start = 0
    if lines and lines[0] == "---" and "---" in lines[1:]:
        start = lines.index("---", 1) + 1
    fenced = False
    in_list, blank = False, True
    for number, line in enumerate(lines[start:], start + 1):
        if _FENCE.match(line):
            fenced = not fenced
            yield number, ""
            continue
        if fenced:
            yield number, ""
            continue
        indented = line.startswith(("    ", "\t"))
        if line.strip() and not indented:
            in_list = bool(_ITEM.match(line)) or (in_list and (not blank or line.startswith(" ")))
        code = indented and blank and not in_list
        if not code:
            blank = not line.strip()
        yield number, "" if code else line


def plain(line: str) -> str:
    """A line with code as one word, links as their text, and without pictures."""
    line = re.sub(r"(`+).+?\1", "Code", line)
    return _LINK.sub(lambda m: "" if m[1] else m[2], line)


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of paragraphs and list items."""
    for block in _blocks(text):
        joined = _LABEL.sub("", plain(block))
        joined = _ABBREVIATION.sub(r"\1", joined)
        for sentence in _SENTENCE_END.split(joined):
            if word_count(sentence):
                yield sentence.strip()


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs and list items, each as one line."""
    block: list[str] = []
    for _, line in prose_lines(text):
        stripped = line.strip().lstrip(">").strip()
        breaks = not stripped or stripped.startswith(("#", "|", "<!--", ":::", "***", "---"))
        if breaks or _ITEM.match(line):
            if block:
                yield " ".join(block)
            block = []
        if not breaks:
            block.append(_ITEM.sub("", stripped))
    if block:
        yield " ".join(block)


def lost_in(text: str) -> Iterator[tuple[int, str]]:
    """(line, wording) for every wording to lose outside of code, in tables and headings too."""
    kept = [(number, re.sub(r"(`+).+?\1", "Code", line)) for number, line in prose_lines(text)]
    joined, starts = "", []
    for number, line in kept:
        starts.append((len(joined), number))
        joined += line.strip() + " "
    for wording, pattern in WORDS_TO_LOSE.items():
        for match in re.finditer(pattern, joined, re.IGNORECASE):
            yield max(number for start, number in starts if start <= match.start()), wording


def links_of(text: str) -> Iterator[str]:
    """Relative targets of links and pictures outside of code, without their anchors."""
    joined = "\n".join(re.sub(r"(`+).+?\1", "Code", line) for _, line in prose_lines(text))
    for match in _LINK.finditer(joined):
        target = match[3].split("#")[0]
        if target and "://" not in target and not target.startswith("mailto:"):
            yield target


def points_at_something(name: str, link: str) -> bool:
    """Whether a relative link in the page `name` names a file or folder of the repository."""
    return (ROOT / name).parent.joinpath(link).exists()


def main(names: list[str]) -> None:
    """Print a line for every page, or for those named, and what is wrong with it."""
    print(f"{'words':>6} {'sentences':>9} {'mean':>5} {'longest':>7} {'wide':>4} {'lost':>4} {'links':>5}  page")
    for name in [Path(n) for n in names] or pages():
        page = measured(name)
        print(
            f"{page.words:6} {len(page.sentences):9} {page.mean:5.1f} {max(page.sentences, default=0):7} "
            f"{len(page.wide):4} {len(page.lost):4} {len(page.missing):5}  {page.name}"
        )
        for sentence in sentences_of((ROOT / name).read_text(encoding="utf-8")):
            if word_count(sentence) > MOST_WORDS_IN_A_SENTENCE:
                print(f"       {word_count(sentence)} words: {sentence[:110]}")
        for line, wording in page.lost:
            print(f"       line {line}: {wording}")
        for link in page.missing:
            print(f"       no such file: {link}")


if __name__ == "__main__":
    main(sys.argv[1:])
