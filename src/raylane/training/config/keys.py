"""Names of the keys of the schema: unknown ones, similar ones, and what pydantic found wrong with their values.

Reads the shape of the schema only through pydantic's `model_fields`. Called by the other modules of `config`, and
wherever a message suggests a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from raylane.errors import ConfigError

Reason = Callable[[str], str | None]
"""Function of a dotted key: the reason why the schema does not have this key of another program, or None."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'a'?" if a known name is similar to `name`, otherwise the list of known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.55)
    if close:
        return "did you mean " + " or ".join(repr(word) for word in close) + "?"
    return "known names: " + ", ".join(sorted(known)) if known else "no key can be set here"


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the annotation of a field if it is a section, otherwise None."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_open(where: type[BaseModel] | None) -> bool:
    """Return True if undeclared keys may be added; None stands for a plain mapping inside the schema."""
    return where is None or where.model_config.get("extra") == "allow"


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys and sections of the schema."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = model_of(field.annotation)
        if inner is not None:
            yield from key_paths(inner, f"{prefix}{name}.")


def unknown_message(root: type[BaseModel], parent: Sequence[str], model: type[BaseModel], name: str) -> str:
    """Return the message for the unknown key `parent.name`, with a suggestion where there is one."""
    path = ".".join([*parent, name])
    siblings = {".".join([*parent, known]): known for known in model.model_fields}
    close = difflib.get_close_matches(name, siblings.values(), n=1, cutoff=0.55)
    if close:
        return f"unknown key {path!r}; did you mean {'.'.join([*parent, close[0]])!r}?"
    elsewhere = [known for known in key_paths(root) if known.rpartition(".")[2] == name]
    # A similar path is a suggestion only if its last part is similar: most of a path are its sections.
    elsewhere += [
        known
        for known in difflib.get_close_matches(path, list(key_paths(root)), n=2, cutoff=0.7)
        if difflib.SequenceMatcher(None, known.rpartition(".")[2], name).ratio() > 0.5
    ]
    if elsewhere:
        return f"unknown key {path!r}; did you mean {' or '.join(repr(key) for key in dict.fromkeys(elsewhere))}?"
    return f"unknown key {path!r}; {'.'.join(parent) or 'the top level'} has {', '.join(model.model_fields)}"


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in nested mappings; None if there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def refuse_unknown(document: Mapping[str, Any], root: type[BaseModel], source: str) -> None:
    """Raise ConfigError that names every key of `document` that is not in the schema, each with a suggestion."""
    problems = unknown(document, root)
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems.values()), keys=list(problems.values()))


def unknown(document: Mapping[str, Any], root: type[BaseModel], reason: Reason = lambda key: None) -> dict[str, str]:
    """Return the keys of `document` that are not in the schema, dotted, each with a message and a suggestion.

    `reason` returns why the schema does not have a key of another program, None for any other key.
    """
    messages = {}

    def visit(section: Mapping[str, Any], model: type[BaseModel], parent: list[str]) -> None:
        for key, value in section.items():
            field = model.model_fields.get(key)
            if field is not None:
                inner = model_of(field.annotation)
                if inner is not None and isinstance(value, Mapping):
                    visit(value, inner, [*parent, key])
            elif not is_open(model):
                path = ".".join([*parent, str(key)])
                known = reason(path)
                messages[path] = (
                    f"unknown key {path!r}: {known}" if known else unknown_message(root, parent, model, str(key))
                )

    visit(document, root, [])
    return messages


def missing(document: Mapping[str, Any], parent: str = "") -> list[str]:
    """Return the dotted keys whose value is `???`, OmegaConf's mark of a value that must be given."""
    paths = []
    for key, value in document.items():
        path = f"{parent}{key}"
        paths += missing(value, f"{path}.") if isinstance(value, Mapping) else [path] if value == "???" else []
    return paths


def explain(error: ValidationError, source: str) -> str:
    """Return pydantic's errors as text: for each one the key, the problem, and the value that was given."""
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"]) or "the configuration"
        message = problem["msg"].removeprefix("Value error, ")
        input_note = (
            "" if problem["type"] in ("missing", "value_error", "json_invalid") else f" (given: {problem['input']!r})"
        )
        lines.append(f"{path}: {message}{input_note}")
    return f"{source}: " + "; ".join(lines)
