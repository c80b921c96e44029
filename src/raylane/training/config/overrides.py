"""YAML files and command-line overrides as one plain document, checked against the schema while it is built.

Overrides have Hydra's syntax: `a.b=c` sets a key of the schema, `+a.b=c` adds a key to an open mapping, `++a.b=c` does
either, `~a.b` removes a key that the file set. Values are YAML (`null`, `true`, `1e-4`, `[1, 2]`, `{a: 1}`). A file may
start with `defaults: base.yaml` (or a list): these files are read first, and this file is merged over them. Called by
`load`.

`interpolate` replaces `${...}` expressions by their values. The syntax is OmegaConf's, as far as NeMo-RL uses it.
Called by `load` and by `nemo.translate`.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raylane.errors import ConfigError
from raylane.training.config.keys import is_open, model_of, unknown_message

# ---------------------------------------------------------------------------------------------------------- YAML files


def _parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text; ConfigError with `source` if there is none. Needs PyYAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Loader with YAML 1.2 floats (1e-4 is a number) and an error for repeated keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(
                        None, None, "a key must be text, not a list or a mapping", key.start_mark
                    )
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is repeated", key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    number = re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)  # a subclass of SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deep; flatten its values") from error
    except ValueError as error:  # an impossible date, or a number of more than 4,300 digits
        raise ConfigError(f"{source} holds a value that cannot be read: {error}") from error


def read_yaml(path: Path, _chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the document in `path`, merged over the files in its `defaults:`.

    Names in `defaults:` are relative to `path`; later files override earlier ones.
    """
    path = path.resolve()
    if path in _chain:
        raise ConfigError(
            "defaults: refer to each other in a circle: "
            + " -> ".join(str(file) for file in (*_chain, path))
            + ". Remove one of them"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        by = f" (named in defaults: of {_chain[-1]})" if _chain else ""
        raise ConfigError(f"cannot read configuration {path}{by}: {getattr(error, 'strerror', error)}") from error
    document = _parse_yaml(text, str(path))
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold sections such as policy: and data:, got a {type(document).__name__}")
    bases = document.pop("defaults", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: defaults: must be a file name or a list of file names, got {bases!r}")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, read_yaml(path.parent / base, (*_chain, path)))
    return merge(merged, document)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new document: values of `above` win, mappings are merged key by key, lists are replaced.

    A mapping with `_override_: true` replaces the one below it instead, as in NeMo-RL.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and value.get("_override_") is True:
            merged[key] = copy.deepcopy({name: entry for name, entry in value.items() if name != "_override_"})
            continue
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return merged


# ------------------------------------------------------------------------------------------------- command-line words


@dataclass(frozen=True)
class Override:
    """One override of the command line.

    `sign` is '', '+', '++' or '~'; `has_value` is False for `~a.b` without a value.
    """

    word: str
    sign: str
    path: tuple[str, ...]
    value: Any
    has_value: bool


def parse_override(word: str) -> Override:
    """Return the parts of one override; ConfigError if its syntax is wrong."""
    match = re.fullmatch(r"(\+\+|\+|~)?([^=+~\s][^=\s]*?)(?:=(.*))?", word, flags=re.DOTALL)
    how = "write a.b=c, +a.b=c, ++a.b=c or ~a.b"
    if match is None:
        raise ConfigError(f"cannot read override {word!r}; {how}")
    sign, dotted, text = match[1] or "", match[2], match[3]
    path = tuple(dotted.split("."))
    if not all(path):
        raise ConfigError(f"override {word!r} has an empty part in its key; {how}")
    if text is None and sign != "~":
        raise ConfigError(f"override {word!r} has no value; {how}")
    if text is not None and not text.strip():
        raise ConfigError(f"override {word!r} has an empty value; write {dotted}=null, or {dotted}=\"''\" for no text")
    value = None if text is None else _split_entries(_parse_yaml(text, f"the value of override {word!r}"), word)
    return Override(word, sign, path, value, text is not None)


def _split_entries(value: Any, word: str) -> Any:
    """Return a value with entries like `a:1` split into key and value; Hydra needs no blank after the colon."""
    if isinstance(value, list):
        return [_split_entries(item, word) for item in value]
    if not isinstance(value, dict):
        return value
    split = {}
    for key, item in value.items():
        # YAML reads `a:1` in a flow mapping as a key without a value.
        name, colon, text = key.partition(":") if isinstance(key, str) and item is None else (key, "", "")
        if colon and not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"override {word!r}: a mapping needs a blank after each colon; write {{a: 1}}")
        split[name] = _parse_yaml(text, f"the value of override {word!r}") if colon else _split_entries(item, word)
    return split


def apply_overrides(
    document: Mapping[str, Any],
    words: Sequence[str],
    root: type[BaseModel],
    is_foreign: Callable[[str], bool] = lambda path: False,
) -> dict[str, Any]:
    """Return a new document with the overrides applied from left to right; ConfigError if one does not fit.

    `is_foreign` returns True for dotted keys that may be set although the schema does not have them.
    """
    result = copy.deepcopy(dict(document))
    for word in words:
        override = parse_override(word)
        try:
            _apply_override(result, override, root, is_foreign(".".join(override.path)))
        except ConfigError as error:
            raise ConfigError(f"override {word!r}: {error}") from None
    return result


def _apply_override(document: dict[str, Any], override: Override, root: type[BaseModel], is_foreign: bool) -> None:
    """Apply one override to `document` in place; ConfigError if it may neither set nor add or remove its key."""
    # None below sections of the schema: in an open mapping. A foreign key may lie below a single value of the schema.
    model: type[BaseModel] | None = None if is_foreign else root
    section = document
    for depth, name in enumerate(override.path):
        dotted = ".".join(override.path[: depth + 1])
        field = model.model_fields.get(name) if model is not None else None
        if field is None and not is_foreign:
            if model is not None and not is_open(model):
                raise ConfigError(unknown_message(root, override.path[:depth], model, name))
            if override.sign == "" and name not in section:
                near = difflib.get_close_matches(name, [*(model.model_fields if model else ()), *section], n=1)
                hint = f"; did you mean {near[0]!r}? Otherwise," if near else ";"
                raise ConfigError(
                    f"{dotted} is not set{hint} to add a new key to an open mapping write +{override.word}"
                )
        if depth == len(override.path) - 1:
            break
        model = model_of(field.annotation) if field is not None else None
        if (
            field is not None
            and model is None
            and getattr(field.annotation, "__origin__", field.annotation) is not dict
        ):
            raise ConfigError(f"{dotted} is a single value and has no keys below it")
        below = section.setdefault(name, {}) if override.sign != "~" else section.get(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{name!r} holds {below!r}, which has no keys; override {name!r} itself")
        section = below
    if override.sign == "~":
        if name not in section:
            raise ConfigError(
                f"{dotted} is not set by the file, so there is nothing to remove (its default applies already); leave "
                "the override out"
            )
        if override.has_value and section[name] != override.value:
            raise ConfigError(
                f"the value in the file is {section[name]!r}, not {override.value!r}; write ~{dotted} to remove any "
                "value"
            )
        del section[name]
        return
    if override.sign == "+" and (field is not None or name in section):
        what = "is a declared key" if field is not None else f"is already {section[name]!r}"
        raise ConfigError(f"{dotted} {what}, and + only adds new ones; leave out the +")
    both = isinstance(override.value, dict) and isinstance(section.get(name), dict)
    section[name] = merge(section[name], override.value) if both else override.value


_INNERMOST = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_MAX_ROUNDS = 100
_RESOLVERS = ("add", "mul", "div", "max")


def interpolate(document: Mapping[str, Any], source: str, root: Mapping[str, Any] | None = None) -> dict[str, Any]:
    r"""Return a copy of a document with all `${...}` expressions replaced by their values.

    `${a.b}` is the value of that key in `root` (default: the document itself); `${add:2,3}`, `${mul:2,3}`, `${div:6,3}`
    and `${max:2,3}` compute. A value that is one expression keeps its type; an expression within text becomes text;
    `\${` stands for a literal `${`.

    Raises ConfigError for a key that is not set, a circular reference, or another resolver. Environment variables are
    not available: their values would end up in saved configurations.
    """
    plain = copy.deepcopy(dict(document))
    names = plain if root is None else root
    return {key: _resolve(value, names, source, (str(key),)) for key, value in plain.items()}


def _resolve(value: Any, root: Mapping[str, Any], source: str, path: tuple[str, ...]) -> Any:
    """Return a value with its expressions replaced; `path` names the key in errors."""
    if isinstance(value, Mapping):
        return {key: _resolve(item, root, source, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, root, source, path) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    where = f"{source}: {'.'.join(path)}={value!r}"
    for _ in range(_MAX_ROUNDS):
        # Innermost first, so that ${mul:${a.b},2} sees a number.
        match = _INNERMOST.search(value)
        if match is None:
            return value.replace("\\${", "${")
        resolved = _evaluate(match[1].strip(), root, where)
        if isinstance(resolved, Mapping | list):
            if match.span() != (0, len(value)):
                raise ConfigError(
                    f"{where}: {match[0]} is a {type(resolved).__name__}, which cannot be part of a text; "
                    "make the expression the whole value"
                )
            if "${" in str(resolved):
                raise ConfigError(f"{where}: {match[0]} contains further expressions; write its values out")
            return copy.deepcopy(resolved)
        if match.span() == (0, len(value)) and not isinstance(resolved, str):
            return resolved  # keep the type: ${a.b} of a number is a number
        value = value[: match.start()] + str(resolved) + value[match.end() :]
    raise ConfigError(f"{where} refers to itself in a circle; write the value out in one of the keys")


def _evaluate(expression: str, root: Mapping[str, Any], where: str) -> Any:
    """Return the value of one expression, the text between `${` and `}`."""
    resolver, colon, rest = expression.partition(":")
    if not colon:
        return _at(expression, root, where)
    if resolver.startswith("oc.env"):
        raise ConfigError(
            f"{where}: environment variables are not read, because their values would end up in saved configurations. "
            "Write the value, or let the shell put it into an override: a.b=$NAME"
        )
    if resolver not in _RESOLVERS:
        raise ConfigError(
            f"{where}: there is no resolver {resolver!r}; use {', '.join(_RESOLVERS)} (as in ${{mul:2,3}}), ${{a.b}} "
            "or a plain value"
        )
    try:
        numbers = [float(part) if any(c in part for c in ".eE") else int(part) for part in rest.split(",")]
        if resolver != "div":
            return sum(numbers) if resolver == "add" else max(numbers) if resolver == "max" else math.prod(numbers)
        first, second = numbers
        quotient = first / second
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: cannot compute ${{{expression}}}: {error}. Give two numbers") from error
    return int(quotient) if isinstance(first, int) and first % second == 0 else quotient


def _at(dotted: str, root: Mapping[str, Any], where: str) -> Any:
    value: Any = root
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"{where}: {dotted} is not set, so ${{{dotted}}} has no value; set it, or write a value")
        value = value[part]
    return value
