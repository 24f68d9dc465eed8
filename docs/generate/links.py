"""Adds the files outside of docs/ that pages link to, so that one link works on GitHub and here.

A page links to `../CONTRIBUTING.md` or `../src/eepo/config.py`, as GitHub needs it. This MkDocs
hook adds such a file to the site as the page `project/PATH.md` and lets the link point to it.
Markdown files are rendered, other files are shown as source code.

It also warns of pages that load scripts, styles, fonts or images from other hosts: the site must
work without a network.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FOLDER = "project"
# README.md is not in the navigation: it is a page so that its links are checked, too.
PROJECT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
LOADED = re.compile(r"<(?:script|img|iframe|source|link(?! rel=.canonical))\b[^>]*https?://[^>]*>")
NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash"}


log = logging.getLogger("mkdocs.hooks.links")


def target_of(source: Path, link: str) -> Path:
    """Return the path of a relative link, relative to the repository."""
    return Path(os.path.relpath((source.parent / link).resolve(), ROOT))


def page_name(target: Path) -> str:
    """Return the name of the page that shows a file from outside of docs/."""
    name = target.as_posix()
    return f"{FOLDER}/{name if target.suffix == '.md' else name + '.md'}"


def links_outside(source: Path, text: str) -> set[Path]:
    """Return the files outside of docs/ that a page links to and that exist."""
    targets = {target_of(source, match[2]) for match in LINK.finditer(text)}
    return {path for path in targets if path.parts[0] not in ("docs", "..") and is_shown(path)}


def is_shown(path: Path) -> bool:
    return (ROOT / path).is_file()


def rewrite(source: Path, text: str, page: str) -> str:
    """Let the links of a page point to pages of the site. `page` is the name of that page."""

    def replace(match: re.Match[str]) -> str:
        target = target_of(source, match[2])
        if target.parts[0] == "docs":
            name = Path(*target.parts[1:]).as_posix() if len(target.parts) > 1 else "index.md"
        elif target.parts[0] != ".." and is_shown(target):
            name = page_name(target)
        else:
            return match[0]  # MkDocs warns about it
        relative = os.path.relpath(name, Path(page).parent)
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    return LINK.sub(replace, text)


def content_of(target: Path) -> str:
    """Return a file from outside of docs/ as the text of a page.

    The search finds neither source code nor the README, which repeats other pages.
    """
    text = (ROOT / target).read_text(encoding="utf-8")
    if target.suffix != ".md":
        fence = "`" * 4
        language = LANGUAGES.get(target.suffix, "text")
        return f"{NO_SEARCH}# `{target}`\n\n{fence} {language}\n{text}\n{fence}\n"
    page = rewrite(ROOT / target, text, page_name(target))
    return NO_SEARCH + page if target.name == "README.md" else page


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside of docs/ that a page links to, and those that they link to."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    waiting = {*(ROOT / name for name in PROJECT_PAGES), *pages}
    done: set[Path] = set()
    while waiting:
        source = waiting.pop()
        done.add(source)
        if source not in pages:
            target = source.relative_to(ROOT)
            files.append(File.generated(config, page_name(target), content=content_of(target)))
        if source.suffix == ".md":
            found = links_outside(source, source.read_text(encoding="utf-8"))
            waiting |= {ROOT / path for path in found} - done
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/ that lead out of docs/."""
    if page.file.generated_by:
        return markdown
    return rewrite(Path(page.file.abs_src_path), markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn of everything that a browser would load from another host."""
    for found in LOADED.findall(output):
        log.warning("%s loads from another host: %s", page.file.src_uri, found)
    return output
