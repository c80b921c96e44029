"""Imports of the actors that every host and every job has for weights."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raylane import weights


@pytest.mark.processes
def test_catalogue_and_keepers_need_no_torch() -> None:
    code = "import sys, raylane.weights.service.catalogue; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_loaded_on_first_use() -> None:
    assert all(getattr(weights, name) is not None for name in weights.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nosuch'; it has EngineUpdate, Fleet"):
        weights.nosuch  # noqa: B018
