"""The staleness that a compensated update is weighed with, in an asynchronous fleet."""

import pytest
import torch

from latecomer.core.messages import Arrived, Joined, Later, Ready, Send, TrainSpec, Update
from latecomer.core.outcomes import Note
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.device.flat import flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.inversion import Effort
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
            effort, min_staleness=5, gflops=0.0, **{"gate": "off", **options}
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


def test_a_server_without_a_network_compensates_nothing_and_logs_it_once():
    fleet = Fleet(networks=lambda submodel: None)
    fleet.answers_in_time()
    fleet.answer(LATE, label=1)
    assert fleet.weighed[9:] == [9]
    (note,) = fleet.notes
    assert "no network" in dict(note.fields)["reason"]
