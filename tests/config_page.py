"""Pages docs/reference/{training,sft,grpo}-config.md, made from the schemas, so that they are never out of date.

`python tests/config_page.py` writes them; tests compare the files with the output. The first page has the keys that
both kinds of training have with the same meaning, the others have the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raylane.nemo.keys import RENAMES, RULES
from raylane.rl.config import GrpoRunConfig
from raylane.sft.config.schema import SftRunConfig

PAGES = Path(__file__).parents[1] / "docs" / "reference"
HEADS = {
    "training": """# Configuration of a training

Generated from the code by `python tests/config_page.py`; do not edit. Keys of fine-tuning and of GRPO; each has
[more](sft-config.md) [keys](grpo-config.md) of its own.

A run is one YAML file. `defaults: base.yaml` (or a list of files, relative to this one) merges it over other files.
Every key can also be set on the command line:

| override | meaning |
|---|---|
| `policy.max_grad_norm=0.5` | sets a key of these pages, or a key that the file has set in an open mapping |
| `+policy.hf_config_overrides.rope_theta=1e6` | adds a new key to an open mapping |
| `++policy.hf_config_overrides.rope_theta=1e6` | sets or adds, whichever applies |
| `~logger.log_dir` | removes a key that the file has set, so that its default applies |

Values are YAML: `null`, `true`, `3e-4`, `[a, b]`, `{a: 1}`. `${policy.model_name}` stands for the value of another key,
and `${mul:a,b}` (also `add`, `div`, `max`) for a computed one (write `\\${` for a literal `${`). The value `???` must
be overridden. A key that is not on these pages is an error that suggests the nearest known key. Relative paths start at
the working directory.

Key names are those of NeMo-RL where the meaning is the same; differences are noted below. Files and command lines of
NeMo-RL are understood: see [Move from NeMo-RL](../howto/from-nemo-rl.md).
""",
    "sft": """# Configuration of a fine-tuning run

Generated from the code by `python tests/config_page.py`; do not edit. Beside these a run has
[the keys of every training](training-config.md), where overrides and `defaults:` are explained too.
""",
    "grpo": """# Configuration of a GRPO run

Generated from the code by `python tests/config_page.py`; do not edit. Beside these a run has
[the keys of every training](training-config.md), where overrides and `defaults:` are explained too. A micro-batch has
`policy.train_micro_batch_size` answers; `policy.train_global_batch_size` is not used, but must divide as in
fine-tuning.
""",
}
Rows = dict[str, str]
"""Rows of the table of a section, by key."""


def reference_markdown(page: str) -> str:
    """Return a whole page, by its key in HEADS."""
    sft, grpo = _sections(SftRunConfig, ""), _sections(GrpoRunConfig, "")
    common = {path: dict(rows.items() & grpo.get(path, {}).items()) for path, rows in sft.items()}
    sections = grpo if page == "grpo" else sft
    shown = {
        path: {key: row for key, row in rows.items() if (key in common.get(path, {})) == (page == "training")}
        for path, rows in sections.items()
    }
    summaries = _summaries(GrpoRunConfig if page == "grpo" else SftRunConfig, "")
    lines = [HEADS[page]]
    for path, rows in shown.items():
        if rows:
            lines += [
                f"## {path}\n\n{summaries[path]}\n" * bool(path),
                "| key | type | default | meaning |\n|---|---|---|---|",
            ]
            lines += [*rows.values(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections(model: type[BaseModel], path: str) -> dict[str, Rows]:
    """Return the rows of a section and of those below it, by path."""
    fields = _in_order(model)
    sections: dict[str, Rows] = {path: {}}
    for name, field in fields.items():
        if _is_model(field.annotation):
            sections |= _sections(field.annotation, f"{path}.{name}" if path else name)  # type: ignore[arg-type]
        else:
            description = " ".join((field.description or "").split()).replace("|", "\\|")
            row = f"| `{name}` | {_type(field.annotation, field.metadata)} | {_default(field)} | {description} |"
            sections[path][name] = row
    return sections


def _summaries(model: type[BaseModel], path: str) -> Rows:
    """Return the first paragraphs of the docstrings of a section and of those below it, by path."""
    summaries = {path: " ".join((model.__doc__ or "").split("\n\n")[0].split())}
    for name, field in _in_order(model).items():
        if _is_model(field.annotation):
            summaries |= _summaries(field.annotation, f"{path}.{name}" if path else name)  # type: ignore[arg-type]
    return summaries


def _in_order(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section; those of its base class last."""
    own = [name for name in model.model_fields if name in vars(model)["__annotations__"]]
    first = model.order if model in (SftRunConfig, GrpoRunConfig) else own  # type: ignore[attr-defined]
    return {name: model.model_fields[name] for name in dict.fromkeys([*first, *model.model_fields])}


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    return f"`{json.dumps(value)}`"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """Return a Python annotation in YAML terms, with its bounds."""
    origin, args = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated inside a union
        return _type(args[0], _flat(annotation.__metadata__))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in args)
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        return " or ".join("null" if part is type(None) else _type(part, metadata) for part in args)
    if origin is tuple:
        if args[-1] is Ellipsis and any(_is_model(part) for part in (args[0], *get_args(args[0]))):
            return "list of mappings" if _is_model(args[0]) else "text, or list of texts and mappings"
        return "text or list of text" if args[-1] is Ellipsis else f"list of {len(args)} {_type(args[0], [])}"
    if origin is dict:
        return "open mapping"
    if _is_model(annotation):
        return "mapping"
    word = {int: "integer", float: "number", bool: "true or false", str: "text"}[annotation]
    bounds = [text for constraint in _flat(metadata) if (text := _bound(constraint))]
    return f"{word} {', '.join(bounds)}" if bounds else word


def _flat(metadata: Any) -> list[Any]:
    return [inner for entry in metadata for inner in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _bound(constraint: Any) -> str:
    signs = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))
    for kind, attribute, sign in signs:
        if isinstance(constraint, kind):
            return f"{sign} {getattr(constraint, attribute)}"
    return "of at least one" if isinstance(constraint, MinLen) else ""


def rules_markdown() -> str:
    """Return the table of rules and renamed keys for the documentation. Keys with the same treatment share a row."""
    lines = ["| key of NeMo-RL | value | treatment |", "|---|---|---|"]
    lines += [f"| `{old}` | any | the same as `{new}` |" for old, new in RENAMES.items()]
    keys: dict[tuple[str, str, str], list[str]] = {}
    for rule in RULES:
        keys.setdefault((rule.harmless_text, rule.why_left_out, rule.why_refused), []).append(f"`{rule.key}`")
    for (harmless_text, why_left_out, why_refused), names in keys.items():
        lines.append(f"| {', '.join(names)} | {harmless_text} | left out: {why_left_out} |")
        if why_refused:
            lines.append(f"| | other | refused: {why_refused} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for kind in HEADS:
        (PAGES / f"{kind}-config.md").write_text(reference_markdown(kind))
