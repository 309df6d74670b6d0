"""The supervisor of a run: starts attempts, watches them, decides who failed, replaces that node, and starts again."""

from __future__ import annotations

import json
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.metrics import read_metrics
from optimus_compiler.runtime.resilience import beacon
from optimus_compiler.runtime.resilience.engines import Commands, Engine, Launcher, Local
from optimus_compiler.runtime.resilience.hosts import Node, address_for
from optimus_compiler.runtime.resilience.incidents import Incident, record
from optimus_compiler.runtime.resilience.messages import Line
from optimus_compiler.runtime.resilience.soft import read_report, verdict_of_reports
from optimus_compiler.runtime.resilience.verdict import (
    Ending,
    Sight,
    Verdict,
    stragglers,
    verdict_of_endings,
    verdict_of_hang,
)

STATE = "supervisor.json"
GRACE = 1.0  # seconds in which the endings that belong to one failure come in
SILENCE = 4.0  # seconds without a beat after which a process is looked at
PATIENCE = 5.0  # a hang is one when no rank has finished a step for so many times the longest step, and
LEAST_PATIENCE = 30.0  # at least so many seconds
NODES_PATIENCE = 600.0  # for all slots to call
ENOUGH_NODES_PATIENCE = 60.0  # once there are enough of them to train
START_PATIENCE = 1800.0  # until the first step of an attempt: importing, compiling, loading
SETTLING = 20  # steps of an attempt after which its times are looked at
USER_ERROR, RUN_FAILED = 2, 1


@dataclass(frozen=True)
class Plan:
    """What to run and where."""

    arguments: tuple[str, ...]  # of the training process: ("pretrain", CONFIG, "--output", RUN, ...)
    run: Path
    nodes: tuple[Node, ...]  # those that train first, then the spares
    training: int  # how many of them train
    per_node: int
    launcher: Launcher = "local"
    launcher_arguments: tuple[str, ...] = ()
    injections: tuple[str, ...] = ()
    max_restarts: int = 100
    heartbeat_timeout: float | None = None  # seconds; None: from the measured time of a step
    on_divergence: str = "stop"


@dataclass
class _Slot:
    """A slot as the supervisor knows it."""

    node: str
    local_rank: int
    line: Line | None
    rank: int | None = None  # in the current attempt
    running: bool = False
    ending: Ending | None = None
    seen: dict[str, str] = field(default_factory=dict)  # what it saw when it was asked to look
    beat: dict[str, object] = field(default_factory=dict)
    beat_at: float = 0.0
    progress_at: float = 0.0


class Supervisor:
    """One launch of a run, over all its attempts."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._names = [node.name for node in plan.nodes]
        self._host = address_for(list(plan.nodes))
        self._listener = socket.create_server(("" if self._host != "127.0.0.1" else self._host, 0), backlog=4096)
        self._engine: Engine = Local(self._listener)
        if plan.launcher != "local":
            self._engine = Commands(plan.launcher, plan.launcher_arguments)
        self._engine.start(f"{self._host}:{self._listener.getsockname()[1]}", plan.nodes, plan.per_node, plan.run)
        self._select = selectors.DefaultSelector()
        self._select.register(self._listener, selectors.EVENT_READ)
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._bad: dict[str, str] = {}  # node -> why
        self._active: list[str] = []
        self._attempt = 0
        self._best_step = 0
        self._arguments: tuple[str, ...] = ()  # of the next attempt, beside the plan's
        self._soft_at: dict[int, str] = {}  # step -> node that was blamed for numbers that are not finite
        self._slow: set[int] = set()  # ranks that were told to be stragglers
        self._settled = 0  # the step from which on a straggler is one
        self._shown = 0  # bytes of rank 0's log that were shown
        self._stopping = False

    def run(self) -> int:
        """Trains until the end, or until nothing can be done; the exit code."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._gather()
            return self._train()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._close()

    # nodes

    def _gather(self) -> None:
        """Waits until every slot has called, and takes the nodes that are in order."""
        wanted = len(self._names) * self._plan.per_node
        began = time.monotonic()
        while len(self._slots) < wanted and not self._stopping:
            self._listen(0.2)
            enough = len(self._complete()) >= self._plan.training
            for node, words in self._engine.ended().items():
                if node not in self._bad and node not in self._complete():
                    self._give_up(node, words)
            calling = [node for node in self._names if node not in self._bad]
            if all(node in self._complete() for node in calling):
                break
            if time.monotonic() - began > (ENOUGH_NODES_PATIENCE if enough else NODES_PATIENCE):
                break
        for node in self._names:
            missing = [i for i in range(self._plan.per_node) if (node, i) not in self._slots]
            if missing:
                self._give_up(node, f"{len(missing)} of its {self._plan.per_node} slots did not start")
        self._active = [node for node in self._names if node not in self._bad][: self._plan.training]

    def _complete(self) -> list[str]:
        """The nodes all of whose slots have called, and found nothing wrong."""
        slots = range(self._plan.per_node)
        return [n for n in self._names if n not in self._bad and all((n, i) in self._slots for i in slots)]

    def _give_up(self, node: str, why: str) -> None:
        if node not in self._bad:
            self._bad[node] = why
            self._say(f"{node} is not used: {why}")
            self._record(Verdict("hard", (), (node,), (why,)), node, None, "left out")

    def _spares(self) -> list[str]:
        return [node for node in self._names if node not in self._bad and node not in self._active]

    # attempts

    def _train(self) -> int:
        idle = 0  # attempts in a row that finished no new step
        while True:
            if len(self._active) < self._plan.training:
                return self._end(f"{self._plan.training} nodes are needed and {len(self._active)} are in order")
            reached = self._best_step
            self._start()
            verdict = self._watch()
            if verdict is None:
                self._write_state("stopped" if self._stopping else "finished")
                return 0
            if self._stopping:
                return self._end(f"the run was told to stop and failed instead: {verdict.evidence[0]}")
            self._best_step = max(self._best_step, _last_step(self._plan.run))
            mistakes = [e for e in self._endings() if e.code == USER_ERROR]
            self._kill()
            if mistakes and {e.rank for e in mistakes} >= set(verdict.ranks):  # the others only lost their peers
                self._write_state("failed")
                self._say("\n".join(line for line in mistakes[0].tail if line.startswith("optimus: error")))
                return USER_ERROR
            idle = 0 if self._best_step > reached else idle + 1
            code = self._act_on(verdict, idle)
            if code is not None:
                return code

    def _act_on(self, verdict: Verdict, idle: int) -> int | None:
        """Replaces who is to blame, writes the incident; the exit code where the run ends here."""
        verdict = self._seen_before(verdict)
        guilty = [node for node in verdict.nodes if node in self._active]
        spares = self._spares()
        end = None
        self._arguments = ()
        if verdict.kind == "divergence" and (back := self._way_back()) is not None:
            action, self._arguments = back
        elif verdict.kind == "divergence":
            action, end = "stopped", "the run diverges: the numbers are not finite whichever node computes them"
        elif self._attempt >= self._plan.max_restarts:
            action, end = "stopped", f"resilience.max_restarts = {self._plan.max_restarts} restarts have been made"
        elif idle >= 2:
            action, end = "stopped", "two attempts in a row finished no step"
        elif len(guilty) > len(spares):
            action, end = "stopped", f"no spare node is left for {', '.join(guilty)}"
        elif guilty:
            action = ", ".join(f"{node} replaced by {spare}" for node, spare in zip(guilty, spares, strict=False))
        else:
            action = "started again on the same nodes"
        named = verdict.ranks[0] if verdict.ranks else None
        if not guilty:
            self._record(verdict, None, named, action)
        for node in guilty:
            rank = next((r for r in verdict.ranks if self._node_of(r) == node), named)
            self._record(verdict, node, rank, action)
        blamed = (
            f"{', '.join(guilty)} (rank {', '.join(map(str, verdict.ranks))})" if guilty else "no node in particular"
        )
        self._say(f"{verdict.kind} failure after step {self._best_step}: {blamed}: {verdict.evidence[0]}; {action}")
        if end is not None:
            return self._end(end)
        for node, spare in zip(guilty, spares, strict=False):
            self._bad[node] = verdict.evidence[0]
            self._active[self._active.index(node)] = spare
        self._attempt += 1
        return None

    def _seen_before(self, verdict: Verdict) -> Verdict:
        """What another node has computed at the same step already is no fault of a node."""
        if verdict.kind != "soft" or not verdict.nodes:
            return verdict
        step = self._best_step + 1
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
        models = [each for each in models if each.kind == "model" and each.manifest.progress.step <= self._best_step]
        if not models:
            return None
        name, skipped = models[0].path.name, self._best_step + 1 - models[0].manifest.progress.step
        return f"back to {name}, past the data of {skipped} steps", ("--from", name, "--skip-steps", str(skipped))

    def _start(self) -> None:
        """Starts a training process in every slot of the active nodes."""
        plan = self._plan
        world = len(self._active) * plan.per_node
        # a new one for each attempt: the process group of the last has left its addresses in the old one
        timeout = timedelta(seconds=30)
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        logs = plan.run / beacon.LOGS / f"attempt-{self._attempt}"
        arguments = [*plan.arguments, *self._arguments]
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(plan.per_node),
            # the process group meets in the supervisor's store
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "optimus",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            beacon.ADDRESS: f"{self._host}:{self._store.port}",
            beacon.ATTEMPT: str(self._attempt),
            beacon.INJECT: json.dumps(plan.injections),
        }
        now = time.monotonic()
        for slot in self._slots.values():
            slot.rank = None
        for index, node in enumerate(self._active):
            for local_rank in range(plan.per_node):
                slot = self._slots[node, local_rank]
                slot.rank = index * plan.per_node + local_rank
                slot.running, slot.ending, slot.seen, slot.beat = True, None, {}, {}
                slot.beat_at = slot.progress_at = now
                own = {"RANK": str(slot.rank), "LOCAL_RANK": str(local_rank), beacon.NODE: node}
                log = logs / f"rank-{slot.rank}.log"
                self._send(slot, do="start", environment={**common, **own}, arguments=arguments, log=str(log))
        self._shown = 0
        self._slow = set()
        self._settled = self._best_step + SETTLING
        self._write_state("training")

    def _watch(self) -> Verdict | None:
        """Until all processes have ended well (None) or something is wrong."""
        failed_at: float | None = None
        beats_at = 0.0
        while True:
            self._listen(0.05)
            self._show_log()
            endings = self._endings()
            if failed_at is None and any(ending.code != 0 for ending in endings):
                failed_at = time.monotonic()
            if all(not slot.running for slot in self._training()):
                self._show_log()
                return None if all(ending.code == 0 for ending in endings) else self._verdict_of_endings()
            if failed_at is not None:
                if time.monotonic() - failed_at > GRACE:
                    return self._verdict_of_endings()
            elif time.monotonic() - beats_at > beacon.SECONDS:
                beats_at = time.monotonic()
                self._read_beats()
                self._report_stragglers()
                if not endings and (verdict := self._verdict_of_silence()) is not None:
                    return verdict

    def _report_stragglers(self) -> None:
        """Notes ranks that keep the others waiting, once an attempt each; nobody is replaced for that."""
        slots = self._training()
        if self._best_step < self._settled or any(slot.beat.get("phase") != "training" for slot in slots):
            return
        busy = {slot.rank or 0: float(slot.beat["busy"]) for slot in slots}  # type: ignore[arg-type]
        step = max(float(slot.beat["seconds"]) for slot in slots)  # type: ignore[arg-type]
        for rank, times in stragglers(busy, step).items():
            if rank not in self._slow:
                self._slow.add(rank)
                node = self._node_of(rank)
                why = f"rank {rank} ({node}) computes for {busy[rank]:.3f} s a step, {times:.1f} times the median rank"
                self._record(Verdict("slow", (rank,), (node,), (why,)), node, rank, "none")
                self._say(f"straggler: {why}")

    def _verdict_of_endings(self) -> Verdict:
        soft = [read_report(self._plan.run, self._attempt, slot.rank) for slot in self._training()]
        if any(soft):
            return verdict_of_reports([report for report in soft if report is not None], self._node_of)
        return verdict_of_endings([ending for ending in self._endings() if ending.code != 0])

    def _verdict_of_silence(self) -> Verdict | None:
        """A hang, where there is one."""
        now = time.monotonic()
        silent = [slot for slot in self._training() if slot.beat and now - slot.beat_at > SILENCE]
        if silent and len(silent) < len(self._training()):
            sights = self._look(ask_for_stacks=False)
            if any(sight.state == "stopped" for sight in sights) or all(now - s.beat_at > 3 * SILENCE for s in silent):
                return verdict_of_hang(sights)
        latest = max(slot.progress_at for slot in self._training())
        if now - latest > self._patience():
            return verdict_of_hang(self._look(ask_for_stacks=True))
        return None

    def _patience(self) -> float:
        """Seconds without progress of any rank that are a hang."""
        slots = self._training()
        if any(slot.beat.get("phase") != "training" for slot in slots):
            return START_PATIENCE
        if self._plan.heartbeat_timeout is not None:
            return self._plan.heartbeat_timeout
        longest = max(float(slot.beat.get("seconds", 0.0)) for slot in slots)  # type: ignore[arg-type]
        return max(LEAST_PATIENCE, PATIENCE * longest)

    def _look(self, *, ask_for_stacks: bool) -> list[Sight]:
        """Where every training process stands, as its slot and itself say."""
        if ask_for_stacks:
            self._store.set(f"{self._attempt}/stacks", "1")
        for slot in self._training():
            slot.seen = {}
            self._send(slot, do="look")
        deadline = time.monotonic() + (3.0 if ask_for_stacks else 1.0)
        while time.monotonic() < deadline:
            self._listen(0.05)
            self._read_beats()
            if all(slot.seen and (slot.beat.get("stack") or not ask_for_stacks) for slot in self._training()):
                break
        now = time.monotonic()
        return [
            Sight(
                rank=slot.rank or 0,
                node=slot.node,
                state=slot.seen.get("state", "out of reach"),
                silent=now - slot.beat_at > SILENCE,
                step=int(slot.beat.get("step", 0)),  # type: ignore[call-overload]
                phase=str(slot.beat.get("phase", "starting")),
                stack=tuple(slot.beat.get("stack") or slot.seen.get("stack", "").splitlines()),  # type: ignore[arg-type]
            )
            for slot in self._training()
        ]

    def _read_beats(self) -> None:
        """What the training processes have published since the last look."""
        now = time.monotonic()
        for slot in self._training():
            key = f"{self._attempt}/beat/{slot.rank}"
            if not self._store.check([key]):
                continue
            beat = json.loads(self._store.get(key))
            if beat["beat"] != slot.beat.get("beat"):
                slot.beat_at = now
            if (beat["step"], beat["phase"]) != (slot.beat.get("step"), slot.beat.get("phase")):
                slot.progress_at = now
            slot.beat = beat
            self._best_step = max(self._best_step, beat["step"])

    def _kill(self) -> None:
        """Ends every training process of the attempt, and waits until they are gone."""
        for slot in self._training():
            if slot.running:
                self._send(slot, do="kill")
        deadline = time.monotonic() + 30
        while any(slot.running for slot in self._training()) and time.monotonic() < deadline:
            self._listen(0.1)
        self._show_log()

    # slots

    def _listen(self, seconds: float) -> None:
        """Takes what the slots say within some seconds."""
        for key, _ in self._select.select(seconds):
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                line = Line(connection)
                self._select.register(connection, selectors.EVENT_READ, line)
                continue
            messages = key.data.receive()
            if messages is None:
                self._hung_up(key.data)
                continue
            for message in messages:
                self._hear(key.data, message)

    def _hear(self, line: Line, message: dict[str, object]) -> None:
        if "hello" in message:
            node, local_rank = str(message["hello"]), int(message["local_rank"])  # type: ignore[call-overload]
            self._slots[node, local_rank] = _Slot(node, local_rank, line)
            if message["fault"]:
                self._give_up(node, str(message["fault"]))
            return
        slot = next(slot for slot in self._slots.values() if slot.line is line)
        if "ended" in message:
            slot.running = False
            code, when = int(message["ended"]), float(message["time"])  # type: ignore[call-overload, arg-type]
            slot.ending = Ending(slot.rank or 0, slot.node, code, when, self._tail(slot))
        elif "look" in message:
            slot.seen = dict(message["look"])  # type: ignore[call-overload]

    def _hung_up(self, line: Line) -> None:
        self._select.unregister(line.socket)
        line.close()
        for slot in self._slots.values():
            if slot.line is line:
                slot.line = None
                if slot.running:
                    slot.running = False
                    slot.ending = Ending(slot.rank or 0, slot.node, None, time.time(), self._tail(slot))
                elif slot.node not in self._active:
                    self._give_up(slot.node, "its slot hung up while it waited")

    def _send(self, slot: _Slot, **message: object) -> None:
        if slot.line is not None:
            try:
                slot.line.send(**message)
            except OSError:
                self._hung_up(slot.line)

    def _training(self) -> list[_Slot]:
        """The slots of the current attempt, by rank."""
        return sorted((s for s in self._slots.values() if s.rank is not None), key=lambda slot: slot.rank or 0)

    def _endings(self) -> list[Ending]:
        return [slot.ending for slot in self._training() if slot.ending is not None]

    def _node_of(self, rank: int) -> str:
        return self._active[rank // self._plan.per_node]

    # what people see

    def _tail(self, slot: _Slot, size: int = 4096) -> tuple[str, ...]:
        """The last lines of a rank's log."""
        try:
            with open(self._log(slot.rank or 0), "rb") as file:
                file.seek(max(0, file.seek(0, 2) - size))
                return tuple(file.read().decode(errors="replace").splitlines()[-20:])
        except OSError:
            return ()

    def _log(self, rank: int) -> Path:
        return self._plan.run / beacon.LOGS / f"attempt-{self._attempt}" / f"rank-{rank}.log"

    def _show_log(self) -> None:
        """Passes on what rank 0 has printed."""
        try:
            with open(self._log(0), "rb") as file:
                file.seek(self._shown)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._say(line)

    def _record(self, verdict: Verdict, node: str | None, rank: int | None, action: str) -> None:
        step, evidence = self._best_step, list(verdict.evidence)
        record(self._plan.run, Incident(verdict.kind, node, rank, step, evidence, action, self._attempt))

    def _write_state(self, state: str) -> None:
        """supervisor.json: for `optimus status`."""
        values = {
            "state": state,
            "attempt": self._attempt,
            "nodes": self._active,
            "spares": self._spares(),
            "bad": self._bad,
            "per_node": self._plan.per_node,
        }
        with whole_file(self._plan.run / STATE) as file:
            file.write(json.dumps(values, indent=2).encode())

    def _end(self, why: str) -> int:
        self._write_state("failed")
        self._say(f"optimus: error: {why}: {self._plan.run / 'incidents.jsonl'} has the evidence")
        return RUN_FAILED

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C: the training processes save and end."""
        self._stopping = True
        for slot in self._training():
            if slot.running:
                self._send(slot, do="terminate")

    def _close(self) -> None:
        for slot in self._slots.values():
            self._send(slot, do="end")
        self._engine.stop()
        self._listener.close()


def _last_step(run: Path) -> int:
    """The last step that metrics.jsonl tells of; 0 where it tells of none."""
    try:
        return read_metrics(run)[-1].step
    except ValueError:
        return 0
