"""Model of a checkpoint of a fine-tuning run, as a Hugging Face or PEFT folder. Called by `raylane export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raylane.errors import CheckpointError, ConfigError
from raylane.sft.config.load import build_config
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.prepared import NOT_CONFIGURED, read_prepared
from raylane.training.checkpoint import folders
from raylane.training.checkpoint.export import Companions, Form, export_state
from raylane.training.checkpoint.folders import Saved
from raylane.training.checkpoint.publishing import HF_FOLDER
from raylane.training.model.hf_config import model_config
from raylane.training.storage import Place


def export_checkpoint(path: Place, out: Path, form: Form = "merged", dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of the checkpoint folder `path` (step_N) to the new folder `out`; return `out`.

    "merged" is a whole Hugging Face folder, with LoRA adapters added into the weights; "adapter" is a PEFT folder with
    the adapters alone. The folder is complete or absent. Raises CheckpointError for a checkpoint that cannot be used,
    ConfigError for an existing `out` or a form that the checkpoint does not have.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already. Name a folder that does not exist with --out")
    saved = folders.read(path)
    plain = {key: value for key, value in saved.config.items() if key not in NOT_CONFIGURED}
    config = build_config(plain, source=f"{saved.path}/run.json")
    folders.refuse_other_owner(path, config.checkpointing)
    hf_config, companions = _companions(saved, config, dtype)
    return export_state(saved, out, config.policy, hf_config, companions, form)


def _companions(saved: Saved, config: SftRunConfig, dtype: torch.dtype) -> tuple[Any, Companions]:
    """Return transformers' configuration of the model, and its tokenizer with what belongs to it.

    They come from the run's token cache, or else from the checkpoint's own hf folder.
    """
    from transformers import AutoConfig

    policy = config.policy
    cached = Path(config.data.cache_dir) / str(saved.config.get("prepared")) / "prepared.json"
    if cached.is_file():
        prepared = read_prepared(cached)
        end_id = prepared.end_ids[0] if prepared.end_ids else None
        hf_config = model_config(policy, prepared.vocab_size, prepared.pad_id, end_id)
        start = None if policy.model_name is None else Path(policy.model_name)
        return hf_config, Companions(prepared.tokenizer_dir, prepared.end_ids, start, dtype)
    written = saved.path / HF_FOLDER
    if isinstance(written, Path) and (written / "config.json").is_file():
        hf_config = AutoConfig.from_pretrained(written, local_files_only=True, trust_remote_code=False)
        return hf_config, Companions(written, (), written, dtype)
    raise CheckpointError(
        f"the tokenizer of {saved.path} is missing: neither the token cache {cached.parent} nor {written} exists. Run "
        "this command in the working directory of the run, or prepare the data again with `raylane plan`",
        path=str(saved.path),
    )
