"""Choice between compiled graphs and plain Ray calls from a policy configuration, under NeMo-RL's names.

The names are those of NeMo-RL's pull request 1612, for programs that build their own worker groups; `policy.Policy`
reads `policy.compiled_graph` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from raylane.errors import ConfigError
from raylane.nemo import translate
from raylane.nemo.groups import NemoCompiledWorkerGroup
from raylane.training.config import keys
from raylane.training.config.policy import CompiledGraphConfig, PolicyConfig
from raylane.workers.compiled import DEFAULT_INFLIGHT
from raylane.workers.options import WorkerOptions
from raylane.workers.sharding import NamedSharding


def get_compiled_graph_config(policy: PolicyConfig | Mapping[str, Any]) -> CompiledGraphConfig:
    """Return the settings of compiled graphs in a policy configuration, with defaults for what it does not name.

    `policy` is a `PolicyConfig`, or a mapping with a section `compiled_graph` or NeMo-RL's `ray_compiled_graph`.
    ConfigError for unknown keys and wrong values.
    """
    if isinstance(policy, PolicyConfig):
        return policy.compiled_graph
    sections = {key: policy[key] for key in ("compiled_graph", "ray_compiled_graph") if key in policy}
    translation = translate.translate({"policy": sections})
    if translation.problems:
        raise ConfigError("; ".join(problem.text for problem in translation.problems))
    section = translation.document["policy"].get("compiled_graph") or {}
    try:
        return CompiledGraphConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(keys.explain(error, "policy.compiled_graph")) from error


def should_use_compiled_graph(policy: PolicyConfig | Mapping[str, Any]) -> bool:
    """Return True if a policy configuration prefers or requires compiled graphs."""
    return get_compiled_graph_config(policy).mode != "off"


class CompiledGraphWorkerGroup(NemoCompiledWorkerGroup):
    """A worker group that uses compiled graphs as a policy configuration says: in place of `WorkerGroup`.

    `config` is what `get_compiled_graph_config` takes. With mode "preferred" (the default) and graphs that cannot be
    used, calls are plain Ray calls and `fallback_reason` tells why; with "required" the constructor raises then.
    """

    def __init__(
        self,
        worker_class: type,
        sharding: NamedSharding | int,
        config: PolicyConfig | Mapping[str, Any],
        *,
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        settings = get_compiled_graph_config(config)
        super().__init__(
            worker_class,
            sharding,
            init_args=init_args,
            init_kwargs=init_kwargs,
            options=options,
            mode=settings.mode,
            inflight=settings.inflight or DEFAULT_INFLIGHT,
        )
