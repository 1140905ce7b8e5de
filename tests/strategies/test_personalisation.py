"""Whether devices differ, and what is remembered for them."""

import pytest
import torch
from torch import nn

from latecomer.core.messages import (
    Arrived,
    Contribution,
    Failed,
    Joined,
    Left,
    Note,
    Send,
    Task,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.core.strategy import Commit, Strategy
from latecomer.device.flat import FlatModel
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.model_averaging import WINDOW_PASSES
from latecomer.strategies.latecomer.personalisation import FEWEST, Personalisation, dispersion
from latecomer.strategies.parts.clustering import Clustering


class Ignore:
    def add(self, contribution, view):
        return None


def reasons(commands):
    return [c.fields["reason"] for c in commands if isinstance(c, Note) and c.kind == "switch"]


def test_dispersion_by_hand():
    # Mean 0.5: 10 * 0.04 + 10 * 0.04 over 0.25 * 1.
    assert dispersion([(0.3, 10), (0.7, 10)]) == pytest.approx(3.2)
    assert dispersion([(0.5, 10), (0.5, 30)]) == 0.0
    assert dispersion([(0.0, 10), (0.0, 30)]) == 0.0


def test_nobody_decides_alone_whether_devices_differ():
    alike = [(0.1, 30)] * 20
    assert dispersion([*alike, (0.0, 10**9)]) < 2 * dispersion([*alike, (0.0, 300)]) < 4


def begun(keep=0.5):
    branches = Clustering(1, 4, 20, turns=3.0, partial=False, listen=3)
    owning = Personalisation(CachedAggregation(0.5, 1.0, 0.0), keep, 1.0, branches)
    server = Server(torch.zeros(1), Strategy(route=branches, merge=owning), TrainSpec())
    return server, owning, server.handle(Joined(0), Joined(1))


def tell(server, commands, errors, times):
    """Both devices err as `errors` say; the notes that come of it, and the last commands."""
    notes = []
    for _ in range(times):
        tasks = [c.task for c in commands if isinstance(c, Send)]
        commands = server.handle(
            *(
                Arrived(
                    t.device,
                    Update(
                        t.id,
                        torch.tensor([0.5]),
                        100,
                        {"error": errors[t.device], "soft_0": 0.25, "soft_1": 0.75},
                    ),
                )
                for t in tasks
            )
        )
        notes += reasons(commands)
    return commands, notes


def test_devices_keep_something_while_they_differ():
    server, owning, commands = begun()
    assert owning.keep == 0.0
    commands, notes = tell(server, commands, (0.1, 0.4), FEWEST)
    assert owning.keep == 0.5
    assert ["differ" in note for note in notes] == [True]
    _, notes = tell(server, commands, (0.2, 0.2), FEWEST)
    assert owning.keep == 0.0
    assert ["alike" in note for note in notes] == [True]


def uneven(calibrate=1.0, bias=True):
    """Two devices with a class each, and a model of two outputs that says the first too often."""
    network = FlatModel(lambda: nn.Linear(1, 2, bias=bias), (1,), 2)
    branches = Clustering(1, 4, 20, turns=3.0, partial=False, listen=3)
    owning = Personalisation(CachedAggregation(0.5, 1.0, 0.0), 0.0, 0.0, branches, calibrate)
    strategy = Strategy(route=branches, merge=owning, own=owning)
    server = Server(
        torch.zeros(network.layout.size), strategy, TrainSpec(), networks=lambda submodel: network
    )
    return server, owning, server.handle(Joined(0), Joined(1))


def judge(server, commands, shares, times):
    """Both devices hold these shares; the notes that come of it, and the last commands."""
    notes = []
    for _ in range(times):
        tasks = [c.task for c in commands if isinstance(c, Send)]
        told = {"error": 0.1, "soft_0": 0.7, "soft_1": 0.3, "sway_0": 0.2, "sway_1": 0.2}
        arrivals = [
            Update(
                t.id,
                torch.zeros_like(t.params),
                50,
                told | {"share_0": shares[t.device], "share_1": 1 - shares[t.device]},
            )
            for t in tasks
        ]
        commands = server.handle(
            *(Arrived(t.device, u) for t, u in zip(tasks, arrivals, strict=True))
        )
        notes += reasons(commands)
    return commands, notes


def test_a_model_of_uneven_devices_is_calibrated_in_its_output_bias():
    server, owning, commands = uneven()
    assert server.model() is server.store.head_params()
    commands, notes = judge(server, commands, (1.0, 0.0), FEWEST)
    assert ["calibrated" in note for note in notes] == [True]
    # It lacks 0.2 of the second class: 0.2 / (0.2 + 5 / 100), half of it, and its unevenness is 1.
    assert server.model().tolist() == pytest.approx([0.0, 0.0, -0.4, 0.4])
    assert server.use("main").output_bias == pytest.approx((-0.4, 0.4))
    assert server.store.head_params().tolist() == [0.0] * 4  # what is trained stays as it is
    assert owning.expected([0, 1], 2).tolist() == [0.5, 0.5]
    assert server.use("main").class_prior == (0.5, 0.5)
    again = uneven()[0]
    again.restore(server.state())
    assert again.model().tolist() == server.model().tolist()
    _, notes = judge(server, commands, (0.5, 0.5), FEWEST)
    assert ["stay" in note for note in notes] == [True]
    assert server.model() is server.store.head_params()


def test_half_of_it_where_that_is_wished():
    server, owning, commands = uneven(calibrate=0.5)
    judge(server, commands, (1.0, 0.0), FEWEST)
    assert server.model().tolist() == pytest.approx([0.0, 0.0, -0.2, 0.2])
    assert owning.expected([0, 1], 2).tolist() == pytest.approx([0.6, 0.4])  # half of the way, too
    server, _, commands = uneven(calibrate=0.0)
    _, notes = judge(server, commands, (1.0, 0.0), FEWEST)
    assert not notes
    assert server.model() is server.store.head_params()


def test_a_network_without_an_output_bias_stays_as_it_is():
    server, owning, commands = uneven(bias=False)
    _, notes = judge(server, commands, (1.0, 0.0), FEWEST)
    assert not notes
    assert server.model() is server.store.head_params()
    assert server.use("main").output_bias == ()
    assert owning.expected([0, 1], 2).tolist() == pytest.approx([0.7, 0.3])


def test_what_was_said_of_the_first_model_is_not_counted():
    server, owning, commands = uneven()
    judge(server, commands, (1.0, 0.0), 1)
    assert owning._judged(server) == []


def test_who_has_been_gone_for_long_is_not_counted():
    server, owning, commands = uneven()
    commands, _ = judge(server, commands, (1.0, 0.0), FEWEST)
    assert len(owning._judged(server)) == 2
    server.handle(Failed(server.working[1], "lost"), Left(1))
    rest = [c for c in commands if isinstance(c, Send) and c.task.device == 0]
    judge(server, rest, (1.0, 0.0), 7)
    assert len(owning._judged(server)) == 1


class Settling(CachedAggregation):
    """Commits once more when there is nothing left to do."""

    def settle(self, view):
        yield Commit("main", torch.tensor([9.0]), 1)


def noisy(average=True, devices=2, merge=CachedAggregation):
    owning = Personalisation(merge(1 / devices, 1.0, 0.0), 0.0, 0.0, None, average=average)
    server = Server(torch.zeros(1), Strategy(merge=owning, own=owning), TrainSpec())
    return server, server.handle(*map(Joined, range(devices)))


def shake(server, commands, deltas, noise=(9.0, 9.0), epsilon=0.0):
    """The devices say these in turn; the notes that come of it, and the last commands."""
    notes = []
    for delta in deltas:
        task = next(c.task for c in commands if isinstance(c, Send))
        update = Update(
            task.id, torch.tensor([delta]), 1, noise_std=noise[task.device], epsilon=epsilon
        )
        rest = [c for c in commands if isinstance(c, Send) and c.task is not task]
        told = server.handle(Arrived(task.device, update))
        commands, notes = [*rest, *told], [*notes, *reasons(told)]
    return commands, notes


def test_what_noise_moves_is_used_as_the_average_of_its_way():
    server, commands = noisy()
    commands, notes = shake(server, commands, (2.0, 4.0))
    assert ["average" in note for note in notes] == [True]
    assert server.store.head_params().tolist() == [3.0]  # 1, then 3: half a turn each
    assert server.model().tolist() == pytest.approx([1 + 0.8 * 2])
    assert server.model_on_devices().tolist() == [3.0]  # they are sent what is trained
    again = noisy()[0]
    again.restore(server.state())
    for each in (server, again):
        _, notes = shake(each, commands, (6.0,))
        assert not notes
        assert each.model().tolist() == pytest.approx([2.6 + 4 / 6 * (6 - 2.6)])


@pytest.mark.parametrize(("average", "noise"), [(False, (9.0, 9.0)), (True, (0.0, 0.0))])
def test_without_noise_or_wish_the_last_model_is_in_use(average, noise):
    server, commands = noisy(average)
    _, notes = shake(server, commands, (2.0, 4.0, 6.0), noise)
    assert not notes
    assert server.model() is server.store.head_params()


def test_noise_of_an_unknown_amount_is_noise():
    server, commands = noisy()
    _, notes = shake(server, commands, (2.0, 4.0), (0.0, 0.0), epsilon=1.0)
    assert ["average" in note for note in notes] == [True]


def test_what_few_claim_does_not_have_all_models_averaged():
    server, commands = noisy(devices=4)
    commands, notes = shake(server, commands, (2.0,) * 4, (9.0, 0.0, 0.0, 0.0))
    assert ["no longer" in note for note in notes] == [False, True]  # at first it was alone
    assert server.model() is server.store.head_params()
    commands, notes = shake(server, commands, (2.0,) * 4, (9.0, 9.0, 9.0, 0.0))
    assert ["no longer" in note for note in notes] == [False]
    # Half of them are fewer than most, but no reason to begin anew.
    commands, notes = shake(server, commands, (2.0,) * 4, (9.0, 9.0, 0.0, 0.0))
    assert not notes
    _, notes = shake(server, commands, (2.0,) * 4, (9.0, 0.0, 0.0, 0.0))
    assert ["no longer" in note for note in notes] == [True]


def test_no_average_is_older_than_so_many_turns():
    server, commands = noisy()
    commands, _ = shake(server, commands, (0.0,) * 400)
    shake(server, commands, (2.0,))
    assert server.model().item() == pytest.approx(0.5 / WINDOW_PASSES)  # half a turn, not 4 / 403


def test_a_last_commit_is_a_part_of_the_way():
    server, commands = noisy(merge=Settling)
    shake(server, commands, (2.0,))  # after which it settles: 1, then 9
    before = server.model().item()
    assert before != server.store.head_params().item()
    for _ in range(50):
        list(server.strategy.merge.settle(server))
    assert server.model().item() == pytest.approx(9.0, abs=0.01)


def test_a_fork_goes_on_from_the_average_and_a_union_leaves_the_other_as_it_is():
    server, commands = noisy()
    shake(server, commands, (2.0, 4.0))
    owning = server.strategy.own
    owning.on_fork("main", "child")
    owning.on_absorb("child", "main")
    assert owning._averages.get("child", torch.zeros(1)).tolist() == pytest.approx([2.6])
    assert "main" not in owning._averages


def test_errors_that_cannot_be_are_not_counted():
    server, owning, commands = begun()
    tell(server, commands, (0.1, 100.0), FEWEST)
    assert owning.keep == 0.0


def test_a_mean_soft_label_of_other_classes_is_not_counted():
    server, owning, commands = begun()
    tell(server, commands, (0.1, 0.1), 1)
    assert owning.expected([0, 1], classes=3) is None


def test_a_change_that_comes_late_does_not_take_the_place_of_a_newer_one():
    _, owning, _ = begun()
    for number, value in ((2, 0.5), (1, 9.0)):
        task = Task(number, 0, number, "main", 0, TrainSpec(), torch.zeros(1))
        update = Update(number, torch.tensor([value]), 1)
        of = Contribution(task, update, torch.zeros(1), update.delta, "main", 0)
        owning.inner = Ignore()
        owning.add(of, None)
    assert owning.change(0).tolist() == [0.5]


def test_the_change_of_who_is_gone_is_still_his():
    server, owning, commands = begun()
    tell(server, commands, (0.2, 0.2), 1)
    server.handle(Left(1))
    assert owning.change(1).tolist() == [0.5]
    assert owning.change(2) is None
    assert owning.expected([0, 1], 2).tolist() == [0.25, 0.75]
    assert owning.expected([2], 2) is None


def test_nothing_is_remembered_of_those_who_keep_nothing_or_add_noise():
    server, owning, commands = begun(keep=0.0)
    tell(server, commands, (0.2, 0.2), 1)
    assert owning.change(0) is None
    server, owning, commands = begun()
    task = next(c.task for c in commands if isinstance(c, Send))
    server.handle(Arrived(task.device, Update(task.id, torch.ones(1), 1, noise_std=1.0)))
    assert owning.change(task.device) is None


def test_a_restored_part_goes_on_as_it_was():
    server, owning, commands = begun()
    tell(server, commands, (0.1, 0.4), FEWEST)
    _, again, _ = begun()
    again.restore(owning.state())
    assert again.keep == 0.5
    assert again.state() == owning.state()
    assert again.change(0).tolist() == [0.5]
