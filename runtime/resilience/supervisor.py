"""The supervisor of a run: attempt after attempt, it decides who failed, replaces that node, and starts again."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.metrics import read_metrics
from optimus_compiler.runtime.resilience import beacon
from optimus_compiler.runtime.resilience.attempt import Attempt
from optimus_compiler.runtime.resilience.incidents import INCIDENTS, Incident, Kind, record
from optimus_compiler.runtime.resilience.plan import Plan
from optimus_compiler.runtime.resilience.slots import Slots
from optimus_compiler.runtime.resilience.verdict import Verdict

STATE = "supervisor.json"
NODES_PATIENCE = 600.0  # seconds for all slots to call
ENOUGH_NODES_PATIENCE = 60.0  # once there are enough of them to train
IDLE_ATTEMPTS = 2  # in a row that finish no step, after which there is no other
USER_ERROR, RUN_FAILED = 2, 1


class Supervisor:
    """One launch of a run, over all its attempts. `say` is told what people should see."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._bad: dict[str, str] = {}  # node -> why
        self._active: list[str] = []  # the nodes that train
        self._first = _attempts_so_far(plan.run)  # logs and reports of earlier launches stay what they are
        self._number = self._first  # of the attempt
        self._step = _last_step(plan.run)  # that was finished, in any attempt
        self._soft_at: dict[int, str] = {}  # step -> node that was blamed for numbers that are not finite
        self._stopping = False
        self._slots = Slots(plan, self._give_up)

    def run(self) -> int:
        """Trains until the end, or until nothing can be done; the exit code."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._gather()
            return self._train()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._slots.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C: the training processes are to save and end."""
        self._stopping = True

    # nodes

    def _gather(self) -> None:
        """Waits until the slots have called, and takes the nodes that are in order."""
        began = time.monotonic()
        while not self._stopping:
            self._slots.listen(0.2)
            for node, words in self._slots.launchers_ended().items():
                if not self._is_complete(node):
                    self._give_up(node, words)
            complete = [node for node in self._good() if self._is_complete(node)]
            patience = ENOUGH_NODES_PATIENCE if len(complete) >= self._plan.training else NODES_PATIENCE
            if len(complete) == len(self._good()) or time.monotonic() - began > patience:
                break
        for node in self._good():
            if not self._is_complete(node):
                missing = self._plan.per_node - len(self._slots.of(node))
                self._give_up(node, f"{missing} of its {self._plan.per_node} slots did not start")
        self._active = self._good()[: self._plan.training]

    def _good(self) -> list[str]:
        return [node for node in self._plan.names if node not in self._bad]

    def _is_complete(self, node: str) -> bool:
        return len(self._slots.of(node)) == self._plan.per_node

    def _spares(self) -> list[str]:
        return [node for node in self._good() if node not in self._active]

    def _give_up(self, node: str, why: str) -> None:
        """A node that waits, or that is to be asked for the first time, cannot be used."""
        if node not in self._bad and node not in self._active:
            self._bad[node] = why
            self._say(f"{node} is not used: {why}")
            self._record("hard", node, None, [why], "left out")

    # attempts

    def _train(self) -> int:
        idle = 0  # attempts in a row that finished no new step
        further: tuple[str, ...] = ()  # arguments of the next attempt
        while True:
            if len(self._active) < self._plan.training:
                return self._end(f"{self._plan.training} nodes are needed and {len(self._active)} are in order")
            attempt = Attempt(self._plan, self._slots, self._number, self._active, self._say, self._note_straggler)
            attempt.start([*self._plan.arguments, *further])
            self._write_state("training")
            verdict = attempt.watch(lambda: self._stopping)
            if verdict is None:
                self._write_state("stopped" if self._stopping else "finished")
                return 0
            mistakes = [ending for ending in attempt.endings() if ending.code == USER_ERROR]
            attempt.kill()
            if self._stopping:
                return self._end(f"the run was told to stop and failed instead: {verdict.evidence[0]}")
            if mistakes and {ending.rank for ending in mistakes} >= set(verdict.ranks):  # others only lost their peers
                self._write_state("failed")
                self._say("\n".join(line for line in mistakes[0].tail if line.startswith("optimus: error")))
                return USER_ERROR
            reached, self._step = self._step, max(self._step, attempt.step, _last_step(self._plan.run))
            idle = 0 if self._step > reached else idle + 1
            further, end = self._act_on(self._seen_before(verdict), attempt.node_of, idle)
            if end is not None:
                return self._end(end)
            self._number += 1

    def _act_on(self, verdict: Verdict, node_of: Callable[[int], str], idle: int) -> tuple[tuple[str, ...], str | None]:
        """Replaces who is to blame and writes the incident.

        (further arguments of the next attempt, why there is none or None)
        """
        guilty = [node for node in verdict.nodes if node in self._active]
        spares = self._spares()
        further: tuple[str, ...] = ()
        end: str | None = None
        if verdict.kind == "divergence" and (back := self._way_back()) is not None:
            action, further = back
        elif verdict.kind == "divergence":
            action, end = "stopped", "the run diverges: the numbers are not finite whichever node computes them"
        elif self._number - self._first >= self._plan.max_restarts:
            action, end = "stopped", f"resilience.max_restarts = {self._plan.max_restarts} restarts have been made"
        elif idle >= IDLE_ATTEMPTS:
            action, end = "stopped", f"{idle} attempts in a row finished no step"
        elif len(guilty) > len(spares):
            action, end = "stopped", f"no spare node is left for {', '.join(guilty)}"
        elif guilty:
            action = ", ".join(f"{node} replaced by {spare}" for node, spare in zip(guilty, spares, strict=False))
        else:
            action = "started again on the same nodes"
        evidence = list(verdict.evidence)
        if not guilty:
            self._record(verdict.kind, None, next(iter(verdict.ranks), None), evidence, action)
        for node in guilty:
            rank = next(rank for rank in verdict.ranks if node_of(rank) == node)
            self._record(verdict.kind, node, rank, evidence, action)
        blamed = ", ".join(guilty) or "no node in particular"
        self._say(f"{verdict.kind} failure after step {self._step}: {blamed}: {verdict.evidence[0]}; {action}")
        if end is None:
            for node, spare in zip(guilty, spares, strict=False):
                self._bad[node] = verdict.evidence[0]
                self._active[self._active.index(node)] = spare
        return further, end

    def _seen_before(self, verdict: Verdict) -> Verdict:
        """What another node has computed at the same step already is no fault of a node."""
        if verdict.kind != "soft" or not verdict.nodes:
            return verdict
        step = self._step + 1
        before = self._soft_at.setdefault(step, verdict.nodes[0])
        if before in verdict.nodes:
            return verdict
        evidence = (f"step {step} gave numbers that are not finite on {before} too, which was replaced",)
        return Verdict("divergence", verdict.ranks, (), (*evidence, *verdict.evidence))

    def _way_back(self) -> tuple[str, tuple[str, ...]] | None:
        """(what is done, further arguments of the next attempt) where a diverging run may go back; else None.

        It goes on from the newest checkpoint of weights alone before the step, with other data.
        """
        if self._plan.on_divergence != "rollback":
            return None
        models = [each for each in CheckpointFolder(self._plan.run).found() if isinstance(each, Checkpoint)]
        models = [each for each in models if each.kind == "model" and each.manifest.progress.step <= self._step]
        if not models:
            return None
        name, skipped = models[0].path.name, self._step + 1 - models[0].manifest.progress.step
        return f"back to {name}, past the data of {skipped} steps", ("--from", name, "--skip-steps", str(skipped))

    # what people see

    def _note_straggler(self, rank: int, why: str) -> None:
        self._record("slow", self._active[rank // self._plan.per_node], rank, [why], "none")
        self._say(f"straggler: {why}")

    def _record(self, kind: Kind, node: str | None, rank: int | None, evidence: list[str], action: str) -> None:
        step = max(self._step, _last_step(self._plan.run))
        record(self._plan.run, Incident(kind, node, rank, step, evidence, action, self._number))

    def _write_state(self, state: str) -> None:
        """supervisor.json: for `optimus status`."""
        values = {
            "state": state,
            "attempt": self._number,
            "nodes": self._active,
            "spares": self._spares(),
            "bad": self._bad,
        }
        with whole_file(self._plan.run / STATE) as file:
            file.write(json.dumps(values, indent=2).encode())

    def _end(self, why: str) -> int:
        self._write_state("failed")
        self._say(f"optimus: error: {why}: {self._plan.run / INCIDENTS} has the evidence")
        return RUN_FAILED


def _attempts_so_far(run: Path) -> int:
    """How many attempts earlier launches have made."""
    numbers = [path.name.removeprefix("attempt-") for path in (run / beacon.LOGS).glob("attempt-*")]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _last_step(run: Path) -> int:
    """The last step that metrics.jsonl tells of; 0 where it tells of none."""
    try:
        return read_metrics(run)[-1].step
    except ValueError:
        return 0
