"""The simulated pipeline against what is known of it in closed form."""

from itertools import pairwise

import pytest

from optimus_compiler.runtime.plan.schedule import Action, run_schedule


def end(actions: list[Action]) -> float:
    return max(action.end for action in actions)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 64)])
def test_equal_stages_have_the_bubble_of_the_textbook(schedule: str, ranks: int, micro_batches: int) -> None:
    """(m + p - 1) (f + b)."""
    actions = run_schedule(schedule, ranks, 1, micro_batches, [1.0] * ranks, [2.0] * ranks, 0.0)
    assert end(actions) == pytest.approx((micro_batches + ranks - 1) * 3.0)
    assert len(actions) == 2 * ranks * micro_batches


def test_interleaving_divides_the_bubble_by_the_stages_a_rank() -> None:
    """Half of the layers a stage: m f + (p - 1) f / v."""
    actions = run_schedule("interleaved-1f1b", 4, 2, 8, [0.5] * 8, [1.0] * 8, 0.0)
    assert end(actions) == pytest.approx(8 * 3.0 + 3 * 3.0 / 2)


def test_one_rank_has_no_bubble() -> None:
    assert end(run_schedule("1f1b", 1, 1, 5, [1.0], [2.0], 7.0)) == 15.0


def test_a_transfer_delays_each_hop() -> None:
    """One micro-batch through three stages and back: four hops."""
    actions = run_schedule("gpipe", 3, 1, 1, [1.0] * 3, [1.0] * 3, 0.25)
    assert end(actions) == pytest.approx(6 + 4 * 0.25)


def test_the_slowest_stage_sets_the_pace() -> None:
    actions = run_schedule("1f1b", 2, 1, 50, [1.0, 3.0], [1.0, 3.0], 0.0)
    assert end(actions) == pytest.approx(50 * 6.0 + 2.0)


def test_no_rank_does_two_things_at_once_and_nothing_runs_before_its_input() -> None:
    actions = run_schedule("1f1b", 3, 1, 6, [1.0, 2.0, 0.5], [2.0, 1.0, 1.5], 0.1)
    for rank in range(3):
        own = sorted((a for a in actions if a.rank == rank), key=lambda a: a.start)
        assert all(before.end <= after.start for before, after in pairwise(own))
    ends = {(a.stage, a.micro_batch, a.forward): a.end for a in actions}
    for action in actions:
        source = action.stage - 1 if action.forward else action.stage + 1
        if (source, action.micro_batch, action.forward) in ends:
            assert action.start >= ends[source, action.micro_batch, action.forward] + 0.1
