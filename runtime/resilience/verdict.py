"""Who is to blame for a failed attempt, from how processes ended, or from where they stand. Pure functions."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from optimus_compiler.runtime.resilience.incidents import Kind
from optimus_compiler.runtime.resilience.stacks import waits_for_peers

# What a process says that only lost its peer: it is a victim.
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|its own message says why|remote process exited|"
    r"failed to (recv|send)|timed out waiting .* for (recv|send)|ncclremoteerror|store.* (closed|shut)",
    re.IGNORECASE,
)
# Signals that job launchers and broken communication deal out to the others once one process has died.
_CASCADE = (signal.SIGTERM, signal.SIGSEGV)
SLOW = 2.0  # times the median rank's
_WRITER = re.compile(r"could not be written \(rank (\d+): ")


@dataclass(frozen=True)
class Ending:
    """How a training process ended: its exit code, negative for a signal, and the last lines of its log.

    code None: the slot or its node is gone, nobody saw the end.
    """

    rank: int
    node: str
    code: int | None
    time: float
    tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sight:
    """Where a training process stands that makes no progress.

    state: as the kernel has it ("running", "stopped", ...). silent: it has not even said that it lives.
    """

    rank: int
    node: str
    state: str
    silent: bool
    step: int
    phase: str
    stack: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it is inside a collective, waiting for others."""
        return waits_for_peers(self.stack)


@dataclass(frozen=True)
class Verdict:
    """The kind of a failure, the ranks and nodes to blame (none: nobody in particular), and why."""

    kind: Kind
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    evidence: tuple[str, ...]


def verdict_of_endings(endings: Sequence[Ending]) -> Verdict:
    """Of the processes that ended first, those that were not merely pulled along.

    A victim lost its peer, or got a signal that launchers send when the first process has died. Several processes may
    fail by themselves at once: all of them are named.
    """
    endings = sorted(endings, key=lambda each: each.time)
    for each in endings:
        for line in each.tail:
            if found := _WRITER.search(line):  # all ranks say whose disk it was
                writer = int(found[1])
                nodes = tuple(one.node for one in endings if one.rank == writer)
                return Verdict("hard", (writer,), nodes, (f"rank {writer} could not write: {line.strip()}",))
    first = endings[0].time
    guilty = [each for each in endings if not _is_victim(each, first)]
    if not guilty:
        evidence = tuple(_describe(each) for each in endings[:3])
        return Verdict("unknown", (), (), ("every process that ended had lost a peer", *evidence))
    gone = [each for each in guilty if each.code is None]
    if gone and len(gone) < len(guilty):
        guilty = [each for each in guilty if each.code is not None] or gone
    nodes = tuple(dict.fromkeys(each.node for each in guilty))
    return Verdict("hard", tuple(each.rank for each in guilty), nodes, tuple(_describe(each) for each in guilty))


def verdict_of_hang(sights: Sequence[Sight]) -> Verdict:
    """A stopped process; else one that does not even beat; else those not in a collective while their peers wait."""
    for what, group in (
        ("is stopped", [each for each in sights if each.state == "stopped"]),
        ("has ended unseen", [each for each in sights if each.state == "ended"]),
        ("does not respond", [each for each in sights if each.silent]),
        ("is in no collective while its peers wait in one", [each for each in sights if not each.waits]),
    ):
        if group and len(group) < len(sights):
            nodes = tuple(dict.fromkeys(each.node for each in group))
            evidence = [
                f"rank {each.rank} ({each.node}) {what}, after step {each.step}: {_place(each)}" for each in group
            ]
            waiting = [each for each in sights if each not in group]
            evidence.append(f"rank {waiting[0].rank} ({waiting[0].node}): {_place(waiting[0])}")
            return Verdict("hang", tuple(each.rank for each in group), nodes, tuple(evidence))
    evidence = [f"rank {each.rank} ({each.node}), after step {each.step}: {_place(each)}" for each in sights[:3]]
    return Verdict("hang", (), (), ("no rank stands apart from its peers", *evidence))


def _is_victim(ending: Ending, first: float) -> bool:
    if ending.code is not None and ending.code < 0:
        return -ending.code in _CASCADE and ending.time > first
    return any(_PEER_LOST.search(line) for line in ending.tail)


def _describe(ending: Ending) -> str:
    who = f"rank {ending.rank} ({ending.node})"
    if ending.code is None:
        return f"{who} is out of reach: its slot hung up"
    if ending.code < 0:
        return f"{who} died from signal {-ending.code} ({signal.Signals(-ending.code).name})"
    last = next((line.strip() for line in reversed(ending.tail) if line.strip()), "it said nothing")
    return f"{who} ended with exit code {ending.code}: {last}"


def _place(sight: Sight) -> str:
    return sight.stack[-1].strip() if sight.stack else f"{sight.state}, {sight.phase}"


def stragglers(busy: Mapping[int, float], step: float) -> dict[int, float]:
    """The ranks that compute for more than twice as long as the median rank, and how many times as long.

    busy: seconds of a step in which each rank is in no collective; step: seconds of a whole step, of which a straggler
    takes up more than half: the others wait for it.
    """
    typical = median(busy.values()) if busy else 0.0
    slow = {rank: seconds for rank, seconds in busy.items() if seconds > max(SLOW * typical, step / 2)}
    return {rank: seconds / typical for rank, seconds in slow.items() if typical > 0}
