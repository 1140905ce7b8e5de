"""Hand-worked commits over cached updates, and which updates are cached."""

from dataclasses import replace

import pytest
import torch

from commands import logged, sends
from latecomer.core.codec import decode, encode
from latecomer.core.messages import Arrived, Contribution, Failed, Joined, Left, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy, no_compensation
from latecomer.core.submodel import Submodel
from latecomer.device.flat import FlatModel
from latecomer.strategies.latecomer.cached_aggregation import (
    CORRECTION,
    CachedAggregation,
    signal_share,
)
from latecomer.strategies.latecomer.measured_step import (
    FIRST_GAIN,
    MAX_GROWTH,
    SAFE,
    MeasuredStep,
)
from latecomer.strategies.parts.weighting import by_examples
from toy import toy_strategy

FIRST = Submodel("first", torch.tensor([0]))


class FixedStep(MeasuredStep):
    """A gain that does not change."""

    def __init__(self, gain):
        super().__init__()
        self.fixed = gain

    def advance(self, clipped, members, seed, relative):
        super().advance(clipped, members, seed, relative)
        return self.fixed


def not_stale(contribution, view):
    return replace(contribution, staleness=0)


def begun(devices, share=None, gain=1.0, size=1, submodels=(), step=None, compensate=not_stale):
    """A server over cached updates with these devices, and their first tasks by device.

    A commit follows three updates, unless `share` is given.
    """
    share = 3 / devices if share is None else share
    merge = CachedAggregation(share, step or FixedStep(gain))
    strategy = Strategy(compensate=compensate, weigh=by_examples(), merge=merge)
    server = Server(torch.zeros(size), strategy, TrainSpec())
    parts = [*submodels, *[None] * (devices - len(submodels))]
    return server, by_device(server.handle(*map(Joined, range(devices), parts)))


def by_device(commands):
    return {task.device: task for task in sends(commands)}


def answer(task, *delta, examples=1, noise=0.0):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples, noise_std=noise))


def report(server, tasks, deltas, **each):
    """These devices report these deltas in one moment; how far the model moves."""
    before = server.store.head_params().clone()
    arrived = [answer(tasks[device], delta, **each) for device, delta in deltas.items()]
    tasks.update(by_device(server.handle(*arrived)))
    return (server.store.head_params() - before).tolist()


def caches(server):
    return server.strategy.merge.state()["caches"]


def cached(server, lineage="main"):
    """The cached deltas of a lineage, by device."""
    updates = caches(server)[lineage].updates
    return {device: each.delta.tolist() for device, each in updates.items()}


def test_a_commit_steps_by_the_mean_of_all_cached_updates():
    server, tasks = begun(6)
    assert report(server, tasks, {0: 2.0, 1: 3.0, 2: 4.0}) == pytest.approx([3 / 6 * 3])
    # Three others: the first three are cached, and nothing has changed.
    assert report(server, tasks, {3: 5.0, 4: 6.0, 5: 7.0}) == pytest.approx([3 / 6 * 4.5])


def test_the_mean_is_weighted_by_examples():
    server, tasks = begun(3)
    server.handle(
        answer(tasks[0], 1.0, examples=3),
        answer(tasks[1], 1.5, examples=1),
        answer(tasks[2], 2.0, examples=4),
    )
    assert server.store.head_params().tolist() == pytest.approx([(3 + 1.5 + 8) / 8])


def test_the_second_update_of_a_device_replaces_its_first():
    server, tasks = begun(3)
    report(server, tasks, {0: 2.0, 1: 2.0, 2: 2.0})
    # All have changed: the mean has the whole change already.
    assert report(server, tasks, {0: 1.0, 1: 1.0, 2: 1.0}) == [1.0]
    assert cached(server) == {0: [1.0], 1: [1.0], 2: [1.0]}


def test_between_commits_the_last_update_of_a_device_counts():
    server, tasks = begun(3)
    report(server, tasks, {0: 3.0})
    report(server, tasks, {0: 2.0})
    commands = server.handle(answer(tasks[1], 1.0))
    assert logged(commands, "commit")[0]["updates"] == 3  # all that arrived
    assert server.store.head_params().tolist() == pytest.approx([2 / 3 * 1.5])


@pytest.mark.parametrize(
    ("devices", "share", "needed"),
    [(1, 0.0, 1), (2, 0.0, 1), (10, 0.1, 1), (10, 0.3, 3), (10, 0.35, 4), (9, 1, 9), (12, 1, 10)],
)
def test_updates_per_commit(devices, share, needed):
    server, tasks = begun(devices, share)
    commits = []
    for device in range(needed):
        report(server, tasks, {device: 1.0})
        commits.append(server.store.commits)
    assert commits == [0] * (needed - 1) + [1]


def test_updates_of_one_device_make_a_commit_too():
    server, tasks = begun(6)
    for _ in range(6):
        report(server, tasks, {0: 1.0})
    assert server.store.commits == 2
    # One device of six has reported: a sixth of a mean update each time.
    assert server.store.head_params().tolist() == pytest.approx([2 / 6])


def test_the_step_is_the_gain_per_fleet_pass_and_at_most_one_mean_update():
    for gain, step in ((1.0, 0.3), (2.0, 0.6), (9.0, 1.0)):
        server, tasks = begun(10, gain=gain)
        assert report(server, tasks, dict.fromkeys(range(3), 5.0)) == pytest.approx([5 * step])


def test_the_gain_is_measured_on_the_updates_of_the_commit():
    server, tasks = begun(10, step=MeasuredStep())
    moved = report(server, tasks, dict.fromkeys(range(3), 5.0))
    assert moved == pytest.approx([FIRST_GAIN * 3 / 10 * 5])
    server.strategy.merge.step.gain = 2.5
    # The base has moved by 3, every update by -2.4: L = 0.8.
    moved = report(server, tasks, dict.fromkeys(range(3), 2.6))
    assert server.strategy.merge.step.gain == pytest.approx(min(SAFE / 0.8, 2.5 * MAX_GROWTH**0.3))
    assert moved == pytest.approx([server.strategy.merge.step.gain * 3 / 10 * 2.6])


def test_the_first_gain_depends_on_the_norm_of_the_mean_update_over_that_of_the_model():
    server, tasks = begun(60, share=0.0, step=MeasuredStep())
    server.store.head_params()[0] = 8.0
    # A fleet pass of these updates moves the model by 0.05 of its norm.
    assert report(server, tasks, {0: 0.02}) == pytest.approx([0.05 * 8 / 60], rel=1e-3)


def test_updates_are_clipped_to_twice_the_median_norm():
    server, tasks = begun(3)
    assert report(server, tasks, {0: 1.0, 1: 1.0, 2: -5.0}) == [0.0]  # (1 + 1 - 2) / 3
    assert cached(server) == {0: [1.0], 1: [1.0], 2: [-2.0]}
    report(server, tasks, {0: 1.0, 1: 1.0, 2: 1.9})
    assert cached(server)[2] == pytest.approx([1.9])


def test_the_median_is_over_the_last_updates_of_all_devices():
    server, tasks = begun(6)
    report(server, tasks, {0: 4.0, 1: 4.0, 2: 4.0})
    report(server, tasks, {3: 1.0, 4: 1.0, 5: 9.0})
    assert cached(server)[5] == pytest.approx([8.0])  # of 4, 4, 4, 1, 1 and 9 it is 4
    # The new norms replace those of the same devices: of 1, 1, 1, 1, 1 and 9 it is 1.
    report(server, tasks, {0: 1.0, 1: 1.0, 2: 1.0})
    report(server, tasks, {3: 1.0, 4: 1.0, 5: 3.0})
    assert cached(server)[5] == pytest.approx([2.0])


def test_a_new_norm_replaces_the_one_of_the_same_device_at_once():
    server, tasks = begun(3)
    for delta in (1.0, 4.0):
        report(server, tasks, dict.fromkeys(range(3), delta))
    assert cached(server) == {0: [4.0], 1: [4.0], 2: [4.0]}


def test_norms_before_clipping_enter_the_median():
    server, tasks = begun(4, share=0.0)
    for device, delta in enumerate((1.0, 1.0, 3.0, 3.5)):
        report(server, tasks, {device: delta})
    # Of 1, 1 and 3 it is 1; of 1, 1, 3 and 3.5 it is 2.
    assert cached(server) == {0: [1.0], 1: [1.0], 2: [2.0], 3: [3.5]}
    assert caches(server)["main"].updates[2].rms == 3.0


def test_one_update_per_commit_is_clipped_by_the_others():
    server, tasks = begun(10, share=0.1)
    for device in range(9):
        report(server, tasks, {device: 1.0})
    report(server, tasks, {9: -5.0})
    assert server.store.commits == 10
    assert cached(server)[9] == pytest.approx([-2.0])


def test_the_step_is_measured_on_clipped_updates():
    server, tasks = begun(3)
    report(server, tasks, {0: 1.0, 1: 1.0, 2: -5.0})
    visits = server.strategy.merge.step.state()["visits"]
    assert [visits[device].delta.item() for device in range(3)] == pytest.approx([1.0, 1.0, -2.0])


def test_a_median_norm_of_0_clips_to_0():
    server, tasks = begun(3)
    assert report(server, tasks, {0: 0.0, 1: 0.0, 2: 3.0}) == [0.0]


def test_a_stale_update_counts_as_much_as_any_other():
    server, tasks = begun(6, compensate=no_compensation)
    for _ in range(4):
        report(server, tasks, {0: 3.0, 1: 3.0, 2: 3.0})
    moved = report(server, tasks, {3: 5.0, 4: 5.0, 5: 5.0})
    assert moved == pytest.approx([3 / 6 * 4.0])
    assert cached(server)[3] == [5.0]


def test_the_staleness_of_updates_divides_the_gain():
    server, tasks = begun(6, step=MeasuredStep(), compensate=no_compensation)
    for _ in range(4):
        report(server, tasks, {0: 3.0, 1: 3.0, 2: 3.0})
    # Four commits of three of six devices are two fleet passes; half of the average is replaced.
    gain = server.strategy.merge.step.gain
    moved = report(server, tasks, {3: 3.0, 4: 3.0, 5: 3.0})
    assert gain == server.strategy.merge.step.gain == 2.0
    assert moved == pytest.approx([3.0 * 1.0 / 2])


def test_the_change_of_reporting_devices_corrects_for_those_that_are_missing():
    server, tasks = begun(6)
    report(server, tasks, {0: 2.0, 1: 2.0, 2: 2.0})
    report(server, tasks, {3: 4.0, 4: 4.0, 5: 4.0})
    # Changes of 1, 1 and -0.5 have the mean 0.5; half of the weight has reported.
    moved = report(server, tasks, {0: 3.0, 1: 3.0, 2: 1.5})
    assert CORRECTION == 0.3
    assert moved == pytest.approx([3 / 6 * ((7.5 + 12) / 6 + 0.3 * 0.5 * 0.5)])


def test_the_correction_is_weighted_by_examples():
    server, tasks = begun(6)
    report(server, tasks, {0: 2.0, 1: 2.0, 2: 2.0}, examples=3)
    report(server, tasks, {3: 4.0, 4: 4.0, 5: 4.0}, examples=1)
    moved = report(server, tasks, {0: 3.0, 1: 3.0, 2: 3.0}, examples=3)
    # Three quarters of the weight have reported, and have changed by 1.
    assert moved == pytest.approx([3 / 6 * ((3 * 9 + 12) / 12 + 0.3 * 0.25 * 1)])


def test_first_updates_are_no_change():
    server, tasks = begun(9)
    report(server, tasks, {0: 2.0, 1: 2.0, 2: 2.0})
    # Device 0 changes by 1, with a fifth of the weight.
    moved = report(server, tasks, {0: 3.0, 3: 2.0, 4: 2.0})
    assert moved == pytest.approx([3 / 9 * (11 / 5 + 0.3 * 0.8 * 1)])


def test_noise_shrinks_the_correction_and_the_gain_above_1():
    heads = []
    for noise in (0.0, 3.0, 9.0):
        server, tasks = begun(6, gain=1.5)
        report(server, tasks, {0: 5.0, 1: 5.0, 2: 5.0})
        report(server, tasks, {3: 5.0, 4: 5.0, 5: 5.0})
        heads += report(server, tasks, dict.fromkeys(range(3), -5.0), noise=noise)
    shares = (1.0, 16 / 25, 0.0)
    expected = [3 / 6 * (1 + 0.5 * s) * (0 + 0.3 * s * 0.5 * -10) for s in shares]
    assert heads == pytest.approx(expected)


def test_the_signal_share_of_an_update():
    def share(size, noise=0.0, epsilon=0.0):
        return signal_share(size, Update(0, torch.zeros(1), 1, noise_std=noise, epsilon=epsilon))

    assert share(5.0, 3.0) == pytest.approx(16 / 25)
    assert share(5.0) == share(0.0) == 1.0
    assert share(5.0, 5.0) == share(5.0, 9.0) == share(0.0, 1.0) == 0.0
    assert share(5.0, epsilon=1.0) == 0.0  # noise of an unknown amount, after Adam


def test_coordinates_are_averaged_over_the_updates_that_train_them():
    server, tasks = begun(3, size=2, submodels=(FIRST, FIRST))
    server.handle(answer(tasks[0], 2.0), answer(tasks[1], 4.0), answer(tasks[2], 3.0, 2.0))
    assert server.store.head_params().tolist() == [3.0, 2.0]


def test_coordinates_that_nobody_trains_stay_bit_for_bit():
    server, tasks = begun(3, size=2, submodels=(FIRST,) * 3)
    server.store.head_params()[1] = 0.1
    untouched = server.store.head_params()[1].item()
    for delta in (3.0, 2.0, 2.5):
        report(server, tasks, dict.fromkeys(range(3), delta))
    assert server.store.head_params()[0] == 7.5
    assert server.store.head_params()[1].item() == untouched


def test_the_correction_is_computed_per_coordinate():
    server, tasks = begun(6, size=2, submodels=(FIRST,) * 3)
    for devices in (range(3), range(3, 6)):
        deltas = [(1.0,) if device < 3 else (1.0, 1.0) for device in devices]
        arrived = [answer(tasks[d], *delta) for d, delta in zip(devices, deltas, strict=True)]
        tasks.update(by_device(server.handle(*arrived)))
    before = server.store.head_params().clone()
    server.handle(*(answer(tasks[device], 2.0) for device in range(3)))
    moved = (server.store.head_params() - before).tolist()
    assert moved == pytest.approx([3 / 6 * (1.5 + 0.3 * 0.5 * 1), 3 / 6 * 1.0])


def test_an_update_of_another_sub_model_is_no_change():
    server, tasks = begun(6, size=2)
    second = Submodel("second", torch.tensor([1]))
    for devices, submodel, value in (
        (range(3), FIRST, 1.0),
        (range(3, 6), second, 1.0),
        (range(3), second, 2.0),
    ):
        for device in devices:
            task = replace(tasks[device], submodel=submodel)
            commit = server.strategy.merge.add(contribution(task, "main", value), server)
    # The head stays 0, since the commits are not stored.
    assert commit.params.tolist() == pytest.approx([0.0, 3 / 6 * 1.5])


def test_an_absent_device_is_dropped_after_three_fleet_passes():
    server, tasks = begun(6)
    report(server, tasks, dict.fromkeys(range(3), 1.0))
    report(server, tasks, {3: 1.0, 4: 1.0, 5: 4.0})
    server.handle(Failed(tasks[5].id, "lost"), Left(5))
    sizes = []
    for _ in range(8):
        report(server, tasks, dict.fromkeys(range(3), 1.0))
        sizes.append(len(cached(server)))
    # Its update is of commit 1, and a pass is two commits: dropped once 7 are stored.
    assert sizes == [6] * 6 + [5] * 2
    assert 5 not in server.strategy.merge.step.state()["visits"]
    assert caches(server)["main"].weight.tolist() == [5.0]
    assert caches(server)["main"].total.tolist() == pytest.approx([5.0])


def test_the_update_of_a_working_device_is_kept():
    server, tasks = begun(6)
    report(server, tasks, dict.fromkeys(range(3, 6), 4.0))
    for _ in range(20):
        report(server, tasks, dict.fromkeys(range(3), 0.0))
    assert len(cached(server)) == 6


def test_devices_that_have_left_do_not_block_commits():
    server, tasks = begun(3)
    report(server, tasks, dict.fromkeys(range(3), 1.0))
    server.handle(Failed(tasks[2].id, "lost"), Left(2))
    for _ in range(3):
        report(server, tasks, {0: 1.0, 1: 1.0})
    assert server.store.commits == 3


def test_surrogates_replace_updates_older_than_a_fleet_pass():
    server, tasks = begun(6)
    asked = []

    def surrogates(lineage, fresh, view):
        asked.append(sorted(fresh))
        if 5 in fresh or 5 not in cached(server):
            return []
        delta = torch.tensor([9.0])
        made = Contribution(tasks[5], Update(tasks[5].id, delta, 1), delta, delta, lineage, 0)
        return [made.weighed(2.0)]

    server.strategy.merge.surrogates = surrogates
    report(server, tasks, {3: 1.0, 4: 1.0, 5: 1.0})
    for _ in range(3):
        report(server, tasks, {0: 1.0, 1: 1.0, 2: 1.0})
    # A pass is two commits: at the fourth, the update of commit 0 is three commits old.
    assert asked == [[3, 4, 5], list(range(6)), list(range(6)), [0, 1, 2]]
    assert cached(server)[5] == [9.0]
    renewed = caches(server)["main"]
    assert (renewed.updates[5].weight, renewed.updates[5].version) == (2.0, 0)
    assert (renewed.total.tolist(), renewed.weight.tolist()) == ([5 + 18.0], [7.0])
    moved = report(server, tasks, {0: 1.0, 1: 1.0, 2: 1.0})
    assert moved == pytest.approx([3 / 6 * 23 / 7])


def test_a_surrogate_is_counted_in_the_commit():
    server, tasks = begun(3)
    delta = torch.tensor([9.0])
    made = Contribution(tasks[0], Update(tasks[0].id, delta, 1), delta, delta, "main", 0)
    server.strategy.merge.surrogates = lambda lineage, fresh, view: [made]
    commands = server.handle(*(answer(tasks[device], 1.0) for device in range(3)))
    assert logged(commands, "commit")[0]["surrogates"] == 1


def contribution(task, lineage, value):
    delta = torch.tensor([value])
    return Contribution(task, Update(task.id, delta, 1), torch.zeros(1), delta, lineage, 0)


def test_a_device_is_cached_in_one_cluster_only():
    server, tasks = begun(3)
    report(server, tasks, dict.fromkeys(range(3), 1.0))
    server.fork("main", "other")
    # No device is assigned to the new lineage yet, so one update makes a commit.
    assert server.strategy.merge.add(contribution(tasks[0], "other", 2.0), server)
    assert cached(server, "other") == {0: [2.0]}
    assert cached(server) == {1: [1.0], 2: [1.0]}
    left = caches(server)["main"]
    assert (left.total.tolist(), left.weight.tolist()) == ([2.0], [2.0])


def test_a_cluster_merge_drops_the_cache_of_the_closed_model():
    server, tasks = begun(3)
    report(server, tasks, dict.fromkeys(range(3), 1.0))
    server.fork("main", "gone")
    server.strategy.merge.add(contribution(tasks[0], "gone", 2.0), server)
    kept = cached(server)
    assert set(caches(server)) == {"main", "gone"}
    server.absorb("main", "gone")
    assert set(caches(server)) == {"main"}
    assert cached(server) == kept


def test_a_restored_server_continues_bit_for_bit_and_a_saved_state_stays():
    server, tasks = begun(6, step=MeasuredStep())
    report(server, tasks, {0: 0.1, 1: 0.2, 2: 0.3})
    report(server, tasks, {0: 0.4})
    state = server.state()  # in the middle of a commit, with half of the fleet cached
    saved = encode(state)
    tree, tensors = saved[0], {k: v.clone() for k, v in dict(saved[1]).items()}
    more = [{3: 0.5, 4: 0.7}, {0: 0.2, 3: 0.1, 4: 0.6}, {5: 0.4, 1: 0.1, 2: 0.0}]
    before = dict(tasks)
    for deltas in more:
        report(server, tasks, deltas)
    assert server.store.commits == 4
    later = dict(encode(state)[1])
    assert all(torch.equal(later[key], tensors[key]) for key in tensors)
    again, _ = begun(6, step=MeasuredStep())
    again.restore(decode(tree, tensors))
    for deltas in more:
        report(again, before, deltas)
    assert torch.equal(again.store.head_params(), server.store.head_params())


def test_a_fleet_that_reports_together_is_fedavg():
    """With all devices in each commit and nothing stale, at any gain."""
    heads = []
    for strategy in (
        Strategy(weigh=by_examples(), merge=CachedAggregation(1.0, MeasuredStep())),
        toy_strategy("fedavg"),
    ):
        server = Server(torch.zeros(6), strategy, TrainSpec())
        numbers = torch.Generator().manual_seed(3)
        commands = server.handle(*map(Joined, range(5)))
        for _ in range(8):
            arrived = []
            for device, task in sorted(by_device(commands).items()):
                delta = torch.randn(6, generator=numbers) * 0.1 + 1.0
                arrived.append(Arrived(device, Update(task.id, delta, 1 + device)))
            commands = server.handle(*arrived)
        assert server.store.commits == 8
        heads.append(server.store.head_params())
    torch.testing.assert_close(heads[0], heads[1], rtol=1e-6, atol=1e-6)


def test_buffers_move_to_the_mean_of_the_devices_that_reported():
    """Never beyond: a step of several mean updates would make variances negative."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    network = FlatModel(lambda: module, (2,), 2)
    trained = network.layout.trained
    assert network.layout.size == trained + 4
    strategy = Strategy(weigh=by_examples(), merge=CachedAggregation(0.5, FixedStep(2.0)))
    initial = torch.zeros(network.layout.size)
    initial[trained:] = 1.0
    server = Server(initial, strategy, TrainSpec(), networks=lambda submodel: network)
    tasks = by_device(server.handle(*map(Joined, range(4))))
    for devices, value in (((0, 1), -0.9), ((2, 3), -0.5)):
        delta = torch.full((network.layout.size,), value)
        arrived = [Arrived(d, Update(tasks[d].id, delta, 1 + 2 * (d % 2))) for d in devices]
        server.handle(*arrived)
    head = server.store.head_params()
    # First to 0.1, the value of both devices; then half of the way to 0.5.
    assert head[trained:].tolist() == pytest.approx([0.3] * 4)
    assert head[0].item() == pytest.approx(-0.9 + -0.7)
