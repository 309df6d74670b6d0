"""What each component of the step gains (the paper's table 3): the fused block, and sharding of the optimizer's state.

One process: transformers' model with its two experts implementations and fused AdamW beside the compiled one. Four
processes, dp=2 x ep=2: the compiled model with the optimizer's state sharded over dp (so), as EPSO does it (epso), and
replicated (none). Medians of interleaved rounds; a ratio is the median of the rounds' ratios.

Example:
  python -m bench.studies.components
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor, nn

import optimus_compiler as optimus
from bench.studies.options import PATIENCE, Options, parse_options
from bench.studies.results import keep_study
from bench.tables import machine
from optimus_compiler.models import build, from_name
from tests.ranks import Ranks

BATCH, LENGTH, VOCABULARY, ROUNDS = 4, 256, 4096, 9
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
PARTS = ("forward", "backward", "optimizer")
SHARDINGS = ("so", "epso", "none")
Step = Callable[[], dict[str, float]]  # runs a step; seconds of each part
Rounds = dict[str, list[dict[str, float]]]  # by variant
# The paper's table 3, over its 7B to 220B runs: against Hugging Face's block, and against plain sharding.
PAPER = {
    "fused": "block 1.33 to 2.83, step 1.35 to 1.71",
    "epso": "optimizer 1.07 to 1.36, step 1.01 to 1.19",
}


def study(options: Options) -> None:
    """Measures both comparisons and shows them in one table."""
    rounds = options.scaled(ROUNDS)
    alone = measure_alone(rounds)
    pool = Ranks()
    try:
        (sharded, *_) = pool.run(4, measure_sharded, rounds, seconds=PATIENCE)
    finally:
        pool.stop()
    rows, bars = [], {}
    for title, found, base in (("1 process", alone, "HF grouped_mm"), ("dp=2 x ep=2", sharded, "so")):
        for name, steps in found.items():
            parts = {part: median(step[part] for step in steps) for part in PARTS}
            bars[f"{name}, {title}"] = list(parts.values())
            ratios = [_ratio(found, base, name, part) for part in (*PARTS, "step")]
            paper = PAPER.get(name, "")
            rows.append([f"{title}: {name}", *(f"{1e3 * value:.0f}" for value in parts.values()), *ratios, paper])
    keep_study(
        "study-components",
        f"A step of 4 layers, 64 experts, {BATCH} x {LENGTH} tokens, fp32: ms of its parts, and how often as fast as "
        "the first row",
        machine(),
        ["variant", *PARTS, *(f"{part} x" for part in (*PARTS, "step")), "in the paper, x"],
        rows,
        curves={name: list(enumerate(values)) for name, values in bars.items()},
        draw=[lambda axes: _draw(axes, bars)],
        folder=options.results,
    )


def measure_alone(rounds: int) -> Rounds:
    """transformers' model, with two experts implementations, and the compiled one, in this process."""
    torch.set_num_threads(1)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    steps = {f"HF {name}": _hf_step(name, ids) for name in ("grouped_mm", "eager")}
    steps["fused"] = _our_step(optimus.Mesh(), "none", ids)
    return _interleaved(steps, rounds)


def measure_sharded(rounds: int) -> Rounds:
    """The compiled model at dp=2 x ep=2 with each sharding; on every rank."""
    mesh = optimus.Mesh(dp=2, ep=2)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(mesh.rank))
    return _interleaved({name: _our_step(mesh, name, ids) for name in SHARDINGS}, rounds)


def _hf_step(implementation: str, ids: Tensor) -> Step:
    import transformers

    sizes = {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(**sizes, experts_implementation=implementation, pad_token_id=1, eos_token_id=0)
    model = transformers.OlmoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def loss() -> Tensor:
        return model(ids, labels=ids, output_router_logits=True, use_cache=False).loss

    def optimize() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: _timed(loss, optimize)


def _our_step(mesh: optimus.Mesh, sharding: Any, ids: Tensor) -> Step:
    compiled = optimus.compile(
        build(from_name("olmoe-tiny", **SIZES)),
        mesh,
        sequence_length=LENGTH,
        micro_batch_size=BATCH,
        backend="aot_eager",
    )
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-5, sharding=sharding)

    def loss() -> Tensor:
        found = compiled(ids, labels=ids).loss
        assert found is not None
        return found

    def optimize() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda: _timed(loss, optimize)


def _timed(loss: Callable[[], Tensor], optimize: Callable[[], None]) -> dict[str, float]:
    """Seconds of each part, at the end of which all ranks meet."""

    def now() -> float:
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter()

    times = [now()]
    value = loss()
    times.append(now())
    value.backward()
    times.append(now())
    optimize()
    times.append(now())
    return {part: times[number + 1] - times[number] for number, part in enumerate(PARTS)}


def _interleaved(steps: dict[str, Step], rounds: int) -> Rounds:
    """Every variant in every round, in another order each time; the first round warms up."""
    found: Rounds = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            parts = steps[name]()
            if number:
                found[name].append(parts)
    return found


def _ratio(found: Rounds, base: str, name: str, part: str) -> str:
    def seconds(step: dict[str, float]) -> float:
        return sum(step.values()) if part == "step" else step[part]

    pairs = zip(found[base], found[name], strict=True)
    return f"{median(seconds(theirs) / seconds(ours) for theirs, ours in pairs):.2f}"


def _draw(axes: Axes, bars: dict[str, list[float]]) -> None:
    left = [0.0] * len(bars)
    for number, part in enumerate(PARTS):
        widths = [1e3 * values[number] for values in bars.values()]
        axes.barh(list(bars), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend()


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
