"""One thread a worker: tiny operations on many threads spend their time waiting for each other."""

import torch

from tests.ranks import ranks  # noqa: F401  a fixture for all tests

torch.set_num_threads(1)
