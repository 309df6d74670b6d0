"""Who is blamed, from how processes ended and from where they stand."""

import signal

import pytest

from optimus_compiler.runtime.resilience.soft import Report, verdict_of_reports
from optimus_compiler.runtime.resilience.verdict import Ending, Sight, stragglers, verdict_of_endings, verdict_of_hang

PEER_GONE = (
    "Traceback ...",
    "optimus: error: the run in r stopped after step 6: RuntimeError: Connection closed by peer [1.2.3.4]",
)


def ended(rank: int, code: int | None, time: float = 0.0, *tail: str) -> Ending:
    return Ending(rank, f"node{rank // 2}", code, time, tail)


def stands(rank: int, *stack: str, state: str = "running", silent: bool = False) -> Sight:
    return Sight(rank, f"node{rank // 2}", state, silent, 6, "training", stack)


WAITS = ("train.py:10 step: loss.backward()", "distributed_c10d.py:3252 all_reduce: work.wait()")


def test_the_first_death_is_to_blame_and_not_those_it_pulls_along() -> None:
    verdict = verdict_of_endings([
        ended(0, 1, 10.3, *PEER_GONE), ended(3, -15, 10.4), ended(2, -9, 10.1), ended(1, -11, 10.2),
    ])  # fmt: skip
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("hard", (2,), ("node1",))
    assert verdict.evidence == ("rank 2 (node1) died from signal 9 (SIGKILL)",)


def test_a_victim_whose_end_is_seen_first_is_still_a_victim() -> None:
    verdict = verdict_of_endings([ended(0, 1, 10.0, *PEER_GONE), ended(2, -9, 10.5)])
    assert verdict.ranks == (2,)


def test_a_segmentation_fault_alone_is_a_cause() -> None:
    assert verdict_of_endings([ended(1, -signal.SIGSEGV, 1.0), ended(0, 1, 1.1, *PEER_GONE)]).ranks == (1,)


def test_two_faults_at_once_are_two() -> None:
    verdict = verdict_of_endings([ended(0, -9, 1.0), ended(4, -9, 1.0), ended(2, 1, 1.1, *PEER_GONE)])
    assert (verdict.ranks, verdict.nodes) == ((0, 4), ("node0", "node2"))


def test_an_error_of_its_own_is_a_cause_and_quoted() -> None:
    verdict = verdict_of_endings([
        ended(2, 1, 2.0, "optimus: error: MemoryError: out of memory", ""), ended(0, 1, 2.1, *PEER_GONE),
        ended(1, 1, 1.9, "optimus: error: rank 2 failed: its own message says why"),
    ])  # fmt: skip
    assert verdict.ranks == (2,)
    assert verdict.evidence[0].endswith("exit code 1: optimus: error: MemoryError: out of memory")


def test_a_node_out_of_reach() -> None:
    verdict = verdict_of_endings([ended(2, None, 3.0), ended(3, None, 3.0), ended(0, 1, 3.2, *PEER_GONE)])
    assert (verdict.ranks, verdict.nodes) == ((2, 3), ("node1",))
    assert "out of reach" in verdict.evidence[0]


def test_all_say_whose_disk_was_full() -> None:
    line = "CheckpointError: step-8.partial could not be written (rank 3: No space left on device): free some space"
    verdict = verdict_of_endings([ended(rank, 1, 1.0 + rank, line) for rank in range(4)])
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("hard", (3,), ("node1",))


def test_nobody_is_blamed_where_all_lost_a_peer() -> None:
    verdict = verdict_of_endings([ended(rank, 1, 1.0, *PEER_GONE) for rank in range(4)])
    assert (verdict.kind, verdict.nodes) == ("unknown", ())


def test_hang_of_a_stopped_process() -> None:
    verdict = verdict_of_hang([stands(0, *WAITS), stands(1, *WAITS), stands(2, state="stopped", silent=True)])
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("hang", (2,), ("node1",))
    assert "work.wait()" in verdict.evidence[1]


def test_hang_of_a_process_that_is_in_no_collective() -> None:
    sights = [stands(0, *WAITS), stands(1, "loader.py:9 read: time.sleep(60)"), stands(2, *WAITS)]
    verdict = verdict_of_hang(sights)
    assert verdict.ranks == (1,)
    assert "time.sleep(60)" in verdict.evidence[0]


def test_hang_of_a_process_that_does_not_respond() -> None:
    assert verdict_of_hang([stands(0, *WAITS), stands(1, silent=True), stands(2, *WAITS)]).ranks == (1,)


def test_hang_without_a_difference_blames_nobody() -> None:
    assert verdict_of_hang([stands(rank, *WAITS) for rank in range(3)]).nodes == ()


def test_waiting_is_known_from_the_innermost_lines() -> None:
    for line in ("wrapper.py:3 call: torch.ops._c10d_functional.wait_tensor.default(buf7)", "p.py:1 f: work.wait()"):
        assert stands(0, "a", line).waits
    assert not stands(0, "x.py:1 all_reduce: pass", *["y.py:2 compute: x = x @ w"] * 6).waits


def report(rank: int, first: str | None, *, is_own: bool, again: bool = True) -> Report:
    return Report(rank, 7, 0, first, is_own, again)


def node_of(rank: int) -> str:
    return f"node{rank // 2}"


def test_the_rank_that_made_it_and_not_those_that_received_it() -> None:
    reports = [report(rank, "the output of a layer", is_own=rank == 3) for rank in range(4)]
    verdict = verdict_of_reports(reports, node_of)
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("soft", (3,), ("node1",))
    assert "all before it was; repeated, the step gave the same" in verdict.evidence[0]


def test_all_ranks_again_and_again_is_divergence() -> None:
    reports = [report(rank, "the loss", is_own=True) for rank in range(4)]
    assert verdict_of_reports(reports, node_of).kind == "divergence"
    assert verdict_of_reports(reports, node_of).nodes == ()
    once = [report(rank, "the loss", is_own=True, again=False) for rank in range(4)]
    assert verdict_of_reports(once, node_of).kind == "soft"


def test_divergence_in_the_first_stage_of_a_pipeline() -> None:
    def reports(*own: int) -> list[Report]:
        return [Report(rank, 7, rank // 2, "a value", rank in own, True) for rank in range(4)]

    assert (
        verdict_of_reports(reports(0, 1), node_of).kind == "divergence"
    )  # the second stage received what the first made
    assert verdict_of_reports(reports(1), node_of).ranks == (1,)
    assert verdict_of_reports(reports(2, 3), node_of).kind == "divergence"
    assert verdict_of_reports(reports(3), node_of).kind == "soft"


def test_nobody_made_it_as_far_as_is_known() -> None:
    verdict = verdict_of_reports([report(rank, None, is_own=False) for rank in range(2)], node_of)
    assert (verdict.kind, verdict.nodes, verdict.evidence) == ("soft", (), ("no rank computed it itself",))


def test_a_straggler_keeps_the_others_waiting() -> None:
    assert stragglers({0: 0.05, 1: 0.04, 2: 0.5, 3: 0.05}, 0.55) == {2: pytest.approx(10)}
    assert stragglers({0: 0.5, 1: 0.5, 2: 0.6, 3: 0.5}, 0.7) == {}  # not twice as long
    assert stragglers({0: 0.05, 1: 0.02, 2: 0.02, 3: 0.02}, 0.55) == {}  # nobody waits for it
    assert stragglers({}, 0.0) == {}
