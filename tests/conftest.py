"""One thread a worker: tiny operations on many threads spend their time waiting for each other."""

import torch

torch.set_num_threads(1)
