"""Finds the code in README.md and docs/: fenced blocks, and commands in text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Before a block: `<!-- not run: REASON -->` or `<!-- file: NAME -->`
MARKER = re.compile(r"<!-- (not run|file): (.+?) -->")
FENCE = re.compile(r" *(`{3,})(\w*)")
FILE_COMMENT = re.compile(r"# ([\w/]+\.(?:py|toml))\b")  # the first line of a block names its file
SHELL = ("", "bash", "sh", "console")
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?eepo (?!:|=)(.+)$", re.MULTILINE)
INLINE = re.compile(r"`eepo ([a-z][a-z-]*\b[^`:=]*)`")


@dataclass
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    reason: str = ""  # why it is not run
    file: str = ""  # the file that it is saved as
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page. A marker applies to the next block."""
    blocks: list[Block] = []
    marks: dict[str, str] = {}
    fence, indent = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        found = FENCE.match(line)
        if fence:
            if line.strip() == fence:
                fence = ""
            else:
                blocks[-1].lines.append(line[indent:])
        elif found:
            fence, indent = found[1], line.index("`")
            reason, file = marks.get("not run", ""), marks.get("file", "")
            blocks.append(Block(page, number, found[2], reason, file))
            marks = {}
        else:
            marks |= dict(MARKER.findall(line))
    for block in blocks:
        first = FILE_COMMENT.match(block.lines[0]) if block.lines else None
        block.file = block.file or (first[1] if first else "")
    return blocks


ALL_BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def of_language(*languages: str) -> list[Block]:
    return [block for block in ALL_BLOCKS if block.language in languages]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each `eepo ...` command of a page: in its blocks, and in its text."""
    for block in read_blocks(page):
        if block.language in SHELL:
            for line in COMMAND.findall(block.text.replace("\\\n", " ")):
                yield shlex.split(line, comments=True)
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.S | re.M)
    for line in INLINE.findall(text):
        yield shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
