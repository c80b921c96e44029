"""Table of environment variables: what each accepts, and that there is no other place where one is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raylane.core import settings
from raylane.core.settings import SETTINGS, Setting

ROOT = Path(__file__).parents[2]
UNSET = None


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        *((settings.TIMEOUT_S, *pair) for pair in ((UNSET, 60.0), ("", 60.0), (" 2.5 ", 2.5), ("0", 0.0))),
        *((settings.TIMEOUT_S, text, None) for text in ("none", "inf", "None")),
        *((settings.POOL_BYTES, *pair) for pair in ((UNSET, None), ("0", 0), ("1024", 1024))),
        *((settings.POOL_IDLE_S, *pair) for pair in ((UNSET, 60.0), ("0.5", 0.5), ("inf", float("inf")))),
        *((settings.SHARE_FROM_BYTES, *pair) for pair in ((UNSET, 4 << 20), ("0", 0), ("none", None))),
        *((settings.BUDGET_BYTES, *pair) for pair in ((UNSET, None), ("1073741824", 1 << 30))),
        *((settings.CHECKSUM, *pair) for pair in ((UNSET, False), ("0", False), ("1", True))),
        *((settings.ALLOW_CLEARTEXT, *pair) for pair in ((UNSET, False), ("true", True))),
        *((settings.PTRACER, *pair) for pair in ((UNSET, "any"), ("NONE", "none"))),
        *((settings.METRICS_S, *pair) for pair in ((UNSET, None), ("2.5", 2.5))),
        *((settings.TRACE, *pair) for pair in ((UNSET, ""), ("/tmp/Folder", "/tmp/Folder"))),
        *((settings.HOST, *pair) for pair in ((UNSET, ""), ("B", "B"))),
        *((settings.WAIT, *pair) for pair in ((UNSET, "adaptive"), ("block", "block"))),
    ],
)
def test_settings_read_what_they_accept(
    monkeypatch: pytest.MonkeyPatch, setting: Setting[Any], text: str | None, value: Any
) -> None:
    monkeypatch.delenv(setting.name, raising=False)
    if text is not UNSET:
        monkeypatch.setenv(setting.name, text)
    assert setting.read() == value
    assert type(setting.read()) is type(value)


@pytest.mark.parametrize(
    ("setting", "texts"),
    [
        (settings.TIMEOUT_S, ("soon", "-1", "nan")),
        (settings.POOL_BYTES, ("1GB", "-1", "1.5")),
        (settings.POOL_IDLE_S, ("0", "-1", "never")),
        (settings.SHARE_FROM_BYTES, ("4MB",)),
        (settings.BUDGET_BYTES, ("1GB", "none")),
        (settings.CHECKSUM, ("2", "yes")),
        (settings.ALLOW_CLEARTEXT, ("yes",)),
        (settings.PTRACER, ("some",)),
        (settings.METRICS_S, ("0", "often", "inf")),
        (settings.WAIT, ("spin",)),
    ],
)
def test_other_texts_are_refused(
    monkeypatch: pytest.MonkeyPatch, setting: Setting[Any], texts: tuple[str, ...]
) -> None:
    for text in texts:
        monkeypatch.setenv(setting.name, text)
        with pytest.raises(ValueError, match=re.escape(f"{setting.name} must be {setting.accepted}, got {text!r}")):
            setting.read()


def test_variables_that_are_set_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [setting.name for setting in SETTINGS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAYLANE_TIMEOUT_S", "5")
    monkeypatch.setenv("RAYLANE_TIMOUT_S", "7")
    assert "RAYLANE_TIMEOUT_S=5, RAYLANE_TIMOUT_S=7 (unknown)" in settings.set_here()


def test_page_is_made_from_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert page == settings.reference_markdown(), "run: python -m raylane.core.settings > docs/reference/settings.md"


def test_variables_of_raylane_are_in_the_table_alone() -> None:
    texts = {path: path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "settings.py"}
    in_code = re.compile(r"environ.*\"RAYLANE_|= \"RAYLANE_\w+\"")
    assert not [path for path, text in texts.items() if in_code.search(text)]
    named = {name for text in texts.values() for name in re.findall(r"RAYLANE_[A-Z_]+", text)}
    assert named <= {setting.name for setting in SETTINGS}
