"""The staleness that a compensated update is weighed with, in an asynchronous fleet."""

import pytest
import torch

from latecomer.core.messages import Arrived, Failed, Joined, Later, Ready, Send, TrainSpec, Update
from latecomer.core.outcomes import Note
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.device.flat import flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff

MODEL = flat_model("mlp", (4,), 2, (3,))
SPEC = TrainSpec(local_epochs=2, batch_size=8, lr=0.1)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LATE = 3  # the device


class Fixed(SwitchOff):
    """Always the same share of the estimate."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def gamma(self, lineage, commits, staleness):
        return self.share


class Fleet:
    """Devices 0 to 2 send one update after another, device 3 none: each update is a commit."""

    def __init__(self, networks=lambda submodel: MODEL, **options):
        self.weighed = weighed = []

        def weigh(contribution, view):
            weighed.append(contribution.staleness)
            return 0.1

        effort = Effort(samples=8, iterations=20)
        compensator = InversionCompensator(
            effort, gflops=0.0, **{"min_staleness": 5, "gate": "off", **options}
        )
        strategy = Strategy(compensate=compensator, weigh=weigh)
        self.server = Server(MODEL.init(1), strategy, SPEC, networks=networks)
        self.tasks, self.notes = {}, []
        self.handle(*map(Joined, range(4)))

    def handle(self, *events):
        for command in self.server.handle(*events):
            if isinstance(command, Send):
                self.tasks[command.task.device] = command.task
            elif isinstance(command, Note):
                self.notes.append(command)
            elif isinstance(command, Later) and isinstance(command.event, Ready):
                self.handle(command.event)

    def answer(self, device, label):
        task = self.tasks[device]
        plan = plan_batches(len(X), SPEC, task_rng(0, 0, 0))
        y = torch.full((len(X),), label)
        trained = local_update(MODEL, task.params, X, y, SPEC, plan)
        self.handle(Arrived(device, Update(task.id, trained - task.params, len(X))))

    def answers_in_time(self):
        """Nine updates, of which the first has a staleness of 0, the second of 1, all others 2."""
        for number in range(9):
            self.answer(number % 3, label=0)
        assert self.weighed == [0, 1, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("share", "staleness"), [(1.0, 2), (0.5, 5), (0.0, 9)])
def test_a_compensated_update_is_as_stale_as_its_share_of_the_mean(share, staleness):
    fleet = Fleet(switch=Fixed(share))
    fleet.answers_in_time()
    fleet.answer(LATE, label=1)
    # round(share * 15 / 9 + (1 - share) * 9): the mean of those in time, and its own
    assert fleet.weighed[9:] == [staleness]


@pytest.mark.parametrize(("label", "staleness"), [(0, 9), (1, 2)])
def test_only_an_update_unlike_those_in_time_is_compensated(label, staleness):
    fleet = Fleet(gate="nearest")
    fleet.answers_in_time()
    fleet.answer(LATE, label)
    assert fleet.weighed[9:] == [staleness]


def test_with_a_ratio_updates_are_late_after_two_updates_per_device():
    """Of four devices: after 8 updates, with a mean staleness of 13 / 8."""
    for seen, staleness in ((7, 7), (8, 2)):
        fleet = Fleet(switch=Fixed(1.0), min_staleness=3, min_ratio=2.0)
        for number in range(seen):
            fleet.answer(number % 3, label=0)
        fleet.answer(LATE, label=1)
        assert fleet.weighed[seen:] == [staleness]


def test_the_last_update_is_kept_while_compensation_is_switched_off():
    fleet = Fleet(switch=Fixed(1.0))
    fleet.answers_in_time()
    fleet.answer(LATE, label=1)
    compensator = fleet.server.strategy.compensate
    first = compensator.last[LATE]
    compensator.validation.switch.share = 0.0
    task = fleet.tasks[LATE]
    for number in range(6):
        fleet.answer(number % 3, label=0)
    fleet.answer(LATE, label=1)
    second = compensator.last[LATE]
    assert (first.staleness, second.staleness) == (9, 7)  # its own commit and six others
    assert torch.equal(second.base, task.params)
    assert not torch.equal(second.delta, first.delta)
    assert second.estimate is first.estimate


@pytest.mark.parametrize("present", [[], [0], [LATE]])
def test_a_device_at_work_that_has_no_update_in_the_commit_gets_a_surrogate(present):
    fleet = Fleet(switch=Fixed(1.0))
    fleet.answers_in_time()
    fleet.answer(LATE, label=1)
    surrogates = SurrogateUpdates(fleet.server.strategy.compensate, lambda surrogate, view: 7.0)
    found = surrogates("main", present, fleet.server)
    assert [(c.task.device, c.weight) for c in found] == [(LATE, 7.0)] * (LATE not in present)
    fleet.handle(Failed(fleet.tasks[LATE].id, "lost"))
    assert surrogates("main", present, fleet.server) == []


def test_a_server_without_a_network_compensates_nothing_and_logs_it_once():
    fleet = Fleet(networks=lambda submodel: None)
    fleet.answers_in_time()
    fleet.answer(LATE, label=1)
    assert fleet.weighed[9:] == [9]
    (note,) = fleet.notes
    assert "no network" in dict(note.fields)["reason"]
