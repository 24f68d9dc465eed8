"""Free memory below the limits of control groups, in trees of files like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eepo.model import memory
from eepo.model.cgroups import free_below_limits

UNLIMITED_V1 = 9223372036854771712  # what the kernel writes without a limit


def write_v2(folder: Path, limit: object, used: int, cached: int | None = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if cached is not None:
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")


def write_v1(folder: Path, limit: object, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def free(root: Path, own_groups: str | bytes) -> int | None:
    path = root.parent / "own_groups"
    path.write_bytes(own_groups if isinstance(own_groups, bytes) else own_groups.encode())
    return free_below_limits(root, path)


def test_the_smallest_free_amount_of_all_groups_up_to_the_root_counts(root: Path) -> None:
    """A batch job has a limit, and its slice may be almost full because of other jobs."""
    write_v2(root / "batch" / "job", 3000, 1200, 500)
    assert free(root, "0::/batch/job\n") == 3000 - 1200 + 500
    assert free(root, "0::/batch/job/step\n") == 2300, "a limit also holds below"
    write_v2(root / "batch", 9000, 8000, 10)
    assert free(root, "0::/batch/job\n") == 1010
    write_v2(root, 100, 40)
    assert free(root, "0::/batch/job\n") == 60
    assert free(root, "0::/other\n") == 60


def test_version_1_has_other_names(root: Path) -> None:
    write_v1(root / "memory", UNLIMITED_V1, 5000)
    write_v1(root / "memory" / "docker" / "a:b", 3000, 2500, 100)
    lines = "5:cpu,cpuacct:/cpu\n4:hugetlb,memory:/docker/a:b\n0::/\n"
    assert free(root, lines) == 600
    write_v1(root / "memory" / "cpu", 10, 10)
    assert free(root, lines) == 600, "the path of another controller"


def test_inside_a_container_only_the_root_is_visible(root: Path) -> None:
    write_v2(root, 3000, 1000)
    assert free(root, "0::/docker/0123\n") == 2000
    assert free(root, "0::/../../docker\n") == 2000
    assert free_below_limits(root, root / "absent") == 2000


def test_more_than_the_limit_may_be_used(root: Path) -> None:
    write_v2(root, 100, 140, 10)
    assert free(root, "0::/\n") == 0


@pytest.mark.parametrize(
    "own_groups", ["", "\n", "0", "0:", "0::", "::::", "a b c", "memory", b"0::/\xff\xfe\x00\n"]
)
def test_odd_lists_of_groups_leave_the_root(own_groups: str | bytes, root: Path) -> None:
    assert free(root, own_groups) is None
    write_v2(root, 100, 40)
    assert free(root, own_groups) == 60


@pytest.mark.parametrize("limit", ["max", "", "1 2", "0x10"])
def test_a_limit_that_is_no_number_is_none(limit: str, root: Path) -> None:
    write_v2(root, limit, 40)
    assert free(root, "0::/\n") is None


def test_without_statistics_no_page_is_cached(root: Path) -> None:
    write_v2(root, 100, 40, cached=None)
    assert free(root, "0::/\n") == 60
    (root / "memory.stat").write_text("inactive_file\n")
    assert free(root, "0::/\n") == 60


def test_free_host_memory_respects_the_groups_of_this_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_v2(root / "job", 3000, 1000)
    own_groups = root.parent / "own_groups"
    own_groups.write_text("0::/job\n")
    monkeypatch.setattr(memory, "CGROUP", root)
    monkeypatch.setattr(memory, "OWN_CGROUPS", own_groups)
    assert memory.free_memory(torch.device("cpu")) == 2000
