"""`${...}` in files and on the command line: values, types, computations, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raylane.errors import ConfigError
from raylane.sft.config.load import load_config
from raylane.training.config.overrides import interpolate
from sft.conversations import document


def test_interpolation_keeps_types_and_nests() -> None:
    plain = {"a": {"b": 3, "c": [1, "${a.b}"]}, "d": "${a.b}", "e": "x${a.b}-${d}", "f": "${mul:${a.b},2}"}
    more = {"g": "${l}", "l": [1, {"m": 2}], "h": "${div:7,2}", "i": "${div:6,2}", "j": r"\${a}", "k": "${mul:0.5,4}"}
    last = {"n": "${max:${mul:${a.b}, 2}, 5}", "o": "${add:1,2.5}"}
    assert interpolate({**plain, **more, **last}, "run.yaml") == {
        "a": {"b": 3, "c": [1, 3]}, "d": 3, "e": "x3-3", "f": 6, "g": [1, {"m": 2}], "l": [1, {"m": 2}],
        "h": 3.5, "i": 3, "j": "${a}", "k": 2.0, "n": 6, "o": 3.5,
    }  # fmt: skip


def test_interpolation_may_read_names_from_another_document() -> None:
    assert interpolate({"a": "${b.c}"}, "run.yaml", root={"b": {"c": 2}}) == {"a": 2}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("${no.such}", r"no\.such is not set"),
        ("${a}", "refers to itself in a circle"),
        ("x${a}", "refers to itself in a circle"),
        ("${section}", "contains further expressions"),
        ("${oc.env:HOME}", "environment variables are not read"),
        ("${now:%Y}", "there is no resolver 'now'; use add, mul, div, max"),
        ("${mul:a,2}", "cannot compute"),
        ("${div:1,0}", "cannot compute"),
        ("${div:1,2,3}", "cannot compute"),
        ("x${section}", "cannot be part of a text"),
    ],
)
def test_interpolation_that_fails_is_named(value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml: .*({told})"):
        interpolate({"a": value, "section": {"b": "${section}"}}, "run.yaml")


def test_expression_on_the_command_line_sees_other_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path)))
    words = ["sft.seed=${policy.train_global_batch_size}", "policy.train_global_batch_size=6"]
    assert load_config(path, words).sft.seed == 6
    with pytest.raises(ConfigError, match=r"sft\.seed='\$\{oc\.env:SEED\}': environment variables are not read"):
        load_config(path, ["sft.seed=${oc.env:SEED}"])
