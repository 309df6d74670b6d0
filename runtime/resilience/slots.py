"""The slots of all nodes as the supervisor has them: started by an engine, each at the end of a line."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from optimus_compiler.runtime.resilience.engines import Commands, Engine, Local
from optimus_compiler.runtime.resilience.hosts import address_for
from optimus_compiler.runtime.resilience.messages import Line, Message
from optimus_compiler.runtime.resilience.plan import Plan


@dataclass
class Slot:
    """A slot, and what is known of the training process that it has started in the current attempt."""

    node: str
    local_rank: int
    line: Line | None  # None: it has hung up
    rank: int | None = None  # in the current attempt; None: it waits
    running: bool = False
    ended: tuple[int | None, float] | None = None  # (exit code, or None for out of reach; when)
    seen: dict[str, str] = field(default_factory=dict)  # what it saw when it was asked to look
    beat: Message = field(default_factory=dict)  # what its process has published last
    beat_at: float = 0.0
    progress_at: float = 0.0


class Slots:
    """Starts the slots and listens to them. `on_fault` is told of a node that cannot be used, and why."""

    def __init__(self, plan: Plan, on_fault: Callable[[str, str], None]) -> None:
        self.host = address_for(list(plan.nodes))  # of this machine, as the nodes reach it
        self._plan = plan
        self._on_fault = on_fault
        self._slots: dict[tuple[str, int], Slot] = {}
        self._listener = socket.create_server((self.host if self.host == "127.0.0.1" else "", 0), backlog=4096)
        self._engine: Engine = Local(self._listener)
        if plan.launcher != "local":
            self._engine = Commands(plan.launcher, plan.launcher_arguments)
        self._engine.start(f"{self.host}:{self._listener.getsockname()[1]}", plan.nodes, plan.per_node, plan.run)
        self._select = selectors.DefaultSelector()
        self._select.register(self._listener, selectors.EVENT_READ)

    def of(self, node: str) -> list[Slot]:
        """The slots of a node that have called, by their rank on it."""
        ranks = range(self._plan.per_node)
        return [self._slots[node, rank] for rank in ranks if (node, rank) in self._slots]

    def training(self) -> list[Slot]:
        """The slots of the current attempt, by rank."""
        return sorted((s for s in self._slots.values() if s.rank is not None), key=lambda slot: slot.rank or 0)

    def dismiss(self) -> None:
        """No slot has a rank any more."""
        for slot in self._slots.values():
            slot.rank = None

    def launchers_ended(self) -> dict[str, str]:
        """The nodes whose launcher has ended, and what it said last."""
        return self._engine.ended()

    def listen(self, seconds: float) -> None:
        """Takes what the slots say within some seconds."""
        for key, _ in self._select.select(seconds):
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                self._select.register(connection, selectors.EVENT_READ, Line(connection))
                continue
            messages = key.data.receive()
            if messages is None:
                self._hung_up(key.data)
                continue
            for message in messages:
                self._hear(key.data, message)

    def send(self, slot: Slot, **message: object) -> None:
        """Tells a slot to do something; one that cannot be told has hung up."""
        if slot.line is not None:
            try:
                slot.line.send(**message)
            except OSError:
                self._hung_up(slot.line)

    def close(self) -> None:
        """Ends all slots."""
        for slot in self._slots.values():
            self.send(slot, do="end")
        self._engine.stop()
        self._listener.close()

    def _hear(self, line: Line, message: Message) -> None:
        if "hello" in message:
            node, local_rank = message["hello"], message["local_rank"]
            self._slots[node, local_rank] = Slot(node, local_rank, line)
            if message["fault"]:
                self._on_fault(node, message["fault"])
            return
        slot = next(slot for slot in self._slots.values() if slot.line is line)
        if "ended" in message:
            slot.running, slot.ended = False, (message["ended"], message["time"])
        elif "look" in message:
            slot.seen = message["look"]

    def _hung_up(self, line: Line) -> None:
        self._select.unregister(line.socket)
        line.close()
        for slot in self._slots.values():
            if slot.line is line:
                slot.line = None
                if slot.rank is None:
                    self._on_fault(slot.node, "its slot hung up while it waited")
                elif slot.running:
                    slot.running, slot.ended = False, (None, time.time())
