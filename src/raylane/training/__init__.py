"""Parts that every training on worker groups shares: configuration, model, checkpoints, workers, driver's handle.

    config      sections of a configuration, its files and overrides, checks of sizes
    labels      label of a position without a loss
    storage     files in folders and behind URLs
    vocabulary  facts about a tokenizer that a model needs
    report      metrics, and the page of a run
    parallel    mesh of the workers, pipeline stages, tensor parallelism, sums of gradients
    model       attention, loss, adapters, optimizer; construction of the divided model
    checkpoint  checkpoints and Hugging Face folders
    run         step, worker and policy; connection to Ray, record, folders and memory of a run

Each imports only those above it. The kinds of training stand on top, beside each other: `raylane.sft`.
"""
