"""The programs of the README and of the first tutorial run and print what the pages show."""

from __future__ import annotations

import re
import runpy

import pytest
from tests.examples.programs import ROOT, output_of

pytestmark = pytest.mark.tour
SHOWN = re.compile(r"<!-- output of examples/(\w+\.py) -->\n```\w*\n(.*?)```", re.DOTALL)
PAGE = (ROOT / "docs/tutorial/first-steps.md").read_text()


@pytest.mark.parametrize("name", ["hello.py", "first_stats.py", "first_graph.py", "first_group.py"])
def test_first_program_prints_what_the_page_shows(
    name: str, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [block for file, block in SHOWN.findall(PAGE) if file == name]
    assert shown, f"the tutorial shows no output of {name}"
    if name == "hello.py":
        printed = output_of(name).splitlines()  # in a process of its own, as in the README
    else:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        printed = capsys.readouterr().out.splitlines()
    for line in shown[0].splitlines():
        # `...` stands for text that differs from run to run.
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        assert any(re.fullmatch(pattern, real) for real in printed), f"{line!r} is not in {printed}"


def test_readme_shows_the_output_of_its_program() -> None:
    assert "`python examples/hello.py` prints `1000000.0`" in (ROOT / "README.md").read_text()
