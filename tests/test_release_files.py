"""Checks the files of a release: extras and their page, addresses, citation, workflows, image."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import eepo

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers installs")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ISSUE_FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NEWEST_PYTHON = 13
# `eepo[trl,lora]` or, in a clone, `.[trl]`
REQUESTED_EXTRAS = re.compile(r"""(?:\beepo|['"]\.)\[([a-z_, ]+)\]""")

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requested_extras(page: str) -> set[str]:
    lists = REQUESTED_EXTRAS.findall(page)
    return {name.strip() for names in lists for name in names.split(",")}


# --- extras


def test_the_pattern_finds_extras() -> None:
    lines = "pip install 'eepo[trl, lora]'; pip install -e \".[data]\"; [link](a.md) x[gguf]"
    assert requested_extras(lines) == {"trl", "lora", "data"}


def test_every_extra_that_a_page_or_a_message_names_exists() -> None:
    files = [*PAGES, ROOT / "Makefile", *sorted((ROOT / "src").rglob("*.py"))]
    named = {
        (str(file.relative_to(ROOT)), extra)
        for file in files
        for extra in requested_extras(file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10, "the check itself must find extras"
    assert {(file, extra) for file, extra in named if extra not in EXTRAS} == set()


def test_the_installation_page_lists_every_extra_and_its_packages() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| ([^|]*) \|$", text("docs/installation.md"), re.M))
    assert set(rows) == EXTRAS
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in ("dev", "docs"):
            assert rows[extra] == ", ".join(f"`{each}`" for each in requirements)


def test_the_installation_page_lists_the_required_versions() -> None:
    page = text("docs/installation.md")
    for requirement in PROJECT["dependencies"]:
        assert f"`{requirement}`" in page


# --- versions and addresses


def test_python_versions_are_the_same_everywhere() -> None:
    versions = [f"3.{minor}" for minor in range(11, NEWEST_PYTHON + 1)]
    classifier = "Programming Language :: Python :: 3."
    listed = [line for line in PROJECT["classifiers"] if line.startswith(classifier)]
    assert [line.rpartition(" ")[2] for line in listed] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"
    jobs = read_yaml(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    assert jobs["fast"]["strategy"]["matrix"]["python"] == versions
    assert f"{versions[0]} to {versions[-1]}" in text("docs/installation.md")


def test_all_files_use_the_addresses_of_pyproject() -> None:
    """The owner of the repository may change: then all files must change."""
    home, docs = PROJECT["urls"]["Repository"], PROJECT["urls"]["Documentation"]
    citation = read_yaml(ROOT / "CITATION.cff")
    assert (citation["repository-code"], citation["url"]) == (home, docs)
    owned = re.compile(r"https://github\.com/[\w-]+/eepo\b")
    files = [*PAGES, *ISSUE_FORMS, ROOT / "SECURITY.md", ROOT / "mkdocs.yml"]
    addresses = {found for file in files for found in owned.findall(file.read_text("utf-8"))}
    assert addresses == {home}


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == eepo.__version__
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert paper["title"].startswith("EEPO: Exploration-Enhanced Policy Optimization")
    assert [author["family-names"] for author in paper["authors"]] == [
        "Chen", "Han", "Wang", "Han", "Bai", "Schütze", "Wong",
    ]  # fmt: skip


# --- GitHub


def read_yaml(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content


@every_workflow
def test_workflows_only_read_unless_a_job_says_otherwise(path: Path) -> None:
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    granted = [job.get("permissions", {}) for job in workflow["jobs"].values()]
    assert {name for permissions in granted for name in permissions} <= {"pages", "id-token"}


@every_workflow
def test_workflow_jobs_have_a_time_limit_and_pinned_actions(path: Path) -> None:
    for job in read_yaml(path)["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 90
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
            else:
                assert step["run"].strip()


def test_the_workflows_run_the_lanes_of_ci() -> None:
    lanes = re.findall(r"^make ([\w-]+)$", text(".ci/run"), re.M)
    assert "test" in lanes
    jobs = read_yaml(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    run = {"test", "docs", *jobs["other-lanes"]["strategy"]["matrix"]["lane"]}
    assert jobs["fast"]["steps"][-1]["run"] == "make test"
    assert "run: make docs" in text(".github/workflows/docs.yml")
    assert run == set(lanes)
    for lane in lanes:
        assert re.search(rf"^{lane}:", MAKEFILE, re.M), lane


def test_only_the_publishing_job_may_get_a_token_of_pypi() -> None:
    jobs = read_yaml(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert "secrets." not in text(".github/workflows/release.yml")


def test_issue_forms_have_questions_with_unique_ids() -> None:
    forms = [path for path in ISSUE_FORMS if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = read_yaml(path)
        assert form["name"]
        assert form["description"]
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids)) > 1
        assert all(field["attributes"]["label"] for field in form["body"])


# --- image


def test_the_image_copies_files_that_exist_and_are_not_ignored() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (.+)$", text("Dockerfile"), re.M)
        for source in line.split()[:-1]
    ]
    kept = {line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {"pyproject.toml", "README.md", *PROJECT["license-files"]} <= kept


def test_the_image_installs_known_extras_and_runs_without_root() -> None:
    dockerfile = text("Dockerfile")
    extras = re.findall(r"EXTRAS=(\S+)", dockerfile)
    assert len(extras) == 2
    assert {name for names in extras for name in names.split(",")} <= EXTRAS
    assert re.findall(r"^USER (.+)$", dockerfile, re.M) == ["eepo"]
