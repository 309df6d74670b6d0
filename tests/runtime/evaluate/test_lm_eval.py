"""lm-eval beside ours: the same requests, the same likelihoods and accuracies; and lm-eval run with our model."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.runtime.evaluate.accuracy import Result, accuracies, evaluate
from optimus_compiler.runtime.evaluate.encode import encode, encode_tasks
from optimus_compiler.runtime.evaluate.open import Subject, open_model
from optimus_compiler.runtime.evaluate.score import score
from optimus_compiler.runtime.evaluate.tasks import Question, Request, Task
from tests.runtime.evaluate.conftest import LENGTH

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'optimus-compiler[lm-eval]'")

QUESTIONS = 40


def documents() -> list[dict[str, Any]]:
    """Random questions of 2 to 5 choices: some longer than the model's context, one empty, some ending in spaces."""
    generator = random.Random(5)

    def words(most: int) -> str:
        alphabet = [*string.ascii_lowercase[:8], "cat", "stone", "é", "return"]
        return " ".join("".join(generator.choices(alphabet, k=3)) for _ in range(generator.randint(1, most)))

    found = []
    for number in range(QUESTIONS):
        choices = [words(3) for _ in range(generator.randint(2, 5))]
        question = "" if number == 0 else words(20) + " " * (number % 3)
        found.append({"question": question, "choices": choices, "answer": generator.randrange(len(choices))})
    return found


def as_task(unconditional: str | None = None) -> Task:
    questions = []
    for each in documents():
        choices = tuple(Request(each["question"], f" {choice}") for choice in each["choices"])
        prompts = () if unconditional is None else tuple(Request(unconditional, c.continuation) for c in choices)
        questions.append(Question(choices, prompts, each["answer"]))
    return Task("arc_easy", tuple(questions))


def task_file(folder: Path) -> Path:
    """The same questions as a task of lm-eval."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents()))
    (folder / "twin.yaml").write_text(
        "task: twin\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: " + str(data) + "\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\n"
        'doc_to_target: answer\ntarget_delimiter: " "\nmetric_list:\n'
        "  - metric: acc\n  - metric: acc_norm\n  - metric: acc_mutual_info\n"
    )
    return folder


@pytest.fixture(scope="module")
def subject(olmoe_folder: Path) -> Subject:
    return open_model(olmoe_folder, optimus.Mesh())


def evaluated(subject: Subject, task: Task) -> Result:
    encoded = encode_tasks([task], subject.tokenize, eos_id=subject.eos_id, max_length=subject.model.max_length)
    return evaluate(subject.model, encoded)[0]


def scores(found: dict[str, Any]) -> dict[str, float]:
    results = found["results"]["twin"]
    return {name: results[f"{name},none"] for name in ("acc", "acc_norm", "acc_mutual_info")}


def test_accuracies_are_lm_evals(subject: Subject, olmoe_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Three routes: ours; lm-eval with our model; lm-eval with transformers' model."""
    pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    import optimus_compiler.lm_eval  # noqa: F401  (registers the model)

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    tasks = TaskManager(include_path=str(task_file(tmp_path)), include_defaults=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(olmoe_folder / "tokenizer.json"), eos_token="<|endoftext|>")
    common: dict[str, Any] = {"tasks": ["twin"], "task_manager": tasks, "bootstrap_iters": 0, "log_samples": True}
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(olmoe_folder), "device": "cpu", "dtype": "float32", "tokenizer": tokenizer},
        batch_size=4,
        **common,
    )
    through_ours = lm_eval.simple_evaluate(model="optimus", model_args={"source": str(olmoe_folder)}, **common)

    # lm-eval's unconditional context is empty, which stands for the end-of-text token
    ours = evaluated(subject, as_task(unconditional=""))
    wanted = {"acc": ours.acc, "acc_norm": ours.acc_norm, "acc_mutual_info": ours.acc_pmi}
    assert scores(theirs) == wanted
    assert scores(through_ours) == wanted
    assert len(set(wanted.values())) == 3  # the three metrics choose differently: equality says something

    def likelihoods(found: dict[str, Any]) -> list[float]:
        samples = sorted(found["samples"]["twin"], key=lambda each: each["doc_id"])
        return [float(response[0][0]) for each in samples for response in each["resps"]]

    assert likelihoods(through_ours) == pytest.approx(likelihoods(theirs), rel=1e-4)


@pytest.mark.slow  # lm-eval reads the list of all its tasks
def test_the_command_line_is_lm_evals(olmoe_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optimus_compiler.lm_eval", "--model", "optimus", "--tasks", "twin"]
    command += ["--model_args", f"source={olmoe_folder}", "--include_path", str(task_file(tmp_path)), "--limit", "5"]
    command += ["--output_path", str(tmp_path / "out")]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(kept.read_text())["results"]["twin"]["acc,none"]
    five = Task("arc_easy", as_task().questions[:5])
    subject = open_model(olmoe_folder, optimus.Mesh())
    assert found == evaluated(subject, five).acc


class Asked:
    """A request as lm-eval hands it over."""

    def __init__(self, *arguments: Any) -> None:
        self.args = arguments


def test_tokens_across_the_border_are_divided_as_lm_eval_divides_them(subject: Subject, olmoe_folder: Path) -> None:
    from optimus_compiler.lm_eval import OptimusLM

    model = OptimusLM(str(olmoe_folder), batch_size=4, device="cpu")
    pairs = [
        ("gra", "vity falls"),
        ("the c", "at sat on the mat"),
        ("", "the cat"),
        (" \n", "the cat"),
        ("the cat ", "sat"),
    ]
    whole, before = subject.tokenize("gravity falls"), subject.tokenize("gra")
    assert whole[: len(before)] != before  # the border is within a token
    requests = [Request(*pair) for pair in pairs]
    rows = encode(requests, subject.tokenize, eos_id=subject.eos_id, max_length=LENGTH)
    found = score(subject.model, rows)
    theirs = model.loglikelihood([Asked(*pair) for pair in pairs], disable_tqdm=True)
    assert [sums for sums, _ in theirs] == pytest.approx([sums for sums, _ in found], rel=1e-5)
    with pytest.raises(ValueError, match=r"a choice has \d+ tokens, and the model takes 1 to 40"):
        model.loglikelihood([Asked("the cat", " sat on the mat" * 30)], disable_tqdm=True)
    with pytest.raises(TypeError, match="tokenzier"):
        OptimusLM(str(olmoe_folder), tokenzier="x")  # type: ignore[call-arg]


def test_rolling_likelihood_is_the_sum_over_all_tokens(subject: Subject, olmoe_folder: Path) -> None:
    """A text of several windows: each token is predicted once, from at most LENGTH tokens before it."""
    from optimus_compiler.lm_eval import OptimusLM

    text = "the cat sat on a stone because gravity falls " * 6
    ids = [subject.eos_id, *subject.tokenize(text)]
    assert len(ids) > 2 * LENGTH
    expected = 0.0
    for first in range(1, len(ids), LENGTH):
        window = ids[first : first + LENGTH]
        start = max(0, first + len(window) - 1 - LENGTH)
        read = ids[start : first + len(window) - 1]
        log_probs = subject.model.module(torch.tensor([read])).logits[0].log_softmax(-1)[-len(window) :]
        expected += sum(log_probs[i, token].item() for i, token in enumerate(window))
    (found,) = OptimusLM(str(olmoe_folder)).loglikelihood_rolling([Asked(text)])
    assert found == pytest.approx(expected, rel=1e-5)


def test_generation_takes_the_likeliest_tokens_until_a_stop(subject: Subject, olmoe_folder: Path) -> None:
    from optimus_compiler.lm_eval import OptimusLM

    model = OptimusLM(str(olmoe_folder))
    ids = subject.tokenize("the cat")
    for _ in range(12):
        ids.append(int(subject.model.module(torch.tensor([ids])).logits[0, -1].argmax()))
    new = subject.detokenize(ids[len(subject.tokenize("the cat")) :])
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    assert model.generate_until([Asked("the cat", settings)]) == [new]
    stop = new[3:5]
    cut = model.generate_until([Asked("the cat", settings | {"until": ["never", stop]})])
    assert cut == [new[: new.index(stop)]]
    with pytest.raises(ValueError, match="set do_sample=False"):
        model.generate_until([Asked("the cat", {"do_sample": True, "temperature": 0.7})])


def test_equal_choices_count_as_the_first() -> None:
    question = Question((Request("q", " aa"), Request("q", " bb")), (), 0)
    result = accuracies(Task("boolq", (question,)), [-1.0, -1.0])
    assert (result.acc, result.acc_norm, result.acc_pmi) == (1.0, 1.0, None)
