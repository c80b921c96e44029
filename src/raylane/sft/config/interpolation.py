"""Replacement of `${...}` expressions in a configuration by their values.

The syntax is OmegaConf's, as far as NeMo-RL uses it. Pure functions; called by `load.load_config` and by
`nemo.translate`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any

from raylane.errors import ConfigError

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
