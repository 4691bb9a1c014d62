import itertools
import random
import time

import pytest
import torch

from hf_dspark.scheduling import CostTable, LatencyCurve, OnlineCost, algorithm1, machine_key, profile

TABLE = CostTable(
    rows=(1, 4),
    contexts=(100, 300),
    widths=(1, 2, 8),
    verify=(((1.0, 2.0, 5.0), (3.0, 4.0, 7.0)), ((2.0, 4.0, 16.0), (4.0, 6.0, 18.0))),
    draft=((0.5, 0.7), (1.0, 1.4)),
    key=machine_key("toy", torch.float32),
)


def test_latency_is_linear_between_knots_and_keeps_the_last_slope():
    assert [TABLE.verify_seconds(t, 1, 100) for t in (1, 2, 5, 8, 10)] == pytest.approx([1.0, 2.0, 3.5, 5.0, 6.0])
    assert TABLE.verify_seconds(1, 1, 200) == pytest.approx(2.0)
    assert TABLE.verify_seconds(1, 1, 50) == pytest.approx(1.0)
    assert TABLE.verify_seconds(1, 1, 500) == pytest.approx(5.0)
    assert TABLE.verify_seconds(4, 4, 100) == pytest.approx(2.0)  # tokens of the whole step: one per row
    assert TABLE.verify_seconds(20, 4, 300) == pytest.approx(12.0)
    assert TABLE.verify_seconds(2, 2, 100) == pytest.approx(1 + 1 / 3)
    assert TABLE.verify_seconds(7, 7, 100) == pytest.approx(3.0)
    assert TABLE.draft_seconds(4, 200) == pytest.approx(1.2)


def test_the_curve_of_a_step_includes_the_draft():
    curve = TABLE.curve(rows=4, context=100, stages=2)
    assert curve.tokens == (4, 8, 32) and curve.seconds == pytest.approx((4.0, 6.0, 18.0))
    assert curve(20) == pytest.approx(12.0)


def test_leaving_out_the_draft_time_prunes_more():
    c = torch.full((1, 8), 0.7)
    with_draft = algorithm1(c, TABLE.curve(1, 100))
    assert algorithm1(c, TABLE.curve(1, 100, stages=0)) < with_draft


def test_an_odd_last_slope_never_makes_tokens_cheaper_than_the_last_knot():
    curve = LatencyCurve((1, 2, 4), (1.0, 3.0, 2.0))
    assert curve(100) == 2.0 and curve(3) == pytest.approx(2.5)


def test_isotonic_equals_the_min_max_formula():
    rng = random.Random(0)
    for _ in range(100):
        y = [rng.random() for _ in range(rng.randint(1, 8))]
        n = len(y)
        for w in (None, tuple(rng.choice((0.01, 1, 30)) for _ in y)):

            def mean(i, j, y=y, w=w or [1] * n):
                return sum(a * b for a, b in zip(y[i : j + 1], w[i : j + 1])) / sum(w[i : j + 1])

            expected = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
            curve = LatencyCurve(tuple(range(1, n + 1)), tuple(y), weights=w)
            assert curve.isotonic().seconds == pytest.approx(expected)


def test_widths_seen_thrice_on_a_busy_machine_give_way_to_wider_ones_seen_often():
    cost = OnlineCost()
    for width, seconds, times in ((8, 1.0, 30), (15, 9.0, 3), (22, 1.2, 30)):
        for _ in range(times):
            cost.record_verify(seconds, width)
    assert cost.curve()(15) > 5
    assert cost.curve().isotonic()(15) < 2.1


def test_a_staircase_charges_the_next_captured_size():
    stairs = LatencyCurve((1, 4, 8), (1.0, 2.0, 3.0)).as_staircase()
    assert [stairs(t) for t in (1, 2, 4, 5, 8, 12)] == pytest.approx([1.0, 2.0, 2.0, 3.0, 3.0, 4.0])


def test_a_table_survives_its_file_and_refuses_another_machine(tmp_path):
    path = tmp_path / "cost.json"
    TABLE.save(path)
    assert CostTable.load(path, machine_key("toy", torch.float32)) == TABLE == CostTable.load(path)
    with pytest.raises(ValueError, match="profile again"):
        CostTable.load(path, machine_key("toy", torch.bfloat16))


def test_the_key_names_machine_model_dtype_and_threads():
    assert machine_key("toy", torch.float32)["threads"] == torch.get_num_threads()
    assert machine_key("toy", "float32") == machine_key("toy", torch.float32)
    assert set(TABLE.key) == {"machine", "model", "dtype", "threads"}


class FakeClock:
    def __init__(self):
        self.now, self.calls, self.rng = 0.0, [], random.Random(0)

    def run(self, rows, tokens, context):
        self.calls.append((rows, tokens, context))
        self.now += (
            tokens + context / 1000 + (50.0 if self.rng.random() < 0.2 else 0.0)
        )  # a slice lost to somebody else

    def draft(self, rows, context):
        self.now += 0.25 * rows

    def __call__(self):
        return self.now


def test_profile_takes_medians_after_warming_up():
    clock, waits = FakeClock(), []
    table = profile(
        clock.run,
        clock.draft,
        rows=(2, 1),
        widths=(1, 4),
        contexts=(10,),
        repeats=9,
        clock=clock,
        sync=lambda: waits.append(1),
    )
    assert table.rows == (1, 2)
    flat = [x for grid in table.verify for x in grid[0]]
    assert flat == pytest.approx([1.01, 4.01, 2.01, 8.01])
    assert table.draft == ((0.25,), (0.5,))
    assert clock.calls.count((2, 8, 10)) == 12  # three of them untimed
    assert len(waits) == 2 * 9 * 6
    assert profile(clock.run, rows=(1,), widths=(1,), repeats=1, clock=clock).draft == ((0.0,),)


def test_profile_measures_real_time():
    table = profile(lambda rows, tokens, context: time.sleep(tokens / 500), widths=(1, 8), repeats=3, warmup=0)
    assert table.verify_seconds(1) >= 1 / 500 and table.verify_seconds(8) >= 8 / 500


def test_online_costs_are_usable_before_any_measurement():
    cost = OnlineCost()
    assert cost.plain_steps() == 0
    assert 1.0 < cost.verify_seconds(8) / cost.verify_seconds(1) < 1.5
    assert 0 < cost.draft_seconds() < cost.verify_seconds(1)
    assert algorithm1(torch.full((1, 4), 0.9), cost.curve()).tolist() == [4]


def test_one_measurement_scales_everything_that_was_not_measured():
    cost = OnlineCost()
    cost.record_verify(0.06, tokens=1)
    assert cost.verify_seconds(1) == pytest.approx(0.06)
    assert cost.verify_seconds(9) == pytest.approx(0.06 * OnlineCost().verify_seconds(9))
    assert cost.draft_seconds() == pytest.approx(0.06 * OnlineCost().draft_seconds())
    cost.record_draft(0.004, drafts=5)
    assert cost.draft_seconds() == pytest.approx(0.004)


def test_online_costs_find_the_truth_through_outliers():
    cost, rng = OnlineCost(), random.Random(0)

    def truth(width):
        return 0.055 + 0.004 * width

    cost.record_verify(3.0, tokens=8)  # the first call compiles
    for _, width in itertools.product(range(20), (1, 6, 8)):
        cost.record_verify(truth(width) * rng.uniform(0.97, 1.03) + (0.1 if rng.random() < 0.15 else 0), width)
    for width in (1, 4, 6, 8):
        assert cost.verify_seconds(width) == pytest.approx(truth(width), rel=0.05)
    assert cost.curve()(7) == pytest.approx(truth(7) + cost.draft_seconds(), rel=0.05)
    assert cost.plain_steps() == 20


def test_a_width_measured_once_on_a_busy_machine_is_not_believed_once_others_are_known():
    cost = OnlineCost()
    cost.record_verify(9.0, tokens=6)
    assert cost.verify_seconds(6) == pytest.approx(9.0)  # better than nothing
    for _ in range(3):
        cost.record_verify(1.0, tokens=1)
    assert cost.verify_seconds(6) == pytest.approx(OnlineCost().verify_seconds(6))
    for _ in range(2):
        cost.record_verify(1.5, tokens=6)
    assert cost.verify_seconds(6) == pytest.approx(1.5)
    cost.record_verify(9.0, tokens=8)
    assert cost.verify_seconds(8) == pytest.approx(
        1.5 * OnlineCost().verify_seconds(8) / OnlineCost().verify_seconds(6)
    )


def test_online_costs_follow_a_machine_that_slows_down():
    cost = OnlineCost(window=8)
    for seconds in [1.0] * 50 + [2.0] * 8:
        cost.record_verify(seconds, tokens=1)
    assert cost.verify_seconds(1) == pytest.approx(2.0)


def test_rows_never_seen_borrow_the_nearest_and_keep_the_tables_shape():
    cost = OnlineCost(prior=TABLE)
    for rows in (1, 4):
        cost.record_verify(3 * TABLE.verify_seconds(rows, rows, 100), rows, rows, 100)
    assert cost.verify_seconds(6, 3, 300) == pytest.approx(3 * TABLE.verify_seconds(6, 3, 300))
    cost.record_verify(TABLE.verify_seconds(8, 8, 100), 8, 8, 100)
    assert cost.verify_seconds(10, 10, 100) == pytest.approx(TABLE.verify_seconds(10, 10, 100))
    assert OnlineCost(prior=TABLE).verify_seconds(6, 3, 300) == pytest.approx(TABLE.verify_seconds(6, 3, 300))


def test_a_table_measured_without_a_drafter_can_learn_its_cost():
    cost = OnlineCost(prior=CostTable((1,), (0,), (1,), (((2.0,),),), ((0.0,),)))
    assert 0 < cost.draft_seconds() < 2.0
    cost.record_draft(0.1)
    assert cost.draft_seconds() == pytest.approx(0.1)


def test_a_recursive_drafter_costs_by_the_draft():
    cost = OnlineCost(recursive=True)
    cost.record_draft(0.04, drafts=4)
    assert cost.draft_seconds(drafts=2) == pytest.approx(0.02)
    cost = OnlineCost()
    cost.record_draft(0.04, drafts=4)
    assert cost.draft_seconds(drafts=2) == pytest.approx(0.04)
