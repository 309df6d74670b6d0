"""A checkpoint of the first study through two routes: ours, and lm-eval with the model that transformers loads.

The checkpoint is exported as a Hugging Face folder. Our scorer runs our module on it; lm-eval's own model class
runs transformers', on the same requests of the nine tasks. Every accuracy must be the same.

Example:
  python -m bench.studies.dense_and_moe --corpus corpus && python -m bench.studies.routes --corpus corpus
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from bench.studies.options import Options, parse_options
from bench.studies.results import keep_study
from bench.tables import machine
from optimus_compiler.cli.main import main
from optimus_compiler.cli.stages import StageProgress
from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.evaluate.accuracy import Result, accuracies, average
from optimus_compiler.runtime.evaluate.encode import encode
from optimus_compiler.runtime.evaluate.open import open_model
from optimus_compiler.runtime.evaluate.score import score
from optimus_compiler.runtime.evaluate.tasks import Request, load_tasks

QUESTIONS = 250  # of each task
METRICS = ("acc", "acc_norm", "acc_pmi")


def study(options: Options) -> None:
    """Exports, scores twice, compares."""
    run, exported = options.work / "dense-and-moe" / "MoE-seed0", options.work / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    if main(["export", str(run), str(exported)]):
        raise RuntimeError(f"{run} could not be exported: run bench.studies.dense_and_moe first")
    tasks = load_tasks(["olmoe"], options.scaled(QUESTIONS))
    ours, theirs, apart = [], [], 0.0
    subject, other_route = open_model(exported, Mesh()), _lm_eval(exported)
    with StageProgress() as progress:
        for number, task in enumerate(tasks):
            progress.show("scoring twice", number, len(tasks))
            requests = [request for question in task.questions for request in question.requests]
            length = subject.model.max_length
            rows = encode(requests, subject.tokenize, eos_id=subject.eos_id, max_length=length)
            found = [likelihood for likelihood, _ in score(subject.model, rows)]
            found_there = other_route(requests)
            ours.append(accuracies(task, found))
            theirs.append(accuracies(task, found_there))
            apart = max(apart, *(abs(a - b) for a, b in zip(found, found_there, strict=True)))
    table = []
    for one, other in zip(ours, theirs, strict=True):
        cells = ["-" if getattr(one, metric) is None else f"{getattr(one, metric):.2%}" for metric in METRICS]
        same = all(getattr(one, metric) == getattr(other, metric) for metric in METRICS)
        table.append([one.task, f"{one.questions}", *cells, f"{other.score:.2%}", "yes" if same else "NO"])
    table.append(
        ["average", "", "", "", "", f"{average(theirs):.2%}", "yes" if average(ours) == average(theirs) else "NO"]
    )
    keep_study(
        "study-routes",
        f"The first MoE of the first study through two routes; log-likelihoods at most {apart:.1e} apart",
        machine(),
        ["task", "questions", *METRICS, "what counts, by lm-eval + transformers", "all equal"],
        table,
        curves={"ours": [(number, each.score) for number, each in enumerate(ours)]},
        draw=[lambda axes: _draw(axes, ours, theirs)],
        folder=options.results,
    )


def _lm_eval(folder: Path) -> Callable[[Sequence[Request]], list[float]]:
    """Likelihoods by lm-eval's own class for transformers' models."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every context that it cuts, as ours is cut
    model = HFLM(pretrained=str(folder), tokenizer=str(folder), device="cpu", dtype="float32", batch_size=16)

    def likelihoods(requests: Sequence[Request]) -> list[float]:
        asked = [
            Instance("loglikelihood", {}, (request.context, request.continuation), index)
            for index, request in enumerate(requests)
        ]
        return [likelihood for likelihood, _ in model.loglikelihood(asked, disable_tqdm=True)]

    return likelihoods


def _draw(axes: Axes, ours: list[Result], theirs: list[Result]) -> None:
    places = range(len(ours))
    axes.bar([place - 0.2 for place in places], [each.score for each in ours], 0.4, label="optimus evaluate")
    axes.bar([place + 0.2 for place in places], [each.score for each in theirs], 0.4, label="lm-eval + transformers")
    axes.set_xticks(list(places), [each.task for each in ours], rotation=40, ha="right")
    axes.set_ylabel("accuracy that counts")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
