"""Values of NeMo-RL keys that have another form in raylane: tables only, applied by `translate`."""

from __future__ import annotations

from typing import Any

SPELLINGS: dict[str, dict[str, str]] = {
    "policy.dtensor_cfg.lora_cfg.lora_A_init": {"uniform": "kaiming"},
    "policy.sequence_packing.algorithm": {"modified_first_fit_decreasing": "first_fit_decreasing"},
    "checkpointing.metric_name": {
        "val:val_loss": "val:loss", "val_loss": "val:loss", "train:train_loss": "train:loss", "train_loss": "train:loss"
    },
}  # fmt: skip
"""Key -> value in NeMo-RL -> value in raylane."""
# NeMo-RL concatenates the messages if chat_template is null.
PASSTHROUGH = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
# Templates without marks, by SHA-256: NeMo-RL learns all of a message of the assistant, and adds the first and the last
# token itself. The one of examples/configs/sft.yaml.
MARKED_TEMPLATES = {
    "c101dc77c92eedbeb64a3910d835b40a4ecbce356d89d4a568f02c17a81283bf": (
        "{{ bos_token }}{% for message in messages %}{% set text = message.content.strip() %}"
        "{% if message.role == 'system' %}{{ 'Context: ' ~ text }}"
        "{% elif message.role == 'user' %}{{ ' Question: ' ~ text ~ ' Answer:' }}"
        "{% elif message.role == 'assistant' %}{% generation %}{{ ' ' ~ text }}"
        "{% if loop.last %}{{ eos_token }}{% endif %}{% endgeneration %}{% endif %}{% endfor %}"
    )
}
HUB_COLUMNS = {"OpenMathInstruct-2": ("problem", "expected_answer")}
"""Data set -> columns of question and answer, where NeMo-RL names them itself."""
ADAPTER_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Name of a layer in Megatron -> names in Hugging Face models."""
THEIR_DEFAULTS: dict[str, tuple[Any, str]] = {
    "policy.scheduler.name": ("constant", "the learning rate is constant unless policy.scheduler is set"),
    "policy.optimizer.weight_decay_on": ("all", "torch.optim.AdamW decays every parameter"),
    "policy.sequence_packing.enabled": (False, "packing is off unless it is set"),
    "policy.max_grad_norm": (None, "gradients are not clipped unless it is set"),
    "policy.dtensor_cfg.lora_cfg.dropout_position": ("post", "its default"),
    "policy.dtensor_cfg.lora_cfg.lora_A_init": ("xavier", "its default"),
    "data.overlong": ("drop", "conversations that are too long get no loss"),
    "sft.max_num_steps": (60, "its default"),
    "sft.val_batches": (8, "its default"),
    "sft.val_global_batch_size": (32, "its default"),
    "sft.val_micro_batch_size": (1, "its default"),
}
"""Key -> value with the effect that NeMo-RL has if the key is absent, and that effect."""
OPTIMIZERS = {"torch.optim.AdamW": "adamw", "AdamW": "adamw", "torch.optim.adamw.AdamW": "adamw"}
