"""What executes a compiled program: kernels, data, buckets, the optimizer and the trainer."""
