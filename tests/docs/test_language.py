"""Pages are easy to read: few numbers per sentence, short paragraphs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APPENDICES = "_tables.md"  # tables that a command wrote
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if not path.name.endswith(APPENDICES) and path.name != "CHANGELOG.md"
)
MAX_NUMBERS, MAX_SENTENCES = 2, 5

# Names that contain a number: stage 2, Table 1, pass@32, 0.5B, AMC 23, MATH-500, 95 % interval.
NAMES = re.compile(
    r"\b(?i:stages?|seeds?|steps?|Tables?|Figures?|items?|rows?|rules?|levels?|AMC|AIME|arXiv|Python|torch|"
    r"vLLM|TRL|verl|transformers) \d[\w.]*(?:(?:,| and| to) \d[\w.]*)*"
    r"|\b[A-Za-z][\w@.-]*\d[\w.]*|\b\d[\d.]*[BM]\b|\b95 % intervals?"
)
NUMBER = re.compile(r"(?<![\w.])[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[-−]?\d+)?")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9✓`*\[(θη\"]|(?:eepo|math-verify|verl|vLLM)\b)")


def paragraphs(text: str) -> list[str]:
    """Return paragraphs and list items, without code, tables, headings and images."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    found, lines = [], list[str]()
    for line in [*text.splitlines(), ""]:
        line = line.strip()
        begins_item = re.match(r"([-*]|\d+\.) ", line)
        is_text = line and not line.startswith(("|", "#", "!", "<", "---"))
        if lines and (begins_item or not is_text):
            found.append(" ".join(lines))
            lines = []
        if is_text:
            lines.append(line[begins_item.end() :] if begins_item else line)
    return found


def sentences(paragraph: str) -> list[str]:
    """Return sentences without inline code, formulas and link targets."""
    plain = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", paragraph))
    return SENTENCE_END.split(plain)


def num_numbers(sentence: str) -> int:
    return len(NUMBER.findall(NAMES.sub("name", sentence)))


def test_numbers_are_counted_without_names() -> None:
    assert num_numbers("Stage 2 of 0.5B reached .4 in 30 steps, pass@32 rose to 0.97.") == 3
    assert (
        num_numbers("On MATH-500 with seeds 0 to 4 there was no difference (95 % interval).") == 0
    )
    assert num_numbers("In 36 to 79 steps at p = 1e-5.") == 3


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_have_few_numbers_and_paragraphs_few_sentences(path: Path) -> None:
    for paragraph in paragraphs(path.read_text()):
        parts = sentences(paragraph)
        assert len(parts) <= MAX_SENTENCES, paragraph
        for sentence in parts:
            assert num_numbers(sentence) <= MAX_NUMBERS, sentence
