"""What executes a compiled program: kernels, collectives, pipeline, optimizer, trainer, data, checkpoints, resilience."""
