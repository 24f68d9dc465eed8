"""The build of the site: links to files outside of docs/ work, and mistakes are errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="needs the extra: pip install 'eepo[docs]'")

ROOT = Path(__file__).parents[2]
PAGE = (
    "# A page\n\nIt links to [the policy](../src/policy.py) and to [the guide](../GUIDE.md#top).\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with our hook for links and our checks of links."""
    (tmp_path / "docs" / "generate").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "policy.py").write_text("theta = 1\n", encoding="utf-8")
    (tmp_path / "GUIDE.md").write_text("# Top\n\n[Home](docs/index.md)\n", encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    shutil.copy(ROOT / "docs/generate/links.py", tmp_path / "docs/generate/links.py")
    ours = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    checks = ours[ours.index("validation:") : ours.index("exclude_docs:")]
    settings = "site_name: test\nhooks: [docs/generate/links.py]\nuse_directory_urls: false\n"
    settings += "theme: {name: material, font: false}\n"  # others load scripts from other hosts
    settings += "not_in_nav: |\n  /project/\n" + checks
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    return tmp_path


def build(project: Path, page: str) -> subprocess.CompletedProcess[str]:
    (project / "docs" / "index.md").write_text(page, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        command,
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.mark.slow
def test_files_outside_of_docs_become_pages(project: Path) -> None:
    done = build(project, PAGE)
    assert done.returncode == 0, done.stderr
    index = (project / "site/index.html").read_text(encoding="utf-8")
    assert 'href="project/src/policy.py.html"' in index
    assert 'href="project/GUIDE.html#top"' in index
    assert "theta" in (project / "site/project/src/policy.py.html").read_text(encoding="utf-8")
    guide = (project / "site/project/GUIDE.html").read_text(encoding="utf-8")
    assert 'href="../index.html"' in guide


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        "[a page](missing.md)",
        "[a file](../missing.py)",
        "[an anchor](#nowhere)",
        "![an image](https://example.org/figure.png)",
    ],
)
def test_a_mistake_stops_the_build(project: Path, mistake: str) -> None:
    done = build(project, PAGE + "\n" + mistake + "\n")
    assert done.returncode == 1
    assert "Aborted with 1 warnings in strict mode" in done.stdout + done.stderr


def test_make_docs_is_strict_and_not_quiet() -> None:
    """`mkdocs build --quiet` also hides warnings from --strict."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [line] = [line for line in makefile.splitlines() if "mkdocs build" in line]
    assert "--strict" in line
    assert "--quiet" not in line
