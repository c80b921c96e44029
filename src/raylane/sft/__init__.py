"""Supervised fine-tuning of language models on worker groups.

    config      schema of a run, its files and overrides, checks of sizes
    data        conversations to tokens and rows; order and mixture of the rows
    parallel    mesh of the workers, pipeline stages, tensor parallelism, sums of gradients
    model       attention, loss, adapters, optimizer; construction of the divided model
    checkpoint  checkpoints and Hugging Face folders
    run         worker, policy and trainer; plan of a run

Each package imports only those above it. Two stand beside: `report` (metrics, and the page of a run), which `run` uses,
and `nemo` (NeMo-RL's configurations), which only the command line imports; both import `config` alone.
"""
