"""The contract suite on a transport that is not part of raylane: one file, and one entry point of its package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raylane.transport
from raylane.testing.contract import BackendContract
from raylane.transport.backends.registry import backends, check_name
from raylane.transport.groups import create_collective_group, destroy_collective_group

pytestmark = pytest.mark.usefixtures("ray_session", "cluster")


def install(_: Any, folder: str) -> None:
    """Make a folder with metadata of packages known to this process, as `pip install` does before it starts."""
    sys.path.append(folder)
    backends.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("packages")
    metadata = folder / "passing_transport-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: passing-transport\nVersion: 1.0\n")
    entry = "[raylane.backends]\npassing = tests.testing.passing_transport:PassingBackend\n"
    (metadata / "entry_points.txt").write_text(entry)
    install(None, str(folder))
    TestPassing.folder = str(folder)
    yield str(folder)
    sys.path.remove(str(folder))
    backends.cache_clear()


class TestPassing(BackendContract):
    name = "passing"
    folder = ""

    @classmethod
    def start_source(cls) -> Any:
        source = super().start_source()
        ray.get(source.__ray_call__.remote(install, cls.folder))
        return source


def test_groups_accept_every_two_sided_transport(package: str) -> None:
    assert check_name("passing") == "passing"
    members = [TestPassing.start_source() for _ in range(2)]
    group = create_collective_group(members, "passing")
    assert group.backend == "passing"
    destroy_collective_group(group)
    for member in members:
        ray.kill(member)


def test_built_in_modules_name_no_transport_but_their_own() -> None:
    """Differences are fields of `Capability`: nothing compares the name of a transport."""
    names = "|".join(name for name in backends() if name != "passing")
    compared = re.compile(rf"(==|!=|\bin\b) *\(?\"({names})\"")
    root = Path(raylane.transport.__path__[0])
    lines = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if compared.search(line)
    ]
    assert not lines
