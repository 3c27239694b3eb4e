"""Blocks of code on the pages: programs run, commands print what is shown, parts parse, examples are quoted."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.helpers.house import ROOT
from tests.helpers.page_blocks import (
    Block,
    blocks_of,
    commands_of,
    named,
    play,
    read_pages,
    written_anew,
    wrong_outputs,
)

TUTORIAL = "docs/tutorial.md"  # test_tutorial.py runs it
PAGES = {named(page): blocks_of(named(page), page.read_text(encoding="utf-8")) for page in read_pages()}
PLAYED = [page for page, blocks in PAGES.items() if page != TUTORIAL and any(b.runs or b.whole for b in blocks)]


def faults(block: Block) -> list[str]:
    """What is wrong with a block before anything runs."""
    found = []
    if block.language == "python":
        try:
            ast.parse(textwrap.dedent(block.text))
        except SyntaxError as e:
            found.append(f"no Python: {e}")
    if block.title.startswith("examples/"):
        source = (ROOT / block.title).read_text(encoding="utf-8")
        if block.text not in source and textwrap.indent(block.text, "    ") not in source:
            found.append(f"{block.title} has other lines")
    if block.language == "" and any(line.startswith("$ ") for line in block.text.splitlines()):
        found.append("commands with '$ ' in a fence that is no ```console")
    if block.language == "console":
        commands_of(block.text)
    return [f"{block.where}: {fault}" for fault in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PLAYED)
def test_programs_run_and_commands_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    wrong = wrong_outputs(play(PAGES[page], tmp_path))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_written_as_they_are_read(page: str) -> None:
    assert [fault for block in PAGES[page] for fault in faults(block)] == []


# --- a page that is right, and what is found on others ----------------------------------------------------
GOOD = """
```python title="hello.py"
print("hello", 2.5)
```

```console
$ python hello.py
hello 2.5
$ python -c 'print("a  b")' > made
$ cat \\
    made
a  b
```

<!-- figures vary -->
```console
$ python hello.py
hello 137
```

<!-- not run: it would fail -->
```console
$ false
```
"""


def test_a_right_page_has_no_fault(tmp_path: Path) -> None:
    blocks = blocks_of("page.md", GOOD)
    assert [block.line for block in blocks] == [2, 6, 16, 22]
    assert [fault for block in blocks for fault in faults(block)] == []
    assert wrong_outputs(play(blocks, tmp_path)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("hello 2.5\n$", "hello 2.4\n$"),
        ("hello 137", "hullo 137"),
        ("a  b\n```", "a b\n```"),
        ("a  b\n```", "a  b\nc\n```"),
    ],
)
def test_another_output_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    page = GOOD.replace(right, wrong)
    assert page != GOOD
    found = play(blocks_of("page.md", page), tmp_path)
    assert len(wrong_outputs(found)) == 1
    assert written_anew(page, found) == GOOD.replace("hello 137", "hello 2.5")


@pytest.mark.parametrize(("right", "wrong"), [("not run: it would fail", "so what"), ("hello.py\n", "hallo.py\n")])
def test_a_command_that_fails_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        play(blocks_of("page.md", GOOD.replace(right, wrong)), tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```python\nf(a=1, b)\n```", "no Python"),
        ('```python title="part of a program"\nf(a=1, ...\n```', "no Python"),
        ('```python title="examples/own_loop.py"\nnothing = "of it"\n```', "has other lines"),
        ("```\n$ prophet plan x.npz\n```", "no ```console"),
    ],
)
def test_a_wrong_block_is_found(text: str, fault: str) -> None:
    (block,) = blocks_of("page.md", text)
    assert fault in "".join(faults(block))


@pytest.mark.parametrize("text", ["```python title=part\na\n```", "```python\na", "``` python\na\n```"])
def test_a_fence_that_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks_of("page.md", text)


def test_a_program_runs_before_the_commands_below_it(tmp_path: Path) -> None:
    page = '```python\nopen("made", "w").write("4 5")\n```\n\n```console\n$ cat made\n4 5\n```\n'
    assert wrong_outputs(play(blocks_of("page.md", page), tmp_path)) == []


@pytest.mark.parametrize("title", ["", ' title="hello.py"'])
def test_a_program_that_fails_is_found(title: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        play(blocks_of("page.md", f"```python{title}\n1 / 0\n```\n"), tmp_path)


def test_times_that_a_command_says_it_measured_are_not_compared(tmp_path: Path) -> None:
    page = "```console\n$ echo 'Measured on this machine: 7 ms'; echo 8\nMeasured on this machine: 6 ms\n8\n```\n"
    assert wrong_outputs(play(blocks_of("page.md", page), tmp_path)) == []
    tmp_path.joinpath("examples").unlink()
    assert len(wrong_outputs(play(blocks_of("page.md", page.replace("\n8\n", "\n9\n")), tmp_path))) == 1
