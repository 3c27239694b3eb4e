"""Blocks of code on the pages: programs run, commands print what is shown, parts parse, examples are quoted."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.house import ROOT
from tests.helpers.page_blocks import (
    Block,
    blocks_of,
    commands_of,
    named,
    read_pages,
    run,
    run_commands,
    written_anew,
    wrong_outputs,
)

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # of a launcher's one process
PAGES = {named(page): blocks_of(named(page), page.read_text(encoding="utf-8")) for page in read_pages()}


def programs(blocks: list[Block]) -> list[Block]:
    """Whole programs; those that a command of the page runs are left to it."""
    commands = "".join(block.text for block in blocks if block.runs)
    return [block for block in blocks if block.whole and not (block.title and block.title in commands)]


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


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if any(b.runs for b in blocks)])
def test_commands_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    wrong = wrong_outputs(run_commands(PAGES[page], tmp_path))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("block", [b for blocks in PAGES.values() for b in programs(blocks)], ids=lambda b: b.where)
def test_a_program_runs_in_one_process(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.text, encoding="utf-8")
    run([sys.executable, str(program)], tmp_path, **ALONE)


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
    assert programs(blocks) == []  # the page's command runs it
    assert wrong_outputs(run_commands(blocks, tmp_path)) == []


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
    found = run_commands(blocks_of("page.md", page), tmp_path)
    assert len(wrong_outputs(found)) == 1
    assert written_anew(page, found) == GOOD.replace("hello 137", "hello 2.5")


@pytest.mark.parametrize(("right", "wrong"), [("not run: it would fail", "so what"), ("hello.py\n", "hallo.py\n")])
def test_a_command_that_fails_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_commands(blocks_of("page.md", GOOD.replace(right, wrong)), tmp_path)


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


def test_a_program_without_a_command_is_run_alone() -> None:
    blocks = blocks_of("page.md", GOOD.replace("python hello.py", "true"))
    assert [block.title for block in programs(blocks)] == ["hello.py"]
