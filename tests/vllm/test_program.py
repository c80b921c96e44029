"""The program of the page about vLLM."""

from __future__ import annotations

import re

import pytest
from tests.examples.programs import output_of

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")
pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_the_program_prints_versions_of_tokens() -> None:
    lines = output_of("weights_vllm.py").splitlines()
    begin = lines.index("version 1 of step 10")
    assert lines[begin + 1 : begin + 3] == ["['tokens 0 to 16 of version 1']", "version 2 of step 20"]
    found = re.fullmatch(r"\['tokens 0 to (\d+) of version 1', 'tokens (\d+) to 300 of version 2'\]", lines[begin + 3])
    assert found, lines[begin + 3]
    assert found[1] == found[2]
