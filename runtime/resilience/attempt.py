"""One attempt at a run: training processes in the slots of some nodes, watched until they end or something is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from optimus_compiler.runtime.resilience import beacon
from optimus_compiler.runtime.resilience.plan import Plan
from optimus_compiler.runtime.resilience.slots import Slot, Slots
from optimus_compiler.runtime.resilience.soft import read_report, verdict_of_reports
from optimus_compiler.runtime.resilience.verdict import (
    Ending,
    Sight,
    Verdict,
    stragglers,
    verdict_of_endings,
    verdict_of_hang,
)

GRACE = 1.0  # seconds in which the endings that belong to one failure come in
SILENCE = 4.0  # seconds without a beat after which a process is looked at
PATIENCE = 5.0  # a hang is one when no rank has finished a step for so many times the longest step, and
LEAST_PATIENCE = 30.0  # at least so many seconds
START_PATIENCE = 1800.0  # until the first step of an attempt: connecting, compiling, loading
SETTLING = 20  # steps of an attempt after which its times are looked at
TAIL_BYTES, TAIL_LINES = 4096, 20  # of a log that are looked at


class Attempt:
    """Training processes on `nodes`, from `start` until `watch` returns; `kill` ends what is left of them.

    `say` is told what rank 0 prints, and `on_straggler` of a rank that keeps the others waiting, and why.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Slots,
        number: int,
        nodes: Sequence[str],
        say: Callable[[str], None],
        on_straggler: Callable[[int, str], None],
    ) -> None:
        self.step = 0  # the last one that any rank has told of
        self._plan = plan
        self._slots = slots
        self._number = number
        self._nodes = tuple(nodes)
        self._say = say
        self._on_straggler = on_straggler
        # a store for each attempt: the process group of the last has left its addresses in the old one
        timeout = timedelta(seconds=30)
        self._store = dist.TCPStore(slots.host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._shown = 0  # bytes of rank 0's log
        self._slow: set[int] = set()
        self._first_step: int | None = None

    def node_of(self, rank: int) -> str:
        """The node that a rank runs on."""
        return self._nodes[rank // self._plan.per_node]

    def start(self, arguments: Sequence[str]) -> None:
        """Starts `optimus` with these arguments in every slot."""
        per_node, host = self._plan.per_node, self._slots.host
        common = {
            "WORLD_SIZE": str(len(self._nodes) * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            # the process group meets in the supervisor's store
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "optimus",
            "TORCHELASTIC_RESTART_COUNT": str(self._number),
            beacon.ADDRESS: f"{host}:{self._store.port}",
            beacon.ATTEMPT: str(self._number),
            beacon.INJECT: json.dumps(self._plan.injections),
        }
        now = time.monotonic()
        self._slots.dismiss()
        for index, node in enumerate(self._nodes):
            for slot in self._slots.of(node):
                slot.rank = index * per_node + slot.local_rank
                slot.running, slot.ended, slot.seen, slot.beat = True, None, {}, {}
                slot.beat_at = slot.progress_at = now
                if slot.line is None:  # it has hung up since the last attempt
                    slot.running, slot.ended = False, (None, time.time())
                own = {"RANK": str(slot.rank), "LOCAL_RANK": str(slot.local_rank), beacon.NODE: node}
                log, environment = str(self._log(slot.rank)), {**common, **own}
                self._slots.send(slot, do="start", environment=environment, arguments=list(arguments), log=log)

    def watch(self, is_stopping: Callable[[], bool]) -> Verdict | None:
        """Until all processes have ended well (None), or something is wrong.

        is_stopping: whether they are to save and end; they are told so once.
        """
        failed_at: float | None = None
        beats_at, told_to_stop = 0.0, False
        while True:
            self._slots.listen(0.05)
            self._show_log()
            if is_stopping() and not told_to_stop:
                told_to_stop = True
                self._tell("terminate")
            codes = [slot.ended[0] for slot in self._slots.training() if slot.ended is not None]
            if failed_at is None and any(code != 0 for code in codes):
                failed_at = time.monotonic()
            if not any(slot.running for slot in self._slots.training()):
                self._show_log()
                return None if failed_at is None else self._verdict_of_endings()
            if failed_at is not None:
                if time.monotonic() - failed_at > GRACE:
                    return self._verdict_of_endings()
            elif time.monotonic() - beats_at > beacon.SECONDS:
                beats_at = time.monotonic()
                self._read_beats()
                self._report_stragglers()
                if not codes and (verdict := self._verdict_of_silence()) is not None:
                    return verdict

    def kill(self) -> None:
        """Ends every training process, and waits until they are gone."""
        self._tell("kill")
        deadline = time.monotonic() + 30
        while any(slot.running for slot in self._slots.training()) and time.monotonic() < deadline:
            self._slots.listen(0.1)
        self._show_log()

    def endings(self) -> list[Ending]:
        """How the processes that have ended did so."""
        return [
            Ending(slot.rank or 0, slot.node, *slot.ended, self._tail(slot.rank or 0))
            for slot in self._slots.training()
            if slot.ended is not None
        ]

    def _tell(self, what: str) -> None:
        for slot in self._slots.training():
            if slot.running:
                self._slots.send(slot, do=what)

    # what is wrong

    def _verdict_of_endings(self) -> Verdict:
        ranks = [slot.rank or 0 for slot in self._slots.training()]
        reports = [read_report(self._plan.run, self._number, rank) for rank in ranks]
        if found := [report for report in reports if report is not None]:
            return verdict_of_reports(found, self.node_of)
        return verdict_of_endings([ending for ending in self.endings() if ending.code != 0])

    def _verdict_of_silence(self) -> Verdict | None:
        """A hang, where there is one."""
        now, slots = time.monotonic(), self._slots.training()
        silent = [slot for slot in slots if slot.beat and now - slot.beat_at > SILENCE]
        if silent and len(silent) < len(slots):
            sights = self._look(ask_for_stacks=False)
            if any(sight.state == "stopped" for sight in sights) or all(now - s.beat_at > 3 * SILENCE for s in silent):
                return verdict_of_hang(sights)
        if now - max(slot.progress_at for slot in slots) > self._patience():
            return verdict_of_hang(self._look(ask_for_stacks=True))
        return None

    def _patience(self) -> float:
        """Seconds without progress of any rank that are a hang."""
        beats = [slot.beat for slot in self._slots.training()]
        if any(beat.get("phase") != "training" for beat in beats):
            return START_PATIENCE
        if self._plan.heartbeat_timeout is not None:
            return self._plan.heartbeat_timeout
        return max(LEAST_PATIENCE, PATIENCE * max(beat["seconds"] for beat in beats))

    def _look(self, *, ask_for_stacks: bool) -> list[Sight]:
        """Where every training process stands, as its slot and itself say."""
        slots = self._slots.training()
        if ask_for_stacks:
            self._store.set(f"{self._number}/stacks", "1")
        for slot in slots:
            slot.seen = {}
            self._slots.send(slot, do="look")
        deadline = time.monotonic() + (3.0 if ask_for_stacks else 1.0)
        while time.monotonic() < deadline:
            self._slots.listen(0.05)
            self._read_beats()
            if all(slot.seen and (slot.beat.get("stack") or not ask_for_stacks) for slot in slots):
                break
        return [_sight(slot) for slot in slots]

    def _report_stragglers(self) -> None:
        """Tells of ranks that keep the others waiting, once each; nobody is replaced for that."""
        beats = {slot.rank or 0: slot.beat for slot in self._slots.training()}
        if any(beat.get("phase") != "training" for beat in beats.values()):
            return
        self._first_step = self.step if self._first_step is None else self._first_step
        if self.step < self._first_step + SETTLING:
            return
        busy = {rank: beat["busy"] for rank, beat in beats.items()}
        for rank, times in stragglers(busy, max(beat["seconds"] for beat in beats.values())).items():
            if rank not in self._slow:
                self._slow.add(rank)
                who = f"rank {rank} ({self.node_of(rank)})"
                self._on_straggler(
                    rank, f"{who} computes for {busy[rank]:.3f} s a step, {times:.1f} times the median rank"
                )

    def _read_beats(self) -> None:
        """What the training processes have published since the last look."""
        now = time.monotonic()
        for slot in self._slots.training():
            key = f"{self._number}/beat/{slot.rank}"
            if not self._store.check([key]):
                continue
            beat = json.loads(self._store.get(key))
            if beat["beat"] != slot.beat.get("beat"):
                slot.beat_at = now
            if (beat["step"], beat["phase"]) != (slot.beat.get("step"), slot.beat.get("phase")):
                slot.progress_at = now
            slot.beat = beat
            self.step = max(self.step, beat["step"])

    # logs

    def _log(self, rank: int) -> Path:
        return self._plan.run / beacon.LOGS / f"attempt-{self._number}" / f"rank-{rank}.log"

    def _tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank's log."""
        try:
            with open(self._log(rank), "rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                return tuple(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
        except OSError:
            return ()

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


def _sight(slot: Slot) -> Sight:
    return Sight(
        rank=slot.rank or 0,
        node=slot.node,
        state=slot.seen.get("state", "out of reach"),
        silent=time.monotonic() - slot.beat_at > SILENCE,
        step=slot.beat.get("step", 0),
        phase=slot.beat.get("phase", "starting"),
        stack=tuple(slot.beat.get("stack") or slot.seen.get("stack", "").splitlines()),
    )
