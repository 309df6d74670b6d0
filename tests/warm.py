"""What every rank of the tests needs, done once in the process that they are all forked from."""

import torch

import optimus_compiler as optimus
from optimus_compiler.runtime.kernels import cpu
from tests.captured import share_captures
from tests.layouts import batches, compile_small


def warm() -> None:
    """Loads the kernels, which asks what vectors this CPU has, and trains a step of the models that most tests train:
    Dynamo and AOT Autograd fill their caches, and the captures stay."""
    torch.set_num_threads(1)
    share_captures()
    cpu.load()
    ids, labels = (values[0] for values in batches())
    for kind in ("olmoe", "olmo"):
        compile_small(kind, optimus.Mesh()).train_step(ids, labels)


with torch.random.fork_rng():
    warm()
