"""A configuration with the keys of NeMo-RL's examples/configs/sft.yaml of August 2026, in other order and values."""

from __future__ import annotations

NEMO_FILE = """
cluster: {segment_size: null, num_nodes: 1, gpus_per_node: 2}
logger:
  swanlab_enabled: false
  mlflow_enabled: false
  tensorboard_enabled: true
  wandb_enabled: true
  monitor_gpus: true
  num_val_samples_to_print: 2
  gpu_monitoring: {flush_interval: 5, collection_interval: 5}
  log_dir: runs/theirs/logs
  wandb: {name: "job-${data.train.dataset_name}", project: mine}
  swanlab: {name: "job-${data.train.dataset_name}", project: mine}
  mlflow: {tracking_uri: "http://localhost:1", run_name: "${data.train.dataset_name}", experiment_name: mine}
  tensorboard: {log_dir: "tb-${data.train.dataset_name}"}
data:
  train: {dataset_name: squad, split: train}
  validation: {dataset_name: squad, split: validation}
  default: {processor: sft_processor, prompt_file: null, system_prompt_file: null}
  num_workers: 3
  shuffle: true
  add_generation_prompt: false
  add_eos: true
  add_bos: true
  max_input_seq_length: ${policy.max_total_sequence_length}
policy:
  model_name: some/model
  precision: bfloat16
  max_total_sequence_length: 512
  train_micro_batch_size: 2
  train_global_batch_size: 16
  offload_optimizer_for_logprob: false
  max_grad_norm: 0.5
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  tokenizer:
    name: ${policy.model_name}
    chat_template_kwargs: null
    chat_template: "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
  optimizer:
    name: torch.optim.AdamW
    kwargs: {eps: 1e-6, betas: [0.8, 0.99], weight_decay: 0.2, lr: 3.0e-5, fused: False, foreach: False}
  sequence_packing:
    enabled: False
    sequence_length_round: 32
    microbatch_order: packer
    algorithm: modified_first_fit_decreasing
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  dynamic_batching:
    enabled: false
    sequence_length_round: 32
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  dtensor_cfg:
    enabled: true
    _v2: true
    tensor_parallel_size: 1
    context_parallel_size: 1
    dp_replicate_size: 1
    sequence_parallel: false
    activation_checkpointing: false
    cpu_offload: False
    custom_parallel_plan: null
    env_vars: {}
    automodel_kwargs: {}
    lora_cfg: {enabled: False, dim: 4, alpha: 8, dropout: 0.1, target_modules: [], match_all_linear: true}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    optimizer: {lr: 1.0e-6, clip_grad: "${policy.max_grad_norm}"}
    scheduler: {start_weight_decay: "${policy.megatron_cfg.optimizer.weight_decay}"}
checkpointing:
  save_optimizer: true
  checkpoint_must_save_by: null
  save_period: 20
  keep_top_k: 2
  higher_is_better: false
  metric_name: "val:val_loss"
  checkpoint_dir: runs/theirs/checkpoints
  enabled: true
sft:
  only_unmask_final: false
  seed: 7
  val_at_end: false
  val_at_start: true
  val_micro_batch_size: 2
  val_global_batch_size: 16
  val_batches: 4
  val_period: 20
  max_num_steps: 40
  max_num_epochs: 1
"""
