"""Hand-worked commits over cached updates, and which updates are cached."""

from dataclasses import replace

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import (
    Arrived,
    Contribution,
    Failed,
    Joined,
    Left,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.strategies.latecomer.cached_aggregation import (
    WEIGHT_CAP,
    CachedAggregation,
    CachedUpdate,
    corrected,
    noise_aware_weight,
    position_along,
    remaining,
    rms_of,
    signal_share,
    stepped,
)
from latecomer.strategies.parts.weighting import by_examples

FIRST = Submodel("first", torch.tensor([0]))


def answer(task, *delta, examples=1, noise=0.0):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples, noise_std=noise))


def begun(devices, share=1.0, server_lr=1.0, start=0.0, **options):
    """A server over cached updates with these devices, and their first tasks."""
    merge = CachedAggregation(share, server_lr, norm_clip=0.0, **options)
    strategy = Strategy(weigh=by_examples(), merge=merge)
    server = Server(torch.tensor([start]), strategy, TrainSpec())
    return server, *sends(server.handle(*map(Joined, range(devices))))


def head(server):
    return server.store.head_params().tolist()


def cache(server, lineage="main"):
    """The cached updates of a lineage, by device."""
    return server.strategy.merge.state()["cache"][lineage]


def cached(*delta, weight=1.0, submodel=None):
    vector = torch.tensor(delta)
    return CachedUpdate(vector, submodel, weight, 0, rms_of(vector, len(delta)), position=0.0)


def test_every_commit_averages_the_last_update_of_every_device():
    server, one, two = begun(2, share=0.5)
    (one,) = sends(server.handle(answer(one, 2.0)))
    assert head(server) == [1.0]  # half a fleet pass: 0.5 * 2
    sends(server.handle(answer(two, 4.0)))
    assert head(server) == [2.5]  # 0.5 * (2 + 4) / 2
    server.handle(answer(one, 0.0))
    assert head(server) == [3.5]  # 0.5 * (0 + 4) / 2: the last update of each


@pytest.mark.parametrize(
    ("share", "third"),
    [
        (0.0, 0.5 * (0 + 4) / 2),  # MIFA
        (1.0, 0.5 * ((2 + 4) / 2 + (0 - 2))),  # CA2FL: the update of the other has changed as much
        (0.75, 0.5 * ((2 + 4) / 2 + 0.75 * (0 - 2))),
    ],
)
def test_the_change_of_new_updates_corrects_the_mean(share, third):
    server, one, two = begun(2, share=0.5, control_variate=share)
    (one,) = sends(server.handle(answer(one, 2.0)))
    sends(server.handle(answer(two, 4.0)))
    assert head(server) == [2.5]  # first updates are no change
    server.handle(answer(one, 0.0))
    assert head(server) == pytest.approx([2.5 + third])


def test_where_all_devices_arrive_there_is_no_correction():
    """The mean of the cache has the whole change already."""
    heads = []
    for share in (1.0, 0.0):
        server, *tasks = begun(2, control_variate=share)
        for deltas in ((2.0, 4.0), (1.0, -3.0)):
            arrived = (answer(task, delta) for task, delta in zip(tasks, deltas, strict=True))
            tasks = sends(server.handle(*arrived))
        assert server.store.commits == 2
        heads.append(head(server))
    assert heads[0] == heads[1] == [3.0 - 1.0]


def test_devices_without_a_cached_update_have_no_share():
    """One of ten devices has arrived, twice: its change is the whole change of the mean."""
    server, one, *_ = begun(10, share=0.1, control_variate=1.0)
    (one,) = sends(server.handle(answer(one, 2.0)))
    server.handle(answer(one, 1.0))
    assert head(server) == pytest.approx([0.1 * 2 + 0.1 * 1])


def test_the_correction_is_computed_from_clipped_updates():
    others = [cached(1.0)] * 3
    now = cached(50.0)
    found = corrected(torch.zeros(1), [(cached(1.0), now)], [now, *others], 1.0, 1.0, norm_clip=2.0)
    assert found.tolist() == [0.75]  # (2 - 1), of which a quarter is in the mean
    found = corrected(torch.zeros(1), [(cached(1.0), now)], [now, *others], 1.0, 0.5, norm_clip=0.0)
    assert found.tolist() == [0.5 * 0.75 * 49.0]


def test_the_correction_is_computed_per_trained_coordinate():
    narrow, wide = cached(4.0, submodel=FIRST), cached(1.0, 1.0)
    changes = [(cached(1.0, submodel=FIRST), narrow), (cached(0.0, 0.0), wide)]
    unchanged = cached(0.0, submodel=FIRST)
    found = corrected(torch.zeros(2), changes, [narrow, wide, unchanged], 1.0, 1.0, 0.0)
    # A third of the weight on the first coordinate has not changed, on the second none.
    assert found.tolist() == pytest.approx([(3 + 1) / 2 / 3, 0.0])


def test_the_weight_cap_holds_in_the_correction():
    heavy, plain = cached(1.0, weight=1e9), [cached(0.0)] * 3
    changes = [(cached(0.0, weight=1e9), heavy), (plain[0], plain[0])]
    found = corrected(torch.zeros(1), changes, [heavy, *plain], 1.0, 1.0, 0.0)
    share = (WEIGHT_CAP + 1) / (WEIGHT_CAP + 3)
    assert found.tolist() == pytest.approx([(1 - share) * WEIGHT_CAP / (WEIGHT_CAP + 1)])


def test_the_trust_region_bounds_the_displacement_per_fleet_pass():
    server, one, two = begun(2, share=0.5, server_lr=2.0, trust_region=0.25)
    sends(server.handle(answer(one, 4.0)))
    assert head(server) == [0.5]  # half a pass: half of a quarter of 4
    server.handle(answer(two, 4.0))
    assert head(server) == [1.0]


def test_the_distance_already_moved_along_an_update_is_taken_off():
    server, one, two = begun(2, share=0.5, server_lr=1.0, projection_damping=1.0, start=3.0)
    sends(server.handle(answer(one, 4.0)))
    assert head(server) == [3.0 + 2.0]  # it starts from this model: half a pass
    server.handle(answer(two, 4.0))
    # The model has moved half-way along both, also the second, whose base is 3.
    assert head(server) == [5.0 + 0.5 * 2.0]


def test_changes_are_not_damped():
    server, one, _ = begun(2, share=0.5, server_lr=1.0, control_variate=1.0, projection_damping=1.0)
    (one,) = sends(server.handle(answer(one, 4.0)))
    assert head(server) == [2.0]
    server.handle(answer(one, 2.0))
    # It is the only cached update, and the mean has its whole change.
    assert head(server) == [2.0 + 0.5 * 2.0]
    others, before, now = [cached(4.0)] * 3, cached(4.0), cached(2.0)
    found = corrected(torch.zeros(1), [(before, now)], [now, *others], 1.0, 1.0, 0.0)
    assert found.tolist() == [0.75 * -2.0]  # at any head


def test_the_remaining_share_of_an_update():
    whole = cached(3.0, 4.0)
    beside, half, past, back = [4.0, -3.0], [1.5, 2.0], [6.0, 8.0], [-3.0, -4.0]
    for at, left in ((beside, 1.0), (half, 0.5), (past, 0.0), (back, 1.0)):
        assert remaining(whole, torch.tensor(at), 1.0) == pytest.approx(left)
    assert remaining(whole, torch.tensor(half), 0.4) == pytest.approx(0.8)
    assert remaining(whole, torch.tensor(past), 0.0) == 1.0
    later = replace(whole, position=0.25)
    assert remaining(later, torch.tensor(half), 1.0) == pytest.approx(0.75)
    part = cached(4.0, submodel=FIRST)
    assert remaining(part, torch.tensor([1.0, 9.0]), 1.0) == 0.75  # of its own coordinates
    assert remaining(cached(0.0, 0.0), torch.tensor(half), 1.0) == 1.0  # a delta of 0


def test_the_projection_does_not_depend_on_memory_alignment():
    numbers = torch.Generator().manual_seed(1)
    params, delta = torch.randn(2, 100_003, generator=numbers)
    room = torch.empty(100_004)
    moved = room[1:].copy_(params)
    size = rms_of(delta, delta.numel())
    assert position_along(delta, size, params) == position_along(delta, size, moved)
    near = position_along(delta, size, 1e4 + params) - position_along(
        delta, size, 1e4 + params - 0.5 * delta
    )
    assert near == pytest.approx(0.5, abs=1e-3)


def test_a_damped_update_keeps_its_share_of_the_weight():
    reached, other = cached(1.0, 0.0), cached(0.0, 4.0)
    start = torch.tensor([1.0, 1.0])
    found = stepped(start, [reached, other], 1.0, 0.0, damping=1.0)
    assert found.tolist() == [1.0, 1.0 + 0.75 * 4 / 2]
    assert stepped(start, [reached, other], 1.0, 0.0).tolist() == [1.5, 3.0]


def test_with_damping_the_model_converges_on_repeated_updates():
    """Without, the same cached updates move it on for ever."""
    ends = {}
    for damping in (0.0, 1.0):
        params, updates = torch.zeros(1), [cached(1.0), cached(1.0)]
        for _ in range(50):
            params = stepped(params, updates, 0.5, 0.0, damping)
        ends[damping] = params.item()
    assert ends == {0.0: 25.0, 1.0: pytest.approx(1.0)}


def test_the_position_is_that_of_the_base_if_it_is_of_the_same_lineage():
    server, task = begun(1, projection_damping=0.4)
    merge, store = server.strategy.merge, server.store
    base, delta = torch.tensor([8.0]), torch.tensor([2.0])
    update = Update(task.id, delta, 1)
    compensated = Contribution(task, update, base, delta, "main", 0)
    merge.add(compensated, server)
    assert cache(server)[0].position == 4.0  # of its base, not of the model that was sent
    store.fork("main", "other")
    merge.add(replace(compensated, lineage="other"), server)
    assert cache(server, "other")[0].position is None
    store.absorb("main", "other")
    merge.add(replace(compensated, task=replace(task, lineage="other")), server)
    assert cache(server)[0].position == 4.0


def test_a_cluster_merge_drops_the_updates_for_the_closed_model():
    server, *tasks = begun(2, projection_damping=0.4)
    server.handle(*(answer(task, 1.0) for task in tasks))
    kept, merge = cache(server)[0], server.strategy.merge
    server.fork("main", "gone")
    zero = torch.zeros(1)
    update = Update(tasks[1].id, zero, 1)
    merge.add(Contribution(tasks[1], update, zero, zero, "gone", 0), server)
    assert cache(server, "gone").keys() == {1}
    server.absorb("main", "gone")
    assert merge.state()["cache"] == {"main": {0: kept}}


def test_a_surrogate_has_a_position_too():
    server, task, other = begun(2, share=0.5, projection_damping=1.0)
    base, delta = torch.tensor([8.0]), torch.tensor([2.0])
    surrogate = Contribution(task, Update(task.id, delta, 1), base, delta, "main", 0)
    server.strategy.merge.surrogates = lambda lineage, fresh, view: [surrogate]
    (commit,) = logged(server.handle(answer(other, 1.0)), "commit")
    assert commit["surrogates"] == 1
    assert cache(server)[0].position == 4.0  # 8 is four times the delta


def test_without_damping_positions_are_not_computed():
    server, one = begun(1, trust_region=0.3)
    server.handle(answer(one, 1.0))
    (known,) = cache(server).values()
    assert known.position is None


def test_the_signal_share_of_an_update():
    def share(size, noise=0.0, epsilon=0.0):
        return signal_share(size, Update(0, torch.zeros(1), 1, noise_std=noise, epsilon=epsilon))

    assert share(5.0, 3.0) == pytest.approx(16 / 25)
    assert share(5.0) == share(0.0) == 1.0
    assert share(5.0, 5.0) == share(5.0, 9.0) == share(0.0, 1.0) == 0.0
    assert share(5.0, epsilon=1.0) == 0.0  # noise of an unknown amount, after Adam


def test_noise_counts_once_for_all_commits_of_a_fleet_pass():
    assert noise_aware_weight(1.0, 10.0) == 1.0
    assert noise_aware_weight(0.0, 10.0) == 10.0
    server, one, two = begun(2, share=0.5)
    (one,) = sends(server.handle(answer(one, 5.0, noise=4.0)))
    assert head(server) == [2.5]  # half a pass of the only update, which is new
    server.handle(answer(two, 10.0, noise=6.0))
    # The signal share of the older one is 9/25; of the new one the noise, 9/25, counts twice.
    second = 0.5 * (0.36 * 5 + (0.64 + 2 * 0.36) * 10) / 2
    assert head(server) == pytest.approx([2.5 + second])
    server.handle(answer(one, 3.0, noise=9.0))
    assert head(server) == pytest.approx([2.5 + second + 0.5 * (2 * 3 + 0.64 * 10) / 2])


@pytest.mark.parametrize("mover", [0, 1])
def test_updates_with_and_without_noise_count_the_same_per_fleet_pass(mover):
    """One of three devices adds no noise."""
    found = []
    for noise in (0.0, 9.0):
        server, *tasks = begun(3, share=1 / 3)
        for number in range(20):
            for device in range(3):
                delta = 1.0 if device == mover else 0.0
                given = answer(tasks[device], delta, noise=0.0 if device == 0 else noise)
                (tasks[device],) = sends(server.handle(given))
            if number == 9:
                half = head(server)[0]
        found.append(head(server)[0] - half)
    assert found[0] == pytest.approx(10 / 3)
    assert found[1] == pytest.approx(10 / 3)


def test_the_correction_is_reduced_to_the_signal_share():
    server, one, two, three = begun(3, share=1 / 3, control_variate=1.0)
    for task in (one, two, three):
        again = sends(server.handle(answer(task, 5.0, noise=4.0)))
        one = again[0] if task is one else one
    before = head(server)[0]
    server.handle(answer(one, 10.0, noise=6.0))
    mean = (0.36 * 5 * 2 + (0.64 + 3 * 0.36) * 10) / 3
    # The median share of signal is 0.36, of which a third is in the mean.
    assert head(server)[0] - before == pytest.approx((mean + (0.36 - 1 / 3) * 5) / 3)


def test_the_trust_region_does_not_act_on_noise():
    for noise, second in ((9.0, 4.0), (2.0**0.5, 4.0 * (1 - 7 / 8 * 7 / 8)), (0.0, 4.0 / 8)):
        server, one, two = begun(2, share=0.5, server_lr=2.0, trust_region=0.25)
        sends(server.handle(answer(one, 4.0, noise=noise)))
        first = head(server)[0]
        server.handle(answer(two, 4.0, noise=noise))
        assert head(server)[0] - first == pytest.approx(second)


def test_a_minority_with_noise_does_not_widen_the_trust_region():
    heads = []
    for noise in (0.0, 9.0):
        server, *tasks = begun(3, share=1.0, server_lr=2.0, trust_region=0.25)
        answers = [answer(t, 4.0, noise=noise if t.device == 0 else 0.0) for t in tasks]
        server.handle(*answers)
        heads.append(head(server))
    assert heads[0] == heads[1] == [1.0]


def test_old_noise_does_not_move_coordinates_without_new_updates():
    narrow = cached(4.0, submodel=FIRST)
    wide = [replace(cached(5.0, 5.0), signal=0.01)] * 3
    found = stepped(
        torch.zeros(2), [narrow, *wide], 0.2, 0.0, noise_factors=[1.0, 0.01, 0.01, 0.01]
    )
    assert found.tolist() == pytest.approx([0.2 * (4 + 0.15) / 4, 0.2 * 0.05])


def test_updates_that_cancel_out_stay_in_the_trust_region():
    server, one, two = begun(2, share=1.0, server_lr=1.0, trust_region=0.25)
    server.handle(answer(one, 4.0), answer(two, -3.0))
    assert head(server) == [0.5]  # the radius is a quarter of the median RMS, 0.875


def test_the_trust_region_shortens_the_correction_by_as_much():
    """Deltas 4, then 2, and 4: the mean would move by 3, and the radius is a quarter of 3."""
    server, one, two = begun(2, share=0.5, server_lr=2.0, control_variate=1.0, trust_region=0.25)
    (one,) = sends(server.handle(answer(one, 4.0)))
    sends(server.handle(answer(two, 4.0)))
    assert head(server) == [1.0]
    server.handle(answer(one, 2.0))
    mean, more = (2 + 4) / 2, 0.5 * (2 - 4)
    assert head(server) == pytest.approx([1.0 + 0.25 * 3 / (2 * mean) * (mean + more)])


def test_a_median_rms_of_0_is_no_bound():
    server, *tasks = begun(3, share=1.0, trust_region=0.3)
    server.handle(*(answer(t, delta) for t, delta in zip(tasks, (0.0, 0.0, 3.0), strict=True)))
    assert head(server) == [1.0]


def test_updates_weigh_by_examples_and_the_step_is_per_fleet_pass():
    server, one, two = begun(2, share=1.0, server_lr=0.5)
    server.handle(answer(one, 4.0, examples=3), answer(two, 8.0, examples=1))
    assert head(server) == [0.5 * (3 * 4.0 + 8.0) / 4]


def test_the_step_never_exceeds_the_mean():
    server, one = begun(1, server_lr=5.0)
    server.handle(answer(one, 2.0))
    assert head(server) == [2.0]


def test_a_device_that_arrives_twice_counts_with_its_last_update():
    server, one, _two, *_ = begun(4, share=0.5, server_lr=2.0)
    (one,) = sends(server.handle(answer(one, 100.0)))
    server.handle(answer(one, 2.0))
    assert head(server) == [1.0]  # one of four arrived: 2 * 1/4 of a delta of 2


def test_share_0_commits_at_every_arrival():
    server, one, _two = begun(2, share=0.0, server_lr=2.0)
    server.handle(answer(one, 2.0))
    assert head(server) == [2.0]
    assert server.store.commits == 1


def test_updates_are_clipped_to_twice_the_median_norm():
    updates = [cached(1.0), cached(1.0), cached(50.0)]
    assert stepped(torch.zeros(1), updates, 1.0, norm_clip=2.0).tolist() == pytest.approx([4 / 3])
    assert stepped(torch.zeros(1), updates, 1.0, norm_clip=0.0).tolist() == pytest.approx([52 / 3])


def test_a_weight_is_capped_at_ten_times_the_median():
    updates = [cached(0.0), cached(0.0), cached(1.0, weight=1e9)]
    assert stepped(torch.zeros(1), updates, 1.0, 0.0).tolist() == pytest.approx(
        [WEIGHT_CAP / (2 + WEIGHT_CAP)]
    )


def test_coordinates_are_averaged_over_the_updates_that_cover_them():
    updates = [cached(2.0, 2.0), cached(4.0, submodel=FIRST)]
    assert stepped(torch.zeros(2), updates, 1.0, 0.0).tolist() == [3.0, 2.0]
    narrow = [cached(4.0, submodel=FIRST)]
    assert stepped(torch.tensor([0.0, 7.0]), narrow, 0.5, 0.0).tolist() == [2.0, 7.0]


def test_an_absent_device_is_dropped_after_three_fleet_passes():
    server, one, two = begun(2, share=0.5)
    server.handle(answer(two, 4.0), Left(1))
    sizes = []
    for _ in range(8):
        (one,) = sends(server.handle(answer(one, 0.0)))
        sizes.append(len(cache(server)))
    # A pass is two commits; at the seventh its update is seven commits old.
    assert sizes == [2] * 6 + [1] * 2


def test_the_update_of_a_working_device_is_kept():
    server, one, two = begun(2, share=0.5)
    sends(server.handle(answer(two, 4.0)))  # and is sent another task
    for _ in range(20):
        (one,) = sends(server.handle(answer(one, 0.0)))
    assert len(cache(server)) == 2


def test_a_lost_device_does_not_delay_the_commit():
    server, one, two, three = begun(3, share=1.0)
    server.handle(Failed(three.id, "lost"))
    commands = server.handle(answer(one, 2.0), answer(two, 4.0))
    assert logged(commands, "commit")


def test_updates_older_than_a_fleet_pass_are_discounted():
    """A pass is two commits, so after four the update of the other is two passes old."""
    server, one, two = begun(2, share=0.5, age_discount=1.0)
    sends(server.handle(answer(two, 4.0)))  # 0.5 * 4
    for _ in range(4):
        (one,) = sends(server.handle(answer(one, 0.0)))
    ages = [1, 1, 3 / 2, 2]  # 0.5, 1, 1.5 and 2 passes: up to one it counts in full
    expected = 2.0 + sum(0.5 * (4 / age) / (1 / age + 1) for age in ages)
    assert head(server) == pytest.approx([expected])
