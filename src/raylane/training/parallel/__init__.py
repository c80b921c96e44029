"""Division of a run over its workers: mesh, pipeline stages, tensor parallelism, sums of gradients."""
