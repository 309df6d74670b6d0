"""Everything there is to measure on a machine with a GPU, in one command and under 8 minutes.

python -m bench.gpu                       # results in bench/results/gpu-*.json; then python -m bench.report
TRITON_INTERPRET=1 python -m bench.gpu --smoke --output /tmp/gpu     # the same code on a CPU, tiny: does it run?

Ours are the Triton kernels, adding weight gradients to buffers as a compiled model does; transformers' implementations
and other libraries add to `.grad`. Everything is bf16. A figure is a median of rounds in which every variant runs in
turn; launches are part of it. What fails, or finds no time left, is listed with its reason.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import optimus_compiler as optimus
from bench.gpu_bench import GpuBench, Step
from bench.roofline import stages
from bench.tables import RESULTS
from optimus_compiler.experts import register_experts
from optimus_compiler.models import build, from_name
from optimus_compiler.runtime.kernels import moe, set_kernels
from optimus_compiler.runtime.kernels.triton.tiles import tile_for
from optimus_compiler.runtime.kernels.triton.tune import products, tune

TOP_K = 8


class Layer(NamedTuple):
    """The experts of one layer of a model."""

    name: str
    hidden: int
    width: int
    experts: int


LAYERS = [
    Layer("7B", 2048, 1024, 64),
    Layer("20B", 2048, 1024, 96),
    Layer("100B", 3072, 1536, 144),
    Layer("220B", 3072, 1536, 240),
]
TOKENS = [2048, 8192, 32768]
SMOKE = [Layer("smoke", 32, 16, 16)]


def routing(bench: GpuBench, tokens: int, experts: int, kind: str) -> Tensor:
    """indices_TK: uniform at random; skewed, the first experts likelier than the last; or FUR's, all equal."""
    if kind == "FUR":
        return (torch.arange(tokens * TOP_K, device=bench.device) % experts).view(tokens, TOP_K)
    popularity = torch.linspace(3.0, 0.0, experts, device=bench.device) if kind == "skewed" else 0.0
    gumbel = -torch.empty(tokens, experts, device=bench.device).exponential_().log()
    return (gumbel + popularity).topk(TOP_K).indices


def hf_experts(bench: GpuBench, layer: Layer) -> Any:
    """transformers' experts of a layer, with gradients that stay and are added to."""
    import transformers
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    register_experts()
    config = transformers.OlmoeConfig(
        hidden_size=layer.hidden,
        intermediate_size=layer.width,
        num_experts=layer.experts,
        num_local_experts=layer.experts,
        num_experts_per_tok=TOP_K,
    )
    with torch.device("meta"):
        experts = OlmoeExperts(config)
    experts.config = config
    for name, parameter in list(experts.named_parameters()):
        weight = torch.nn.Parameter(bench.draw(*parameter.shape, scale=0.02))
        weight.grad = torch.zeros_like(weight)
        setattr(experts, name, weight)
    return experts


def block_steps(bench: GpuBench, experts: Any, layer: Layer, x_TH: Tensor, indices_TK: Tensor) -> dict[str, Step]:
    """Forward and backward of the experts of one layer on the same weights, by implementation."""
    weights_TK = torch.rand(indices_TK.shape, device=bench.device).softmax(1).to(x_TH.dtype).requires_grad_()
    x_TH = x_TH.requires_grad_()
    dout_TH = torch.randn_like(x_TH)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    tables = [table.view(layer.experts, 2, layer.width, layer.hidden) for table in (gate_up, gate_up.grad)]

    def run(forward: Callable[[], Tensor]) -> None:
        x_TH.grad = weights_TK.grad = None
        forward().backward(dout_TH)

    def theirs(implementation: str, module: Callable[..., Tensor] = experts) -> Tensor:
        experts.config._experts_implementation = implementation
        return module(x_TH, indices_TK, weights_TK)

    def ours() -> Tensor:
        return moe(x_TH, weights_TK, indices_TK, tables[0], down, tables[1], down.grad)

    steps: dict[str, Step] = {"ours": partial(run, ours)}
    for implementation in ("eager", "grouped_mm", "sonicmoe"):
        steps[f"HF {implementation}"] = partial(run, partial(theirs, implementation))
    compiled = torch.compile(experts)
    steps["torch.compile(HF grouped_mm)"] = partial(run, partial(theirs, "grouped_mm", compiled))
    return steps


def library_steps(bench: GpuBench, layer: Layer, x_TH: Tensor, indices_TK: Tensor) -> Iterator[tuple[str, Step]]:
    """The experts of other libraries, with weights of their own; MegaBlocks routes by itself. ImportError: left out."""
    dout_TH = torch.randn_like(x_TH)
    try:
        from scattermoe.mlp import GLUMLP

        sizes = {"input_size": layer.hidden, "hidden_size": layer.width, "num_experts": layer.experts, "top_k": TOP_K}
        scatter = GLUMLP(**sizes).to(bench.device, torch.bfloat16)
        weights_TK = torch.full(indices_TK.shape, 1 / TOP_K, device=bench.device, dtype=torch.bfloat16)
        yield "ScatterMoE", lambda: scatter(x_TH, weights_TK, indices_TK).backward(dout_TH)
    except ImportError as error:
        bench.left_out.append(f"ScatterMoE: {error}")
    try:
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        arguments = Arguments(
            hidden_size=layer.hidden,
            ffn_hidden_size=layer.width,
            moe_num_experts=layer.experts,
            moe_top_k=TOP_K,
            mlp_type="glu",
            activation_fn=F.silu,
            bias=False,
            bf16=True,
            fp16=False,
            device=bench.device,
        )
        mega = dMoE(arguments).to(bench.device, torch.bfloat16)
        yield "MegaBlocks", lambda: mega(x_TH[None])[0].backward(dout_TH[None])
    except ImportError as error:
        bench.left_out.append(f"MegaBlocks: {error}")


def measure_peak(bench: GpuBench) -> float:
    """FLOP/s of a large product: what there is to reach."""
    size = 64 if bench.smoke else 8192
    a, b = bench.draw(size, size), bench.draw(size, size)
    source = torch.empty(2**16 if bench.smoke else 2**30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    found = bench.medians({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    peak, bandwidth = 2 * size**3 / found["product"][0], 2 * len(source) / found["copy"][0]
    rows = [
        [f"product of {size} x {size}, bf16", f"{peak / 1e12:.1f} TFLOP/s"],
        [f"copy of {len(source) / 2**20:.0f} MiB", f"{bandwidth / 1e9:.0f} GB/s"],
    ]
    bench.publish("peak", "What this GPU reaches", ["", "rate"], rows)
    return peak


def measure_errors(bench: GpuBench) -> None:
    """Relative errors of output and gradients against transformers' eager experts in fp64 on the CPU."""
    layer = Layer("errors", 96, 32, 8) if bench.smoke else Layer("errors", 1024, 512, 32)
    tokens = 24 if bench.smoke else 1024
    experts = hf_experts(bench, layer)
    x_TH = bench.draw(tokens, layer.hidden)
    indices_TK = routing(bench, tokens, layer.experts, "skewed")
    weights_TK = torch.rand(indices_TK.shape, device=bench.device).softmax(1).to(x_TH.dtype)
    dout_TH = bench.draw(tokens, layer.hidden)

    def run(implementation: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        tables = [p.detach().to(device, dtype).requires_grad_() for p in (experts.gate_up_proj, experts.down_proj)]
        leaves = [t.detach().to(device, dtype).requires_grad_() for t in (x_TH, weights_TK)]
        if implementation == "ours":
            gate_up = tables[0].view(layer.experts, 2, layer.width, layer.hidden)
            out_TH = moe(leaves[0], leaves[1], indices_TK, gate_up, tables[1])
        else:
            experts.config._experts_implementation = implementation
            named = dict(zip(("gate_up_proj", "down_proj"), tables, strict=True))
            arguments = (leaves[0], indices_TK.to(device), leaves[1])
            out_TH = torch.func.functional_call(experts, named, arguments)
        return [out_TH.detach(), *torch.autograd.grad(out_TH, [*leaves, *tables], dout_TH.to(device, dtype))]

    exact = run("eager", torch.float64, torch.device("cpu"))
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for implementation in ("ours", "eager", "grouped_mm"):
            try:
                found = run(implementation, dtype, bench.device)
            except Exception as error:  # as in medians
                bench.note(f"errors of {implementation}, {dtype}", error)
                continue
            errors = [float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
            name = implementation if implementation == "ours" else f"HF {implementation}"
            rows.append([f"{name}, {str(dtype).removeprefix('torch.')}", *(f"{error:.1e}" for error in errors)])
    columns = ["implementation", "output", "dx", "dweights", "dgate_up", "ddown"]
    bench.publish("errors", "Relative error against fp64 on the CPU, skewed routing", columns, rows)


def measure_products(bench: GpuBench, layer: Layer, tokens: int, peak: float) -> None:
    """Each grouped product by itself."""
    rows_R = tokens * TOP_K
    flops = 2.0 * rows_R * layer.hidden * layer.width
    timed = products(bench.device, torch.bfloat16, layer.experts, layer.hidden, layer.width, tokens, rows_R)
    steps: dict[str, Step] = {}
    for name, (x, sizes, run) in timed.items():
        steps[name] = partial(run, tile_for(name, x, sizes))
    found = bench.medians(steps)
    rows = []
    for product, (seconds, _) in found.items():
        rate = flops * (1 if product in ("down", "dh", "ddown") else 2) / seconds
        rows.append([product, f"{1e3 * seconds:.3f}", f"{rate / 1e12:.1f}", f"{100 * rate / peak:.0f}"])
    columns = ["product", "ms", "TFLOP/s", "% of peak"]
    bench.publish(f"products-{tokens}", f"Grouped products, {layer.name} layer, {tokens:,} tokens", columns, rows)


def measure_blocks(bench: GpuBench, layers: list[Layer], tokens: list[int], peak: float) -> None:
    """Forward and backward of the experts, by layer, tokens and routing."""
    columns = ["layer, tokens, routing", "variant", "ms", "x ours", "TFLOP/s", "% of peak", "peak MiB"]
    rows = []
    for layer in layers:
        experts = hf_experts(bench, layer)
        for count in tokens:
            flops = sum(stage.flops for stage in stages(count, TOP_K, layer.hidden, layer.width, layer.experts))
            for kind in ("balanced", "skewed", "FUR"):
                case = f"{layer.name}, {count:,}, {kind}"
                if not bench.has_time(case):
                    continue
                x_TH, indices_TK = bench.draw(count, layer.hidden), routing(bench, count, layer.experts, kind)
                steps = block_steps(bench, experts, layer, x_TH, indices_TK)
                if layer == layers[0] and kind == "balanced":
                    steps.update(library_steps(bench, layer, x_TH, indices_TK))
                if bench.smoke or layer != layers[0] or kind != "balanced":
                    del steps["torch.compile(HF grouped_mm)"]  # it compiles for every shape anew
                found = bench.medians(steps)
                for name, (seconds, peak_bytes) in found.items():
                    rate = flops / seconds
                    ratio = f"{seconds / found['ours'][0]:.2f}" if "ours" in found else ""
                    figures = [f"{1e3 * seconds:.3f}", ratio, f"{rate / 1e12:.1f}", f"{100 * rate / peak:.0f}"]
                    rows.append([case, name, *figures, f"{peak_bytes / 2**20:.0f}"])
        del experts
    bench.publish("block", "Experts of one layer, forward + backward, bf16", columns, rows)


def measure_layer(bench: GpuBench, tokens: int) -> None:
    """A one-layer OLMoE, 7B's sizes and a small vocabulary: attention, router, experts, loss, auxiliary loss."""
    import transformers

    sizes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 1024}
    if bench.smoke:
        sizes |= {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        sizes |= {"num_experts": 8, "eos_token_id": None}
    sequence = min(tokens, 32 if bench.smoke else 2048)
    ids = torch.randint(0, 1024, (tokens // sequence, sequence), device=bench.device)
    labels = ids.clone()
    steps: dict[str, Step] = {}

    def theirs(implementation: str, compiled: bool) -> Step:
        config = transformers.OlmoeConfig(**sizes, output_router_logits=True)
        config._experts_implementation = implementation
        torch.manual_seed(0)
        model: Any = transformers.OlmoeForCausalLM(config).to(bench.device, torch.bfloat16)
        run = torch.compile(model) if compiled else model
        return lambda: run(input_ids=ids, labels=labels, use_cache=False).loss.backward()

    def ours() -> Step:
        with torch.device("meta"):
            model = build(from_name("mula-7b-a1b", **sizes)).to(torch.bfloat16)
        compiled = optimus.compile(
            model,
            sequence_length=sequence,
            micro_batch_size=len(ids),
            seed=0,
            kernels="triton",
            backend="aot_eager" if bench.smoke else "inductor",
        )
        optimus.ShardedAdamW(compiled, lr=1e-4)  # gives the parameters their gradient buffers
        return lambda: compiled(ids, labels).loss.backward()

    makers: dict[str, Callable[[], Step]] = {
        "ours": ours,
        "HF eager": lambda: theirs("eager", False),
        "HF grouped_mm": lambda: theirs("grouped_mm", False),
    }
    if not bench.smoke:
        makers["torch.compile(HF grouped_mm)"] = lambda: theirs("grouped_mm", True)
    for name, make in makers.items():
        if bench.has_time(f"full layer, {name}"):
            try:
                steps[name] = make()
            except Exception as error:  # as in medians
                bench.note(f"full layer, {name}", error)
    found = bench.medians(steps)
    rows = []
    for name, (seconds, peak) in found.items():
        ratio = f"{seconds / found['ours'][0]:.2f}" if "ours" in found else ""
        rows.append([name, f"{1e3 * seconds:.3f}", ratio, f"{peak / 2**20:.0f}"])
    title = f"OLMoE-7B with one layer and 1,024 words, forward + backward, {tokens:,} tokens, bf16"
    bench.publish("layer", title, ["variant", "ms", "x ours", "peak MiB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=7.5, help="start nothing new after so many")
    parser.add_argument("--tune", action="store_true", help="first tune the tiles for the 7B layer at 32,768 tokens")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args()
    bench = GpuBench(arguments.output, arguments.minutes, arguments.smoke)
    layers, tokens = (SMOKE, [16]) if bench.smoke else (LAYERS, TOKENS)
    torch.manual_seed(0)
    set_kernels("triton")
    peak = measure_peak(bench)
    measure_errors(bench)
    if arguments.tune:
        first = layers[0]
        sizes = {"experts": first.experts, "hidden": first.hidden, "width": first.width}
        for product, tile, seconds, before in tune(
            bench.device, torch.bfloat16, **sizes, tokens=tokens[-1], rows=tokens[-1] * TOP_K
        ):
            print(f"{product}: {1e3 * seconds:.3f} ms, by default {1e3 * before:.3f} ms; {tile}")
    for count in dict.fromkeys((tokens[0], tokens[-1])):
        if bench.has_time(f"products at {count} tokens"):
            measure_products(bench, layers[0], count, peak)
    measure_layer(bench, tokens[len(tokens) // 2])
    measure_blocks(bench, layers, tokens, peak)
    print(*(f"left out: {each}" for each in dict.fromkeys(bench.left_out)), sep="\n")


if __name__ == "__main__":
    main()
