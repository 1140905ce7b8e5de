"""The average over commits that is deployed where most devices add privacy noise."""

import pytest
import torch
from latecomer.strategies.latecomer.model_averaging import (
    WINDOW_PASSES,
    ModelAveraging,
    newest_weight,
)
from latecomer.strategies.latecomer.personalisation import Personalisation

from commands import logged, sends
from latecomer.core.codec import decode, encode
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Commit, Strategy
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation


def test_weights_by_hand():
    assert [newest_weight(n, 0.0) for n in (1, 2, 5)] == [1.0, 4 / 5, 4 / 8]
    # Models older than the window are forgotten.
    assert newest_weight(10**6, 0.1) == 0.1 / WINDOW_PASSES
    assert newest_weight(10**6, 10 * WINDOW_PASSES) == 1.0


def test_the_average_of_noisy_models_is_nearer_than_the_last():
    draw, mean = torch.Generator().manual_seed(0), torch.zeros(100)
    for commit in range(1, 401):
        mean = mean.lerp(torch.randn(100, generator=draw), newest_weight(commit, 0.1))
    # White noise: weights of about g leave g / (2 - g) of its variance.
    assert mean.square().mean().item() == pytest.approx(newest_weight(400, 0.1) / 2, rel=0.5)


class CommitsAgain(CachedAggregation):
    """Makes a further commit after all events of a moment."""

    def settle(self, view):
        yield Commit("main", torch.tensor([9.0]), 1)


def averaging_server(average=True, devices=2, merge=CachedAggregation):
    averaging = ModelAveraging() if average else None
    serving = Personalisation(0.0, 0.0, None, averaging)
    strategy = Strategy(
        merge=merge(1 / devices, 1.0, 0.0),
        observers=(averaging, serving) if averaging else (serving,),
    )
    server = Server(torch.zeros(1), strategy, TrainSpec())
    return server, sends(server.handle(*map(Joined, range(devices))))


def answer(server, tasks, deltas, noise=(9.0, 9.0), epsilon=0.0):
    """One device after the other sends a delta; the open tasks, and the reasons logged."""
    reasons = []
    for delta in deltas:
        task, *rest = tasks
        update = Update(
            task.id, torch.tensor([delta]), 1, noise_std=noise[task.device], epsilon=epsilon
        )
        commands = server.handle(Arrived(task.device, update))
        tasks = [*rest, *sends(commands)]
        reasons += [fields["reason"] for fields in logged(commands, "switch")]
    return tasks, reasons


def test_the_average_is_deployed_and_the_last_model_is_trained():
    server, tasks = averaging_server()
    tasks, reasons = answer(server, tasks, (2.0, 4.0))
    assert ["average" in reason for reason in reasons] == [True]
    assert server.store.head_params().tolist() == [3.0]  # 1, then 3: half a fleet pass each
    assert server.model().tolist() == pytest.approx([1 + 0.8 * 2])
    assert server.model_on_devices().tolist() == [3.0]
    again, _ = averaging_server()
    again.restore(decode(*encode(server.state())))
    for each in (server, again):
        _, reasons = answer(each, tasks, (6.0,))
        assert not reasons
        assert each.model().tolist() == pytest.approx([2.6 + 4 / 6 * (6 - 2.6)])


@pytest.mark.parametrize(("average", "noise"), [(False, (9.0, 9.0)), (True, (0.0, 0.0))])
def test_without_noise_or_averaging_the_last_model_is_deployed(average, noise):
    server, tasks = averaging_server(average)
    _, reasons = answer(server, tasks, (2.0, 4.0, 6.0), noise)
    assert not reasons
    assert server.model() is server.store.head_params()


def test_noise_of_an_unknown_standard_deviation_counts():
    server, tasks = averaging_server()
    _, reasons = answer(server, tasks, (2.0, 4.0), (0.0, 0.0), epsilon=1.0)
    assert ["average" in reason for reason in reasons] == [True]


def test_the_share_of_noisy_devices_decides():
    server, tasks = averaging_server(devices=4)
    tasks, reasons = answer(server, tasks, (2.0,) * 4, (9.0, 0.0, 0.0, 0.0))
    assert ["few" in reason for reason in reasons] == [False, True]  # the first was the only one
    assert server.model() is server.store.head_params()
    tasks, reasons = answer(server, tasks, (2.0,) * 4, (9.0, 9.0, 9.0, 0.0))
    assert ["few" in reason for reason in reasons] == [False]
    # Half of them do not begin it, and do not end it.
    tasks, reasons = answer(server, tasks, (2.0,) * 4, (9.0, 9.0, 0.0, 0.0))
    assert not reasons
    _, reasons = answer(server, tasks, (2.0,) * 4, (9.0, 0.0, 0.0, 0.0))
    assert ["few" in reason for reason in reasons] == [True]


def test_the_average_has_a_largest_age():
    server, tasks = averaging_server()
    tasks, _ = answer(server, tasks, (0.0,) * 400)
    answer(server, tasks, (2.0,))
    # A commit is half a fleet pass; 4 / 403 without the window.
    assert server.model().item() == pytest.approx(0.5 / WINDOW_PASSES)


def test_commits_at_the_end_of_a_moment_are_averaged():
    server, tasks = averaging_server(merge=CommitsAgain)
    answer(server, tasks, (2.0,))  # from 9 to 10, then back to 9
    assert server.model().item() == pytest.approx(10 - 0.8)
    assert server.store.head_params().item() == 9.0


def test_a_fork_inherits_the_average_and_an_absorbed_lineage_loses_it():
    server, tasks = averaging_server()
    answer(server, tasks, (2.0, 4.0))
    server.fork("main", "child")
    assert server.model("child").tolist() == pytest.approx([2.6])
    server.absorb("child", "main")
    assert server.model("child").tolist() == pytest.approx([2.6])
    (averaging, _) = server.strategy.observers
    assert averaging.average("main", torch.tensor([7.0])).item() == 7.0
