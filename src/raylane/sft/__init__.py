"""Supervised fine-tuning of language models on worker groups.

    config      schema of a run, its files, checks of values
    data        conversations to tokens and rows; order and mixture of the rows
    run         worker, policy and trainer; plan of a run

Each package imports only those above it, and `raylane.training`, which has the model, its division, checkpoints and
metrics. Beside them stands `nemo` (NeMo-RL's configurations), which only the command line imports; it imports `config`
alone.
"""
