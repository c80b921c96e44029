"""Translation of NeMo-RL configurations: keys and values with another spelling, and keys without effect in raylane.

`read_document` returns a document with raylane's keys, notes on what was left out or replaced, and problems: keys that
request a feature which raylane does not have. Documents with raylane's own keys pass unchanged. Pure functions; called
by `dialect` and `import_config`. The tables of keys are in `keys`.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from raylane.errors import ConfigError
from raylane.nemo.keys import DATA_SET_RULES, OTHERWISE, RENAMES, RULES
from raylane.nemo.schedule import (
    InexactScheduleError,
    is_torch_scheduler,
    megatron_optimizer,
    megatron_schedule,
    translate_scheduler,
)
from raylane.nemo.values import (
    ADAPTER_LAYERS,
    HUB_COLUMNS,
    MARKED_TEMPLATES,
    OPTIMIZERS,
    PASSTHROUGH,
    SPELLINGS,
    THEIR_DEFAULTS,
)
from raylane.training.config.keys import value_at
from raylane.training.config.overrides import interpolate

_PAIRS = ("ResponseDataset",)
_MESSAGES = ("openai_format", "OpenAIFormatDataset")
_OLD: tuple[str, ...] = (
    "dataset_name",
    "chat_key",
    "input_key",
    "output_key",
    "prompt_file",
    "system_prompt_file",
    "system_prompt",
    "system_key",
    "tool_key",
    "use_preserving_dataset",
    "split",
)
"""Keys of a data set that configurations of 2025 have in `data` itself."""
_OLD_FILES = {"train": "train_data_path", "validation": "val_data_path"}
_MEGATRON = "policy.megatron_cfg"
_ALL = 1_000_000
"""Number of checkpoints to keep that stands for all of them."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Note:
    """A key of NeMo-RL that was left out or replaced, or a key that was set, and the reason in a few words."""

    key: str
    reason: str
    is_set: bool = False


@dataclass(frozen=True)
class Problem:
    """A request that raylane cannot meet, as a sentence. `must_set` is the key that must be set instead, if any."""

    text: str
    key: str
    must_set: str | None = None


@dataclass(frozen=True)
class Translation:
    """Result of `translate`: a document with raylane's keys, without the keys that the problems are about."""

    document: dict[str, Any]
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]


def is_from_nemo_rl(document: Mapping[str, Any]) -> bool:
    """Return True if a document has a key that NeMo-RL needs or offers and raylane does not have."""
    # policy.ray_compiled_graph is left out: users add it to files of raylane too.
    keys = {*(rule.key for rule in RULES), *OTHERWISE} - {"policy.ray_compiled_graph"}
    return any(_has(dict(document), key) for key in keys)


def read_document(
    document: Mapping[str, Any],
    source: str,
    *,
    with_their_defaults: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Translation:
    """Return the translation of a document after replacing its `${...}` expressions; arguments as of `translate`.

    Values that are never read are not resolved, because they may refer to a key that the user has replaced. ConfigError
    for any other expression without a value; `source` names the document in it.
    """
    plain = copy.deepcopy(dict(document))
    for rule in RULES:
        value = value_at(plain, rule.key)
        if "${" in str(value) and rule.harmless(value):
            _replace(plain, rule.key, None)  # the key stays, so that `translate` notes it
    if (
        isinstance(value_at(plain, _MEGATRON), dict)
        and value_at(plain, f"{_MEGATRON}.enabled") is not True
        and "${" in str(value_at(plain, _MEGATRON))
    ):
        _replace(plain, _MEGATRON, {**dict.fromkeys(value_at(plain, _MEGATRON)), "enabled": False})
    notes = []
    # data.train=FILE leaves the run name of NeMo-RL's files, sft-dev-${data.train.dataset_name}, without a value.
    name = value_at(plain, "logger.wandb.name")
    try:
        interpolate({"name": name}, source, root=document)
    except ConfigError:
        del plain["logger"]["wandb"]["name"]
        notes.append(Note("logger.wandb.name", f"{name} has no value"))
    interpolated = interpolate(plain, source, root=document)
    translation = translate(interpolated, with_their_defaults=with_their_defaults, names=names)
    return replace(translation, notes=(*notes, *translation.notes))


def translate(
    document: Mapping[str, Any],
    *,
    with_their_defaults: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Translation:
    """Return the document with raylane's keys and values; `${...}` must have been replaced before.

    Args:
        document: Document of NeMo-RL, or of raylane.
        with_their_defaults: Fill in what NeMo-RL does where the document sets nothing and raylane does something else.
        names: Path on this machine of a model, data set or file, by the name that the document has for it.
    """
    work = _Translator(copy.deepcopy(dict(document)), names)
    # The section for graphs is moved first: `rename_keys` and the schema see only raylane's name of it. Megatron's keys
    # of a disabled backend must not be renamed.
    work.translate_graph()
    work.translate_megatron()
    work.rename_keys()
    work.translate_optimizer()
    work.translate_scheduler()
    work.translate_checkpointing()
    work.translate_data()
    work.drop_repeated_lengths()
    # After the steps above, which read some of these keys (packing that is off, a disabled backend).
    work.drop_and_refuse_keys()
    work.spell_values()
    if with_their_defaults:
        work.fill_in_defaults()
    return Translation(work.plain, tuple(work.notes), tuple(work.problems))


def _section(document: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    parent, _, name = key.rpartition(".")
    section = value_at(document, parent) if parent else document
    return (section if isinstance(section, dict) else None), name


def _has(document: dict[str, Any], key: str) -> bool:
    section, name = _section(document, key)
    return section is not None and name in section


def _replace(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, and make the sections above it."""
    *parents, name = key.split(".")
    section = document
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {}
        section = section[parent]
    section[name] = value


class _Translator:
    """One translation in progress: the document, which is changed in place, and what was noted about it."""

    def __init__(self, plain: dict[str, Any], names: Mapping[str, str]) -> None:
        self.plain = plain
        self.names = names
        self.notes: list[Note] = []
        self.problems: list[Problem] = []

    def _remove(self, key: str, reason: str | None = None) -> Any:
        """Delete a key and return its value; note the reason if there is one."""
        section, name = _section(self.plain, key)
        assert section is not None
        if reason is not None:
            self._note(key, reason)
        return section.pop(name)

    def _refuse(self, key: str, reason: str, must_set: str | None = None) -> None:
        """Delete a key and record that its value cannot be used."""
        value = self._remove(key)
        shown = "" if isinstance(value, dict | list) or "=" in reason else f"={value!r}"
        self.problems.append(Problem(f"{key}{shown}: {reason}", key, must_set))

    def rename_keys(self) -> None:
        """Move keys to their names in raylane."""
        for old, new in RENAMES.items():
            if not _has(self.plain, old):
                continue
            value = value_at(self.plain, old)
            if _has(self.plain, new) and value_at(self.plain, new) != value:
                self._refuse(old, f"{new}={value_at(self.plain, new)!r} is set too; remove one of the two")
                continue
            empty = value is None or value == {}
            self._remove(old, "empty" if empty else f"replaced by {new}")
            if not empty:
                _replace(self.plain, new, value)

    def translate_graph(self) -> None:
        """Move policy.ray_compiled_graph (pull request 1612 of NeMo-RL) to policy.compiled_graph."""
        old, new = "policy.ray_compiled_graph", "policy.compiled_graph"
        section = value_at(self.plain, old)
        if not _has(self.plain, old):
            return
        if _has(self.plain, new):
            self._refuse(old, f"the sections {old} and {new} are both set; remove one of them")
        elif not isinstance(section, dict) or not isinstance(section.get("enabled", True), bool):
            self._refuse(old, f"it must be a section with enabled=true or false; use {new}.mode")
        else:
            enabled = section.pop("enabled", None)
            mode = {} if enabled is None else {"mode": "preferred" if enabled else "off"}
            self._remove(old, f"replaced by {new}")
            _replace(self.plain, new, {**section, **mode})

    def translate_megatron(self) -> None:
        """Leave out the section of the backend that is off; translate Megatron's optimizer and schedule if it is on."""
        section = value_at(self.plain, _MEGATRON)
        if not isinstance(section, dict):
            return
        if section.get("enabled") is not True:
            if set(section) - {"enabled"}:
                self._remove(_MEGATRON, "it is off")
            return
        self._translate_peft(section)
        # Its sizes are those of a backend that NeMo-RL would not start.
        if value_at(self.plain, "policy.dtensor_cfg.enabled") is False:
            self._remove("policy.dtensor_cfg", f"it is off, and {_MEGATRON} is on")
        if not isinstance(optimizer := section.get("optimizer"), dict):
            return
        steps = value_at(self.plain, "sft.max_num_steps")
        try:
            scheduler = section.get("scheduler") or {}
            adamw = megatron_optimizer(optimizer, scheduler)
            schedule = megatron_schedule(scheduler, optimizer, steps if isinstance(steps, int) else None)
        except InexactScheduleError as error:
            self._remove(f"{_MEGATRON}.optimizer")
            if "scheduler" in section:
                self._remove(f"{_MEGATRON}.scheduler")
            self.problems.append(Problem(f"{_MEGATRON}.scheduler: {error}", "policy.scheduler", "policy.scheduler"))
            return
        except ValueError as error:
            self._refuse(f"{_MEGATRON}.optimizer", f"{error}", "policy.optimizer.name")
            return
        # Megatron-core clips to 1 by default, and 0 switches it off.
        _replace(self.plain, "policy.max_grad_norm", optimizer.get("clip_grad", 1.0) or None)
        _replace(self.plain, "policy.optimizer", adamw)
        _replace(self.plain, "policy.scheduler", schedule)
        self._remove(f"{_MEGATRON}.optimizer", "replaced by policy.optimizer and policy.max_grad_norm")
        if "scheduler" in section:
            self._remove(f"{_MEGATRON}.scheduler", "replaced by policy.scheduler")

    def _translate_peft(self, section: dict[str, Any]) -> None:
        """Move adapters of Megatron to policy.dtensor_cfg.lora_cfg, with the names of layers of Hugging Face models."""
        peft = section.get("peft")
        if not isinstance(peft, dict) or peft.get("enabled") is not True:
            return
        named = {key: peft.get(key) or [] for key in ("target_modules", "exclude_modules")}
        if any(name not in ADAPTER_LAYERS for layers in named.values() for name in layers):
            return  # the rule of this key refuses it
        adapters = {key: peft[key] for key in ("enabled", "dim", "alpha", "dropout", "dropout_position") if key in peft}
        if "lora_A_init_method" in peft:
            adapters["lora_A_init"] = peft["lora_A_init_method"]
        for key, layers in named.items():
            if layers:
                adapters[key] = [name for layer in layers for name in ADAPTER_LAYERS[layer]]
        if not named["target_modules"]:
            adapters["match_all_linear"] = True
        _replace(self.plain, "policy.dtensor_cfg", {"enabled": True, "lora_cfg": adapters})
        self._remove(f"{_MEGATRON}.peft", "replaced by policy.dtensor_cfg.lora_cfg")

    def translate_adapters(self) -> None:
        """Refuse two choices of layers that contradict each other, and fill in the one that NeMo-RL makes itself."""
        key = "policy.dtensor_cfg.lora_cfg"
        section = value_at(self.plain, key)
        if not isinstance(section, dict) or section.get("enabled") is not True:
            return
        if section.get("match_all_linear") is True and section.get("target_modules"):
            self._refuse(
                f"{key}.target_modules",
                "match_all_linear=true is set too, which adapts all layers in NeMo-RL; remove one of the two",
                f"{key}.target_modules",
            )
        if section.get("match_all_linear") is False and not section.get("target_modules"):
            if section.get("exclude_modules"):
                section["match_all_linear"] = True
            else:
                section["target_modules"] = ["*_proj"]
                self.notes.append(Note(f"{key}.target_modules=*_proj", "its default", is_set=True))

    def translate_optimizer(self) -> None:
        """Translate the name of the optimizer, and remove a null section."""
        name = value_at(self.plain, "policy.optimizer.name")
        # Any class path is possible in NeMo-RL, e.g. one of Transformer Engine.
        if name in OPTIMIZERS:
            _replace(self.plain, "policy.optimizer.name", OPTIMIZERS[name])
        elif isinstance(name, str) and "." in name:
            hint = "; policy.optimizer.name=muon trains matrices with Muon" if "muon" in name.lower() else ""
            self._refuse("policy.optimizer.name", f"only torch.optim.AdamW is supported{hint}", "policy.optimizer.name")
        if _has(self.plain, "policy.optimizer") and value_at(self.plain, "policy.optimizer") is None:
            self._refuse(
                "policy.optimizer", "no optimizer is named (Megatron has its own)", "policy.optimizer.kwargs.lr"
            )
        # The same choice with the opposite sense.
        deferred = value_at(self.plain, "policy.dtensor_cfg.defer_fsdp_grad_sync")
        if isinstance(deferred, bool):
            new = "policy.dtensor_cfg.reduce_every_micro_batch"
            self._remove("policy.dtensor_cfg.defer_fsdp_grad_sync", f"replaced by {new}")
            _replace(self.plain, new, not deferred)

    def translate_scheduler(self) -> None:
        """Translate torch's schedulers; a null policy.scheduler is removed."""
        key = "policy.scheduler"
        value = value_at(self.plain, key)
        if value is None:
            if _has(self.plain, key):
                self._remove(key, "null is no schedule")
            return
        if not is_torch_scheduler(value):
            return
        # The lowest rate and the end of a schedule depend on these two keys.
        peak, steps = value_at(self.plain, "policy.optimizer.kwargs.lr"), value_at(self.plain, "sft.max_num_steps")
        try:
            schedule = translate_scheduler(
                value,
                float(peak) if isinstance(peak, int | float) else 5e-5,  # the default of policy.optimizer.kwargs.lr
                steps if isinstance(steps, int) else None,
            )
        except InexactScheduleError as error:
            self._refuse(key, f"{error}", key)
            return
        ends = "" if schedule["name"] == "constant" else ", exact if the run has sft.max_num_steps steps"
        self._remove(key, f"the list is replaced by policy.scheduler.name={schedule['name']}{ends}")
        _replace(self.plain, key, schedule)

    def translate_checkpointing(self) -> None:
        """Translate null, which NeMo-RL allows for the metric and for the number of checkpoints to keep."""
        # keep_latest_k exists in raylane only; it counts checkpoints whatever their metric is.
        section = self.plain.get("checkpointing")
        if not isinstance(section, dict):
            return
        if "keep_top_k" in section and section["keep_top_k"] is None:
            self._remove("checkpointing.keep_top_k", f"null keeps all: replaced by keep_latest_k={_ALL}")
            section["keep_latest_k"] = _ALL
        if "metric_name" in section and section["metric_name"] is None:
            self._remove("checkpointing.metric_name", "null keeps the latest: replaced by keep_latest_k")
            if latest := section.pop("keep_top_k", None):
                section["keep_latest_k"] = latest

    def keep_by_age(self) -> None:
        """Replace keep_top_k where checkpoints are saved at steps without a validation, which have no metric."""
        section = self.plain.get("checkpointing")
        if not isinstance(section, dict) or not isinstance(section.get("keep_top_k"), int):
            return
        saves, validates = section.get("save_period"), value_at(self.plain, "sft.val_period")
        if isinstance(saves, int) and isinstance(validates, int) and validates and saves % validates:
            self._note(
                "checkpointing.keep_top_k", "replaced by keep_latest_k: steps without a validation have no metric"
            )
            section["keep_latest_k"] = section.pop("keep_top_k")

    def translate_data(self) -> None:
        """Translate the data sets; keys that are the same in raylane are kept as they are.

        NeMo-RL names a data set, which it downloads, or a file with `dataset_name: ResponseDataset` (one question and
        one answer per line) or `openai_format` (messages). raylane reads local JSONL files only. Configurations of 2025
        have the same keys in `data` itself.
        """
        if not isinstance(self.plain.get("data"), dict):
            return
        data, translated = dict(self.plain["data"]), dict[str, Any]()
        # The keys of 2025 move from `data` to `data.train` and `data.validation`.
        old_paths = {name: data.pop(old) for name, old in _OLD_FILES.items() if old in data}
        if old_paths or "dataset_name" in data:
            shared = {key: data.pop(key) for key in _OLD if key in data}
            # A data set by name has its own validation part; files are named one by one.
            for name in ("train", "validation") if "dataset_name" in shared and not old_paths else old_paths:
                path = {"data_path": old_paths[name]} if name in old_paths else {}
                data.setdefault(name, {**shared, **path})
            self._note("data.dataset_name", "replaced by data.train and data.validation")
        default = data.pop("default", None) or {}
        if default:
            self._note("data.default", "its values are used for data.train and data.validation")
        for name in ("train", "validation"):
            sets = data.get(name)
            if isinstance(sets, Mapping):
                sets = [sets]
            # A file name, or a list of names and of {path, weight}, is raylane's own form and stays as it is.
            if not isinstance(sets, list) or not all(
                isinstance(data_set, Mapping) and "path" not in data_set for data_set in sets
            ):
                continue
            del data[name]
            paths = [path for data_set in sets for path in self._one_set({**default, **data_set}, name, translated)]
            # raylane has one validation file; training data may be spread over several.
            if name == "validation" and len(paths) > 1:
                self._lack("data.validation", f"several files ({', '.join(paths)}): join them into one")
            elif len(paths) == len(sets) and paths:
                self._set(translated, name, paths[0] if len(paths) == 1 else paths)
                self._note(f"data.{name}", "the section is replaced by its data_path")
        self.plain["data"] = {**translated, **data}  # the user's own keys win over translated ones

    def _one_set(self, data_set: dict[str, Any], name: str, translated: dict[str, Any]) -> Iterator[str]:
        """Yield the path of one data set if raylane can read it; set its other keys in `translated`."""
        where = f"data.{name}"
        kind, path = data_set.pop("dataset_name", None), data_set.pop("data_path", None)
        question, answer = data_set.pop("input_key", None), data_set.pop("output_key", None)
        chat = data_set.pop("chat_key", None)
        # The size of the validation set that is held out from the training data.
        size = data_set.pop("split_validation_size", 0)
        if size and name == "train":
            # NeMo-RL passes the value to train_test_split, for which 1 and above is a number of rows.
            if isinstance(size, int | float) and 0 < size < 1:
                self._set(translated, "validation_fraction", size)
                self._note(f"{where}.split_validation_size", "replaced by data.validation_fraction")
            else:
                reason = f"{where}.split_validation_size={size} is no fraction: it must be less than 1"
                self._lack("data.validation_fraction", reason)
        for key, value in data_set.items():
            if key in DATA_SET_RULES and not (key == "tool_key" and value not in (None, "tools")):
                self._note(f"{where}.{key}", DATA_SET_RULES[key].why_left_out)
            elif key == "prompt_file" and isinstance(value, str):
                self._set(translated, "prompt", self.names.get(value, value))
                self._note(f"{where}.{key}", "replaced by data.prompt")
            elif value:  # an unknown key that requests something; null and empty text request nothing
                self._lack(where, f"{where}.{key}={value!r} is not supported; put its effect into the data")
            else:
                self._note(f"{where}.{key}", "empty")
        if kind in self.names:
            self._note(f"{where}.dataset_name", f"{kind} is in {self.names[kind]}")
            if kind in HUB_COLUMNS:
                self._set(translated, "input_key", question or HUB_COLUMNS[kind][0])
                self._set(translated, "output_key", answer or HUB_COLUMNS[kind][1])
            yield self.names[kind]
        elif kind is not None and kind not in (*_PAIRS, *_MESSAGES):
            reason = (
                f"{where}.dataset_name={kind!r} is a data set that NeMo-RL downloads and converts. Name a file, folder "
                f"or data set of the hub with messages, or with a question and an answer, by --map {kind}=PATH"
            )
            self._lack(where, reason)
        elif not isinstance(path, str):
            self._lack(where, f"{where}.data_path is not set; set {where} to the path of a JSONL file")
        else:
            # NeMo-RL's defaults of input_key and output_key (response_dataset.py).
            if kind in _PAIRS or (kind is None and (question or answer)):
                self._set(translated, "input_key", question or "input")
                self._set(translated, "output_key", answer or "output")
            elif chat:
                self._set(translated, "messages_key", chat)
            yield path

    def _set(self, translated: dict[str, Any], key: str, value: Any) -> None:
        """Set a key of `data`, unless another data set needs another value of it."""
        other = translated.setdefault(key, value)
        if other != value:
            reason = f"data sets with {key}={other!r} and {value!r}: all files must have the same"
            self._lack(f"data.{key}", reason)

    def _note(self, key: str, reason: str) -> None:
        self.notes.append(Note(key, reason))

    def _lack(self, key: str, reason: str) -> None:
        """Record that a key of raylane must be set, because its value could not be translated."""
        self.problems.append(Problem(reason, key, key))

    def drop_repeated_lengths(self) -> None:
        """Remove lengths that only repeat policy.max_total_sequence_length, and those of packing that is off."""
        policy = self.plain.get("policy")
        policy = policy if isinstance(policy, dict) else {}
        length, rows = policy.get("max_total_sequence_length", 1024), policy.get("train_micro_batch_size", 1)
        if not isinstance(length, int) or not isinstance(rows, int):
            return  # the schema refuses them
        packed = value_at(self.plain, "policy.sequence_packing.enabled") is not False
        repeats: dict[str, Callable[[Any], bool]] = {
            "data.max_input_seq_length": lambda value: value is None or value == length,
            "policy.sequence_packing.train_mb_tokens": lambda value: not packed or value == length * rows,
            "policy.sequence_packing.sequence_length_round": lambda value: (
                not packed or (isinstance(value, int) and value > 0 and length % value == 0)
            ),
        }
        for key, is_repeated in repeats.items():
            if not _has(self.plain, key):
                continue
            off = key.startswith("policy.sequence_packing.") and not packed
            if is_repeated(value_at(self.plain, key)):
                self._remove(key, "packing is off" if off else "rows have policy.max_total_sequence_length tokens")
            else:
                self._refuse(key, OTHERWISE[key])
        name = value_at(self.plain, "policy.tokenizer.name")
        if name is not None and name == policy.get("model_name"):
            self._remove("policy.tokenizer.name", "the tokenizer is in policy.model_name")

    def drop_and_refuse_keys(self) -> None:
        """Remove every key that has a rule; record those that request something."""
        for rule in RULES:
            if not _has(self.plain, rule.key):
                continue
            if rule.harmless(value_at(self.plain, rule.key)):
                self._remove(rule.key, rule.why_left_out)
            else:
                self._refuse(rule.key, rule.why_refused, rule.key if rule.changes_training else None)

    def spell_values(self) -> None:
        """Replace values that have another spelling in raylane."""
        for key, spellings in SPELLINGS.items():
            value = value_at(self.plain, key)
            if isinstance(value, str) and value in spellings:
                _replace(self.plain, key, spellings[value])
        key = "policy.tokenizer.chat_template"
        template = value_at(self.plain, key)
        if isinstance(template, str):
            marked = MARKED_TEMPLATES.get(hashlib.sha256(template.encode()).hexdigest())
            if marked is not None:
                _replace(self.plain, key, marked)
                self._note(key, "marked: all that the assistant says is learned, and the end token, as in NeMo-RL")

    def find_models(self) -> None:
        """Replace names of models on the hub by paths on this machine, or mark them as names on the hub."""
        for key in ("policy.model_name", "policy.tokenizer.name"):
            name = value_at(self.plain, key)
            if isinstance(name, str) and name in self.names:
                _replace(self.plain, key, self.names[name])
                self._note(key, f"{name} is in {self.names[name]}")
            elif isinstance(name, str) and _HUB_NAME.fullmatch(name) and not Path(name).exists():
                _replace(self.plain, key, f"hf:{name}")
                self._note(key, f"hf:{name}, which the run downloads; --map {name}=PATH names a folder instead")

    def fill_in_defaults(self) -> None:
        """Set keys that the document leaves open and for which NeMo-RL and raylane have other defaults."""
        self.translate_adapters()
        self.keep_by_age()
        self.find_models()
        # In raylane null means the tokenizer's own template, which is "default" or an absent key in NeMo-RL.
        tokenizer = value_at(self.plain, "policy.tokenizer")
        if isinstance(tokenizer, dict) and "chat_template" in tokenizer and tokenizer["chat_template"] is None:
            tokenizer["chat_template"] = PASSTHROUGH
            self.notes.append(Note("policy.tokenizer.chat_template", "null joins the messages: replaced by a template"))
        asked = {problem.must_set for problem in self.problems}
        trains_adapters = value_at(self.plain, "policy.dtensor_cfg.lora_cfg.enabled") is True
        for key, (value, effect) in THEIR_DEFAULTS.items():
            # A set policy.scheduler is complete, whichever of its keys it has.
            section = "policy.scheduler" if key.startswith("policy.scheduler.") else key
            # Noise in the log of a run without LoRA.
            idle = key.startswith("policy.dtensor_cfg.lora_cfg") and not trains_adapters
            if not _has(self.plain, section) and section not in asked and not idle:
                _replace(self.plain, key, value)
                shown = {None: "null", False: "false"}.get(value, value)
                self.notes.append(Note(f"{key}={shown}", effect, is_set=True))
