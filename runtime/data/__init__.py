"""Data for pretraining: tokenise, cut into instances, shuffle, shard to .npy, and read back by position."""
