"""`optimus plan`: what a run will need and how fast it will be, before a node-hour is spent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimus_compiler.cli.pretrain import ConfigArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from optimus_compiler.config import Config
    from optimus_compiler.runtime.plan.estimate import Plan
    from optimus_compiler.runtime.plan.hardware import Hardware
    from optimus_compiler.runtime.plan.scale import Point


def plan(
    config: ConfigArgument,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; dp is chosen, each rank's batch stays. Default: those of [mesh]."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="aurora, h200, or a TOML file like theirs.")] = "aurora",
    layout: Annotated[
        str | None, typer.Option(metavar="auto", help="Search for the fastest layout that fits, and plan the best few.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Efficiency on so many processes, the same batch a rank.")
    ] = None,
    concentration: Annotated[
        float, typer.Option(min=0.01, help="For --scale: of the Dirichlet distribution of tokens over experts.")
    ] = 20.0,
    loads: Annotated[
        Path | None,
        typer.Option(help="For --scale: a JSON list of token counts an expert instead, one or one a layer."),
    ] = None,
    png: Annotated[Path, typer.Option(help="For --scale: where the curve goes.")] = Path("scale.png"),
    overrides: SetOption = None,
) -> None:
    """Estimate memory, time and traffic of a run.

    On this machine alone: the model is captured and the passes run for the whole mesh, on fake tensors; nothing is
    allocated, no other process is needed. Exit code 2 where a rank needs more memory than its device has.

    \b
    Example:
      optimus plan mula-220b-a10b --world-size 12288
      optimus plan run.toml --world-size 24 --hardware h200 --set mesh.ep=8
      optimus plan mula-20b-a2b --world-size 96 --layout auto
      optimus plan mula-220b-a10b --scale 384,768,1536,3072,6144,12288
    """
    from rich.console import Console

    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.plan.deepen import planned_program
    from optimus_compiler.runtime.plan.estimate import estimate
    from optimus_compiler.runtime.plan.hardware import load_hardware
    from optimus_compiler.runtime.plan.layout import on_processes, refuse_what_does_not_fit
    from optimus_compiler.runtime.run import load_model_config

    machine = load_hardware(hardware)
    settings = load_config(config, overrides or ())
    sizes = _sizes(scale) if scale else []
    if layout not in (None, "auto"):
        raise ValueError(f"--layout {layout} is unknown: write --layout auto, or set mesh.pp, mesh.ep and the like")
    if layout:
        return _search(settings, machine, world_size)
    if world_size is not None or sizes:
        settings = on_processes(settings, world_size or sizes[0])
    console = Console()
    with console.status("capturing the model and running the passes"):
        program = planned_program(settings)
    if sizes:
        from optimus_compiler.runtime.plan import scale as scaling

        experts = getattr(load_model_config(settings.model), "num_experts", settings.mesh.ep)
        shares = scaling.recorded(loads, experts) if loads else scaling.dirichlet(experts, concentration)
        points = scaling.scale(program, settings, machine, sizes, shares)
        console.print(_scale_table(points))
        scaling.draw(points, png)
        print(f"{png}: the curve")
        return
    found = estimate(program, settings, machine)
    for table in (_memory_table(found), _traffic_table(found), _time_table(found)):
        console.print(table)
    refuse_what_does_not_fit(found)


def _search(settings: Config, machine: Hardware, world_size: int | None) -> None:
    from rich.console import Console

    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.runtime.plan.search import search
    from optimus_compiler.runtime.run import abstract_mesh

    processes = world_size or abstract_mesh(settings).size
    with StageProgress() as progress:
        plans = search(settings, machine, processes, progress.show)
    columns = "pp, dp, ep, tp, micro-batch, schedule, recomputed, zero, peak GiB, step s, tokens/s, of it"
    table = _table(f"Layouts of {settings.model.name} on {processes:,} x {machine.name}, fastest first", columns)
    for plan in plans:
        mesh, config, time = plan.mesh, plan.config, plan.time
        virtual = f" x {config.pipeline.virtual_stages}" if config.pipeline.virtual_stages > 1 else ""
        shares = (("computing", time.compute), ("waiting", time.communication), ("bubble", time.bubble),
                  ("optimizer", time.optimizer))  # fmt: skip
        table.add_row(
            *map(str, (mesh.pp, mesh.dp, mesh.ep, mesh.tp, config.train.micro_batch_size)),
            f"{config.pipeline.schedule}{virtual}" if mesh.pp > 1 else "",
            "+".join(config.activation_checkpointing.blocks) or "nothing",
            str(config.optimizer.zero),
            f"{plan.peak_memory / 2**30:.1f}",
            f"{time.total:.3f}",
            f"{plan.tokens_per_second:,.0f}",
            ", ".join(f"{name} {100 * part / time.total:.0f}%" for name, part in shares),
        )
    Console(width=max(Console().width, 160)).print(table)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--scale {text} is no list of numbers: write 384,768,1536") from None


def _table(title: str, columns: str, left: tuple[str, ...] = (), header: bool = True) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=header)
    for column in columns.split(", "):
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _scale_table(points: Sequence[Point]) -> Table:
    first = points[0]
    mesh = first.plan.mesh
    layout = f"pp={mesh.pp} x dp x ep={mesh.ep} x tp={mesh.tp}"
    title = f"{first.plan.config.model.name} on {first.plan.hardware.name}s, {layout}, the same batch a rank"
    columns = "devices, dp, step s, tokens/s, efficiency, under FUR, failures a day, checkpoint every, goodput"
    table = _table(title, columns)
    for point in points:
        good = point.goodput
        table.add_row(
            f"{point.plan.mesh.size:,}",
            str(point.plan.mesh.dp),
            f"{point.step:.3f}",
            f"{point.plan.tokens / point.step:,.0f}",
            f"{100 * point.rate / first.rate:.1f}%",
            f"{100 * point.rate_uniform / first.rate_uniform:.1f}%",
            f"{good.failures_a_day:.2f}",
            f"{good.interval / 60:.0f} min",
            f"{100 * good.share:.1f}%",
        )
    return table


def _rank_groups(rows: Sequence[object]) -> list[tuple[str, int]]:
    """Neighbouring ranks with equal rows together: [("0", 0), ("1-6", 1), ("7", 7)]."""
    groups = []
    for _, members in groupby(range(len(rows)), key=lambda rank: rows[rank]):
        first, *rest = members
        groups.append((f"{first}-{rest[-1]}" if rest else str(first), first))
    return groups


def _memory_table(plan: Plan) -> Table:
    limit = plan.hardware.memory
    title = f"{plan.config.model.name}, {plan.mesh}: GiB that a rank holds, of {limit.value:g} {limit.unit}"
    columns = "pp rank, parameters, weights, gradients, optimizer, activations, peak, TFLOP a step"
    table = _table(title, columns)
    for name, rank in _rank_groups(plan.memory):
        memory = plan.memory[rank]
        own = [stage for stage, at in zip(plan.stages, plan.stage_ranks, strict=True) if at == rank]
        flops = plan.micro_batches * sum(stage.forward.flops + stage.backward.flops for stage in own)
        sizes = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.peak)
        cells = [f"{size / 2**30:,.2f}" for size in sizes]
        style = "" if memory.peak <= limit.si else "red"
        table.add_row(name, f"{memory.parameters / 1e6:,.1f} M", *cells, f"{flops / 1e12:,.1f}", style=style)
    return table


def _traffic_table(plan: Plan) -> Table:
    from optimus_compiler.runtime.plan.estimate import seconds_of
    from optimus_compiler.runtime.plan.work import Transfer

    columns = "pp rank, collective, over, ranks, times, GB, seconds"
    table = _table("Collectives of a step", columns, left=("collective", "over"))
    for name, rank in _rank_groups(plan.transfers):
        for (kind, over), (times, size) in plan.transfers[rank].items():
            seconds = times * seconds_of(Transfer(kind, over, size // times), plan.mesh, plan.hardware)
            ranks = plan.mesh.size_of(*over.split("+"))
            table.add_row(name, kind, over, f"{ranks:,}", f"{times:,}", f"{size / 1e9:,.2f}", f"{seconds:.3f}")
    return table


def _time_table(plan: Plan) -> Table:
    time = plan.time
    table = _table(f"A step on {plan.mesh.size:,} x {plan.hardware.name}", "what, value", left=("what",), header=False)
    for name, seconds in (
        ("computing", time.compute),
        ("communication, exposed", time.communication),
        ("pipeline bubble", time.bubble),
        ("optimizer, weights gathered", time.optimizer),
        ("step", time.total),
    ):
        table.add_row(name, f"{seconds:.3f} s ({100 * seconds / time.total:.0f}%)")
    for name, value in (
        ("micro-batches", f"{plan.micro_batches}"),
        ("tokens a step", f"{plan.tokens:,}"),
        ("tokens/s", f"{plan.tokens_per_second:,.0f}"),
        ("model TFLOP/s a device", f"{plan.mfu * plan.hardware.peak.si / 1e12:.1f}"),
        ("MFU", f"{100 * plan.mfu:.1f}%"),
        ("energy a token", f"{plan.joules_per_token:.3f} J"),
    ):
        table.add_row(name, value)
    return table
