"""Pages are short, plain English, and their links work. `python -m tests.helpers.prose` prints the same as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.prose import (
    MOST_CHARACTERS_IN_A_LINE,
    MOST_WORDS,
    MOST_WORDS_IN_A_SENTENCE,
    MOST_WORDS_PER_SENTENCE,
    Page,
    measure,
    measured,
    pages,
    sentences_of,
)


def faults(page: Page) -> list[str]:
    found = []
    limit = MOST_WORDS.get(page.name)
    if limit is not None and page.words > limit:
        found.append(f"{page.words} words, at most {limit}")
    if not page.name.startswith("benchmarks/results/"):  # these are records of their day
        if page.mean > MOST_WORDS_PER_SENTENCE:
            found.append(f"{page.mean:.1f} words per sentence, at most {MOST_WORDS_PER_SENTENCE}")
        if max(page.sentences, default=0) > MOST_WORDS_IN_A_SENTENCE:
            found.append(f"a sentence of {max(page.sentences)} words: {page.longest}")
    if page.wide:
        found.append(f"lines of more than {MOST_CHARACTERS_IN_A_LINE} characters: {list(page.wide)}")
    found.extend(f"line {line}: {wording!r} is no English" for line, wording in page.lost)
    found.extend(f"a link to {link}, which does not exist" for link in page.missing)
    return found


@pytest.mark.parametrize("name", pages(), ids=str)
def test_a_page_keeps_to_the_limits(name: Path) -> None:
    assert faults(measured(name)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("One two three. " + "word " * 60 + ".", "words per sentence"),
        ("Short. " * 30 + "Word " * 31 + ".", "a sentence of 31 words"),
        ("Short. " * 30 + "\n- item\n\n  " + "Word " * 31 + ".", "a sentence of 31 words"),
        ("Ends here: " + "`some code` " * 30 + ".", "a sentence of 32 words"),
        ("a" * 121, "lines of more than 120 characters: [1]"),
        ("One.\nIt goes\nalong.", "line 2: 'goes along'"),
        ("| in the mean |", "line 1: 'in the mean'"),
        ("The rest is slept.", "'is slept'"),
        ("A thread of its own.", "'of its own'"),
        ("A look costs time.", "'looks (noun)'"),
        ("What the planner does is simple.", "'what X does is'"),
        ("See [this](no/such/page.md#part).", "a link to no/such/page.md"),
        ("![A picture](no/picture.png)", "a link to no/picture.png"),
    ],
)
def test_every_fault_is_found(text: str, fault: str) -> None:
    assert fault in "; ".join(faults(measure("README.md", text)))


def test_too_many_words_are_found() -> None:
    page = measure("benchmarks/planner/README.md", "word " * 901)
    assert "901 words, at most 900" in "; ".join(faults(page))


@pytest.mark.parametrize(
    "text",
    [
        "```python\n" + "word " * 20 + "in the mean\n```\n",
        "One.\n\n    " + "word " * 20 + "goes along\n",
        "---\ntitle: of its own\n---\nOne.",
        "| " + "word " * 60 + "|",
        "See `in the mean`, and in the meantime look at [the planner](prophet/planner).",
        "He looks at it. A look at [this](https://example.org/" + "a" * 120 + ") helps.",
        "# A heading of " + "many " * 20,
        "![" + "word " * 40 + "](docs/images/overlap.png)",
    ],
)
def test_what_is_no_prose_is_no_fault(text: str) -> None:
    page = measure("README.md", text)
    assert [f for f in faults(page) if "characters" not in f or "`" in text] == []


def test_sentences_end_where_a_reader_sees_them_end() -> None:
    text = "# Title\n\nOne two, e.g. Three. `code` ends 2.5 times! *Four*\nfive.\n\n- six\n- seven (eight.)\n\n"
    text += "**Label.** Nine."
    found = ["One two, e.g Three.", "Code ends 2.5 times!", "*Four* five.", "six", "seven (eight.)", "Nine."]
    assert list(sentences_of(text)) == found
