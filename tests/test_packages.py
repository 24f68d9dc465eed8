"""Builds the wheel and the source distribution, and uses the wheel outside the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import eepo

pytest.importorskip("build", reason="needs the packages build and hatchling (extra dev)")
pytest.importorskip("hatchling", reason="needs the packages build and hatchling (extra dev)")
pytest.importorskip("hatch_fancy_pypi_readme", reason="needs hatch-fancy-pypi-readme (extra dev)")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MAX_MEGABYTES = 4.0  # of each package; the two shipped policies have 2.4 MB
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.toml"))
# Reads some recipes, and prints where eepo was imported from and how many recipes there are.
READ_RECIPES = """
from pathlib import Path
import eepo
from eepo.recipe import load_run, recipe_folders
(folder,) = recipe_folders()
for name in ("countdown/eepo", "shortcut/eepo", "paper/qwen2.5-3b+eepo+lora", "qwen/math_eepo"):
    load_run(name)
print(Path(eepo.__file__).parent, len(list(folder.rglob("*.toml"))))
"""


def run(*command: object, folder: Path) -> str:
    """Run a command in a folder, without a hub, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_packages(out: Path, *arguments: str) -> None:
    """Build with the installed hatchling: no download."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    run(*build, *arguments, ROOT, folder=out)


@dataclass(frozen=True)
class Packages:
    sdist: Path
    wheel_of_sdist: Path
    wheel_of_checkout: Path


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    both, wheel = (tmp_path_factory.mktemp(name) for name in ("both", "wheel"))
    build_packages(both)  # the sdist, and a wheel from it
    build_packages(wheel, "--wheel")
    (sdist,), (of_sdist,), (of_checkout,) = (
        list(folder.glob(f"eepo-{eepo.__version__}{end}"))
        for folder, end in ((both, ".tar.gz"), (both, "-*.whl"), (wheel, "-*.whl"))
    )
    return Packages(sdist, of_sdist, of_checkout)


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_and_the_checkout_give_the_same_wheel(packages: Packages) -> None:
    """Compare names, not all bytes: a file may be edited between the two builds."""
    of_sdist, of_checkout = map(wheel_files, (packages.wheel_of_sdist, packages.wheel_of_checkout))
    assert set(of_sdist) == set(of_checkout)
    tags = f"eepo-{eepo.__version__}.dist-info/WHEEL"
    assert of_sdist[tags] == of_checkout[tags]


def test_the_wheel_contains_what_the_package_reads_and_nothing_else(packages: Packages) -> None:
    names = set(wheel_files(packages.wheel_of_sdist))
    assert names >= {f"eepo/{name}" for name in RECIPES}
    assert names >= {
        f"eepo/assets/{policy}/{name}"
        for policy in ("countdown", "shortcut")
        for name in ("model.safetensors", "config.json", "tokenizer.json")
    }
    assert names >= {"eepo/py.typed", "eepo/reports/browser.js", "eepo/tasks/templates.py"}
    source = ROOT / "src" / "eepo"
    modules = {f"eepo/{path.relative_to(source)}" for path in source.rglob("*.py")}
    assert names >= modules
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"eepo", f"eepo-{eepo.__version__}.dist-info"}
    assert {Path(name).suffix for name in names if name.startswith("eepo/")} == {
        ".js", ".json", ".py", ".safetensors", ".toml", ".typed",
    }  # fmt: skip


def test_links_of_the_long_description_are_absolute(packages: Packages) -> None:
    """PyPI shows it. A relative link would lead nowhere, and a relative image would be missing."""
    files = wheel_files(packages.wheel_of_sdist)
    metadata = files[f"eepo-{eepo.__version__}.dist-info/METADATA"].decode()
    assert "](https://raw.githubusercontent.com/eepo/eepo/main/docs/figures/" in metadata
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 30
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_sdist_contains_no_tests_and_no_study_records(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= set(names)
    assert [name for name in names if name.startswith(("tests", "docs", "studies"))] == []
    assert [name for name in names if name.endswith(".jsonl")] == []


def test_the_packages_are_small(packages: Packages) -> None:
    for path in (packages.sdist, packages.wheel_of_sdist):
        assert path.stat().st_size / 1e6 < MAX_MEGABYTES, path


def test_the_metadata_names_version_licence_and_addresses(packages: Packages) -> None:
    files = wheel_files(packages.wheel_of_sdist)
    metadata = files[f"eepo-{eepo.__version__}.dist-info/METADATA"].decode("utf-8")
    for line in (
        f"Version: {eepo.__version__}",
        "License-Expression: Apache-2.0",
        "Project-URL: Documentation, https://",
        "Requires-Python: >=3.11",
        "Classifier: Typing :: Typed",
    ):
        assert f"\n{line}" in metadata


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that finds dependencies in that of the tests."""
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Python reads no .pth files of a folder that a .pth file names, so an editable install of the
    # checkout is not found.
    others = folder / "lib" / version / "site-packages" / "dependencies.pth"
    others.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, folder=folder)
    return python


def test_the_wheel_works_outside_the_checkout(packages: Packages, tmp_path: Path) -> None:
    python = install(packages.wheel_of_sdist, tmp_path / "venv")
    command, work = python.with_name("eepo"), tmp_path / "work"
    work.mkdir()
    assert run(command, "--version", folder=work) == f"eepo {eepo.__version__}\n"
    assert "--out" in run(command, "demo", "--help", folder=work)
    package, num_recipes = run(python, "-c", READ_RECIPES, folder=work).split()
    assert Path(package).is_relative_to(tmp_path / "venv")
    assert int(num_recipes) == len(RECIPES)
    knobs = ("training.num_steps=2", "training.prompts_per_step=4", "task.num_evaluation=4")
    knobs += ("training.prompts_per_mini_batch=4", "evaluation.num_samples=1")
    settings = [part for knob in knobs for part in ("--set", knob)]
    run(command, "train", "countdown/eepo", "--out", "run", *settings, folder=work)
    assert (work / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 2
    run(command, "report", "run", "--out", "report.html", folder=work)
    assert "<script>" in (work / "report.html").read_text(encoding="utf-8")  # of browser.js
