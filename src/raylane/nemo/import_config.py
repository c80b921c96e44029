"""Conversion of a NeMo-RL configuration file into one of raylane, with a report of every key that changed.

`import_config` reads the file as `raylane sft` would, but goes on where that would stop: requests that raylane cannot
meet are left out and reported, and required keys without a value are written as `???`. Called by
`raylane import-config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from raylane.errors import ConfigError
from raylane.nemo import translate
from raylane.nemo.keys import is_nemo_key, refusal
from raylane.sft.config.load import build_config
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.spans import can_be_searched, has_marks
from raylane.training.config import keys, overrides
from raylane.training.config.load import differences
from raylane.training.config.megatron_limits import megatron_problems
from raylane.training.config.policy import PolicyConfig
from raylane.training.run.places import HUB

_MISSING = "???"
_REPORT_WIDTH = 46


@dataclass(frozen=True)
class ImportedConfig:
    """Result of an import. `to_do` is empty if `raylane sft` can run the document as it is."""

    document: dict[str, Any]
    """Keys that differ from raylane's defaults, and the required ones."""
    to_do: tuple[str, ...]
    """Things to add or to decide, one sentence each."""
    refused: tuple[translate.Problem, ...]
    """Keys that request something raylane lacks; the run trains the same model without them."""
    notes: tuple[translate.Note, ...]
    """Keys that were left out or replaced."""

    def yaml(self, source: str) -> str:
        """Return the document as a YAML file that names its source and what is left to do."""
        import yaml

        head = [
            f"# Written by raylane import-config from {source}",
            *(f"# TO DO: {sentence}" for sentence in self.to_do),
        ]
        # A line break in a path or value would end the comment.
        lines = [" ".join(line.split()) for line in head]
        text: str = yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True, width=110)
        return "\n".join(lines) + "\n" + text

    def report(self) -> str:
        """Return the report as text, several lines."""
        lines = []
        for title, is_set in (("Left out or replaced:", False), ("Set as in NeMo-RL:", True)):
            if rows := [note for note in self.notes if note.is_set == is_set]:
                lines += [title, *(f"  {note.key:<{_REPORT_WIDTH}} {note.reason}" for note in rows)]
        if self.refused:
            lines += ["Left out, because raylane lacks it:", *(f"  {problem.text}" for problem in self.refused)]
        if self.to_do:
            lines += ["To do before `raylane sft` can run this:", *(f"  {sentence}" for sentence in self.to_do)]
        return "\n".join(
            [*lines, "The configuration is incomplete." if self.to_do else "The configuration is complete."]
        )


def import_config(
    path: str | Path, words: Sequence[str] = (), names: Mapping[str, str] = MappingProxyType({})
) -> ImportedConfig:
    """Return the translation of a NeMo-RL file (and the files in its `defaults:`) with overrides applied.

    `names` holds the path on this machine of models, data sets and files by the names that the file has for them.

    Raises ConfigError if the file cannot be read or an expression in it cannot be resolved.
    """
    document = overrides.apply_overrides(overrides.read_yaml(Path(path)), words, SftRunConfig, is_nemo_key)
    translation = translate.read_document(document, str(path), with_their_defaults=True, names=names)
    plain = translation.document
    notes = [*translation.notes, *_without_megatron(plain)]
    to_do = [problem.text for problem in translation.problems if problem.must_set]
    refused = [problem for problem in translation.problems if not problem.must_set]
    # Keys that neither NeMo-RL (as far as the table goes) nor raylane has.
    unknown = keys.unknown(plain, SftRunConfig, refusal)
    for key in unknown:
        parent, _, name = key.rpartition(".")
        del (keys.value_at(plain, parent) if parent else plain)[name]
    refused += _unknown_problems(unknown)
    data = plain.get("data")
    # A required key stays in the file even without a value, so that the user sees where to write it.
    plain["data"] = data = dict(data) if isinstance(data, Mapping) else {}
    asked = {problem.must_set for problem in translation.problems}
    for name in ("train", "validation"):
        if f"data.{name}" in asked and name not in data:
            data[name] = _MISSING
    if "train" not in data:
        data["train"] = _MISSING
        to_do.append("data.train is not set; set it to the path of a JSONL file")
        asked.add("data.train")
    to_do += [f"{key} is ???, a value that must be given" for key in keys.missing(plain) if key not in asked]
    to_do += _local_problems(plain)
    # The schema and the layout check find what is left, e.g. sizes that do not divide.
    try:
        build_config(plain, source=str(path))
    except ConfigError as error:
        to_do.append(str(error).removeprefix(f"{path}: "))
    changed = differences(plain, SftRunConfig)
    changed.setdefault("data", {})["train"] = data["train"]
    return ImportedConfig(
        {key: changed[key] for key in SftRunConfig.order if key in changed},
        tuple(dict.fromkeys(to_do)),
        tuple(refused),
        tuple(notes),
    )


def _without_megatron(plain: dict[str, Any]) -> Iterator[translate.Note]:
    """Leave the backend out where it cannot run the sizes that the document asks for: raylane's own layers can."""
    policy = plain.get("policy")
    try:
        problems = [*megatron_problems(PolicyConfig.model_validate(policy))]
    except ValidationError:
        return  # reported with the other keys
    if isinstance(policy, dict) and problems:
        del policy["megatron_cfg"]
        asked = [problem.partition(" does not work")[0].removeprefix("policy.dtensor_cfg.") for problem in problems]
        yield translate.Note("policy.megatron_cfg", f"raylane's own layers train instead, for {', '.join(asked)}")


def _unknown_problems(unknown: Mapping[str, str]) -> list[translate.Problem]:
    """Return the problems of unknown keys: one for each misspelt key, and one for the other keys of a section.

    A recipe of another day has many keys that the table does not have yet, and no key of raylane is meant by them.
    """
    problems = [translate.Problem(message, key) for key, message in unknown.items() if "did you mean" in message]
    sections: dict[str, list[str]] = {}
    for key, message in unknown.items():
        if "did you mean" not in message:
            section, _, name = key.rpartition(".")
            sections.setdefault(section or "the top level", []).append(name)
    problems += [
        translate.Problem(
            f"{section}: unknown key{'s' if len(names) > 1 else ''} {', '.join(names)}. The file may be of another "
            "version of NeMo-RL than those of March 2025 to August 2026 that raylane knows; check whether the training "
            "depends on them",
            ", ".join(names if section == "the top level" else [f"{section}.{name}" for name in names]),
        )
        for section, names in sections.items()
    ]
    return problems


def _local_problems(document: Mapping[str, Any]) -> list[str]:
    """Return what a run on this machine would refuse: names on a hub, and a template whose answers are unknown."""
    problems = []
    for key in ("policy.model_name", "policy.tokenizer.name"):
        name = keys.value_at(document, key)
        if isinstance(name, str) and not name.startswith(HUB) and not Path(name).is_dir():
            problems.append(f"{key}={name} is no folder on this machine. Set {key} to one, or to hf:NAME")
    template = keys.value_at(document, "policy.tokenizer.chat_template")
    if isinstance(template, str) and "{%" in template and not (has_marks(template) or can_be_searched(template)):
        problems.append(
            "policy.tokenizer.chat_template has neither {% generation %} ... {% endgeneration %} nor a generation "
            "prompt, which NeMo-RL does not need: put these marks around the assistant's text and its end token, or "
            "set it to chatml or llama3"
        )
    return problems
