"""The compensate slot, driven through the server and the virtual engine."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from commands import logged
from latecomer.core.codec import encode
from latecomer.core.messages import Arrived, Joined, Later, Ready, Send, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts import compensation, validation
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.inversion import (
    Effort,
    InversionTarget,
    invert,
    misfit,
    reason_not_to_invert,
    replay,
)
from latecomer.strategies.parts.merging import Epochs
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff
from latecomer.strategies.parts.weighting import by_examples
from toy import ToyRun, toy_fleet, toy_server

MODEL = flat_model("mlp", (6,), 3, (8,))
SPEC = TrainSpec(local_epochs=3, batch_size=20, lr=0.1, momentum=0.5)
COUNT = 20


class Fleet:
    """Three devices that train for real: 0 and 1 on class 0, device 2 on class 1."""

    def __init__(self, surrogates=False, networks=None, **options):
        options = {"effort": Effort(samples=8, iterations=20), "gate": "off", **options}
        compensator = InversionCompensator(**options)
        weigh = by_examples()
        absent = SurrogateUpdates(compensator, weigh) if surrogates else None
        strategy = Strategy(
            compensate=compensator,
            weigh=weigh,
            merge=Epochs(quorum=0.5, surrogates=absent),
            dispatch=AtEpochStart(),
            has_epochs=True,
        )
        networks = networks or (lambda submodel: MODEL if submodel is None else None)
        self.server = Server(MODEL.init(1), strategy, SPEC, networks=networks)
        self.compensator = self.server.strategy.compensate
        rng = torch.Generator().manual_seed(0)
        self.x = (
            torch.randn(3, COUNT, 6, generator=rng) + torch.tensor([0.0, 0.2, 1.0])[:, None, None]
        )
        self.tasks = self.sent(Joined(0), Joined(1), Joined(2))
        self.commands = []

    def sent(self, *events):
        self.commands = self.server.handle(*events)
        return {c.task.device: c.task for c in self.commands if isinstance(c, Send)}

    def delta(self, device, params):
        """The delta of the device's local training from `params`."""
        y = torch.full((COUNT,), int(device == 2))
        plan = plan_batches(COUNT, SPEC, task_rng(0, device, 0))
        return local_update(MODEL, params, self.x[device], y, SPEC, plan) - params

    def answer(self, task, **fields):
        delta = self.delta(task.device, task.params)
        return Arrived(task.device, Update(task.id, delta, COUNT, **fields))

    def epoch(self):
        """Devices 0 and 1 are on time; every idle device gets the new model."""
        self.tasks |= self.sent(self.answer(self.tasks[0]), self.answer(self.tasks[1]))

    def logged(self, kind):
        return logged(self.commands, kind)

    @property
    def gathered(self):
        """The contributions that wait for the end of the epoch."""
        return self.server.strategy.merge.state()["gathered"]

    def surrogates(self, nearest):
        """The surrogates for device 2, with this result of its last validation."""
        self.compensator.validation.nearest[2] = nearest
        return self.server.strategy.merge.surrogates("main", [0, 1], self.server)

    def ready(self):
        (later,) = [c for c in self.commands if isinstance(c, Later) and isinstance(c.event, Ready)]
        return later

    def late_update(self):
        """The update of device 2 arrives and is compensated at once."""
        self.tasks |= self.sent(self.answer(self.tasks[2]))
        self.tasks |= self.sent(self.ready().event)


def test_an_update_in_time_is_left_alone():
    fleet = Fleet()
    fleet.epoch()
    assert fleet.server.store.commits == 1
    assert not fleet.logged("compensation")


def test_a_late_update_is_replaced_by_an_estimate_for_the_present_model():
    fleet = Fleet()
    for _ in range(10):
        fleet.epoch()
    late = fleet.tasks[2]
    assert late.version == 0
    again = fleet.sent(fleet.answer(late))
    (arrival,) = fleet.logged("arrival")
    assert arrival["staleness"] == 10
    later = fleet.ready()
    assert later.seconds > 0
    assert again == {}  # the epoch is under way; the device waits for the next model
    fleet.epoch()  # the inversion runs beside it
    fleet.sent(later.event)
    (line,) = fleet.logged("compensation")
    assert line["staleness"] == 11
    assert line["gamma"] == 1.0
    assert line["weight"] == COUNT
    (compensated,) = fleet.gathered
    assert compensated.staleness == 0
    head = fleet.server.store.head_params()
    assert torch.equal(compensated.base, head)  # the present one, not that of its arrival
    fresh, stale = fleet.delta(2, head), fleet.delta(2, late.params)
    assert misfit(compensated.delta, fresh) < 0.5 * misfit(stale, fresh)


def test_the_seconds_charged_are_those_of_the_work():
    """Forward: 2 (6 * 8 + 8 * 3) = 144 operations; 9 passes, 8 samples, 3 steps, 20 iterations."""
    fleet = Fleet(gflops=1e-6)
    fleet.epoch()
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.ready().seconds == pytest.approx(144 * 9 * 8 * 3 * 20 / 1e3)


def test_without_a_speed_inversions_are_free():
    fleet = Fleet(gflops=0.0)
    fleet.epoch()
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.ready().seconds == 0.0


def test_an_estimate_that_reproduces_the_next_update_is_used_again(monkeypatch):
    fleet = Fleet(reuse=3.0)
    fleet.epoch()
    fleet.late_update()
    for _ in range(3):
        fleet.epoch()
    monkeypatch.setattr(compensation, "invert", None)  # may not be called
    fleet.sent(fleet.answer(fleet.tasks[2]))
    (line,) = fleet.logged("compensation")
    assert line["seconds"] == 0.0


def test_without_reuse_every_update_is_inverted_from_a_warm_start():
    fleet = Fleet(reuse=0.0)
    fleet.epoch()
    fleet.late_update()
    for _ in range(3):
        fleet.epoch()
    cold = Fleet()
    cold.epoch()
    cold.sent(cold.answer(cold.tasks[2]))
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.ready().seconds == pytest.approx(cold.ready().seconds * 8 / 20)


def test_waiting_updates_are_inverted_in_one_batch(monkeypatch):
    batches = []
    plain = compensation.invert
    monkeypatch.setattr(
        compensation,
        "invert",
        lambda m, sought, e: (batches.append(len(sought)), plain(m, sought, e))[1],
    )
    run = ToyRun(
        toy_server("feddc", {"gate": "off", "reuse": 0.0, "server_gflops": 1e-7}), toy_fleet()
    )
    run.until(60)
    assert max(batches) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"min_staleness": 99},
        {"min_ratio": 99.0},
        {"gate": "mean"},
        {"networks": lambda submodel: None},
    ],
)
def test_an_update_that_is_not_compensated_is_bit_for_bit_the_stale_one(options, monkeypatch):
    if options.get("gate"):
        monkeypatch.setattr(compensation, "is_unique", lambda *_: False)
    fleet = Fleet(**options)
    for _ in range(4):
        fleet.epoch()
    late = fleet.tasks[2]
    fleet.sent(fleet.answer(late))
    assert not fleet.logged("compensation")
    (gathered,) = fleet.gathered
    assert torch.equal(gathered.delta, fleet.delta(2, late.params))
    assert gathered.staleness == 4


def test_once_switched_off_it_is_bit_for_bit_the_stale_update():
    switch = SwitchOff(decay=0.0)
    switch.record("main", 2, 0, 2.0, 1.0)
    switch.decide("main", 0)
    fleet = Fleet(switch=switch)
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.sent(fleet.answer(late))
    (gathered,) = fleet.gathered
    assert torch.equal(gathered.delta, fleet.delta(2, late.params))


def test_while_it_fades_estimate_and_stale_update_are_mixed(monkeypatch):
    fleet = Fleet()
    monkeypatch.setattr(fleet.compensator.validation.switch, "gamma", lambda *_: 0.25)
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_update()
    (gathered,) = fleet.gathered
    head = fleet.server.store.head_params()
    fresh = replay(MODEL, head, fleet.compensator.last[2].estimate)
    expected = 0.25 * fresh + 0.75 * fleet.delta(2, late.params)
    assert torch.allclose(gathered.delta, expected, atol=1e-6)


def test_the_next_update_of_the_device_validates_the_estimate():
    fleet = Fleet()
    for _ in range(5):
        fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_update()
    fleet.epoch()  # device 2 is sent the model that its estimate was merged into
    next_task = fleet.tasks[2]
    for _ in range(2):
        fleet.epoch()
    fleet.sent(fleet.answer(next_task))
    (line,) = fleet.logged("validation")
    fresh = fleet.delta(2, next_task.params)
    stale = (fleet.delta(2, late.params) - fresh).abs().mean().item()
    assert line["gap"] == 1
    assert line["error_stale"] == pytest.approx(stale, rel=1e-5)
    assert line["error_estimate"] < line["error_stale"]
    assert not fleet.logged("switch")


def test_an_estimate_worse_than_the_stale_update_switches_it_off(monkeypatch):
    fleet = Fleet()
    fleet.epoch()
    fleet.late_update()
    fleet.epoch()
    monkeypatch.setattr(validation, "replay", lambda m, p, e: torch.full_like(p, 9.0))
    next_task = fleet.tasks[2]
    fleet.epoch()
    fleet.sent(fleet.answer(next_task))
    (switch,) = fleet.logged("switch")
    assert switch["error_estimate"] > switch["error_stale"]
    assert "compensation ends" in switch["reason"]
    assert "below" not in switch
    assert fleet.compensator.validation.nearest[2] == "stale"


def test_far_staler_updates_are_compensated_after_it_has_ended_for_others(monkeypatch):
    """Device 2 is validated at a staleness of 1: only updates from 2 on are still compensated."""
    fleet = Fleet(switch=SwitchOff(decay=0.0, exemption=2.0), surrogates=True)
    fleet.epoch()
    fleet.late_update()
    fleet.epoch()
    next_task = fleet.tasks[2]
    with monkeypatch.context() as patch:
        patch.setattr(validation, "replay", lambda m, p, e: torch.full_like(p, 9.0))
        fleet.epoch()
        fleet.tasks |= fleet.sent(fleet.answer(next_task))
    (switch,) = fleet.logged("switch")
    assert "compensation of updates less than 2 commits stale ends" in switch["reason"]
    assert switch["below"] == 2.0
    fleet.tasks |= fleet.sent(fleet.ready().event)  # its inversion had begun before
    (line,) = fleet.logged("compensation")
    assert line["gamma"] == 0.0
    assert fleet.compensator.last[2].staleness == 1
    (gathered,) = fleet.gathered
    assert torch.equal(gathered.delta, fleet.delta(2, next_task.params))
    fleet.epoch()
    late = fleet.tasks[2]
    (surrogate,) = fleet.surrogates(nearest="estimate")
    assert torch.equal(surrogate.delta, fleet.compensator.last[2].delta)  # the last delta again
    assert torch.equal(surrogate.base, next_task.params)
    last = fleet.compensator.last
    last[2] = replace(last[2], noise_std=0.5)
    (surrogate,) = fleet.surrogates(nearest="stale")
    assert surrogate.update.noise_std == 0.5  # with its noise
    last[2] = replace(last[2], noise_std=0.0)
    for _ in range(3):
        fleet.epoch()
    fleet.tasks |= fleet.sent(fleet.answer(late))
    if not fleet.logged("compensation"):
        fleet.sent(fleet.ready().event)
    (line,) = fleet.logged("compensation")
    assert (line["gamma"], line["staleness"]) == (1.0, 3)
    assert fleet.compensator.last[2].staleness == 3


def test_an_update_that_cannot_be_inverted_is_kept_stale(monkeypatch):
    fleet = Fleet()
    plain = compensation.invert
    monkeypatch.setattr(compensation, "invert", lambda *a: [replace(e, fit=1.5) for e in plain(*a)])
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_update()
    (line,) = fleet.logged("compensation")
    assert line["gamma"] == 0.0
    (gathered,) = fleet.gathered
    assert torch.equal(gathered.delta, fleet.delta(2, late.params))
    assert fleet.compensator.last == {}


@pytest.mark.parametrize(("fit", "used"), [(0.39, True), (0.41, False)])
def test_estimates_above_the_largest_misfit_end_the_inversions_of_a_device(fit, used, monkeypatch):
    fleet = Fleet(max_misfit=0.4)
    plain = compensation.invert
    monkeypatch.setattr(compensation, "invert", lambda *a: [replace(e, fit=fit) for e in plain(*a)])
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_update()
    (line,) = fleet.logged("compensation")
    assert line["gamma"] == float(used)
    (gathered,) = fleet.gathered
    assert torch.equal(gathered.delta, fleet.delta(2, late.params)) is not used
    for _ in range(2):
        fleet.epoch()
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.server.strategy.compensate.state()["given_up"] == (set() if used else {2})
    inverted = [c for c in fleet.commands if isinstance(c, Later) and isinstance(c.event, Ready)]
    assert bool(inverted or fleet.logged("compensation")) is used


def test_a_device_that_is_not_inverted_any_more_gets_no_surrogates(monkeypatch):
    fleet = Fleet(max_misfit=0.4, reuse=0.0, surrogates=True)
    plain, fits = compensation.invert, [0.1, 0.9]
    monkeypatch.setattr(
        compensation, "invert", lambda *a: [replace(e, fit=fits.pop(0)) for e in plain(*a)]
    )
    for known in ({2}, set()):
        fleet.epoch()
        fleet.epoch()
        fleet.late_update()
        assert set(fleet.compensator.last) == known
    assert not fits
    fleet.epoch()
    assert not fleet.surrogates(nearest="estimate")


def test_an_absent_device_has_a_surrogate():
    fleet = Fleet(surrogates=True)
    fleet.epoch()
    fleet.late_update()
    fleet.epoch()
    (commit,) = fleet.logged("commit")
    assert "surrogates" not in commit  # it has an update of its own in this epoch
    assert fleet.tasks[2].version == 2
    head = fleet.server.store.head_params().clone()
    fleet.epoch()
    (commit,) = fleet.logged("commit")
    assert (commit["updates"], commit["surrogates"]) == (2, 1)
    surrogate = replay(MODEL, head, fleet.compensator.last[2].estimate)
    expected = head + (fleet.delta(0, head) + fleet.delta(1, head) + surrogate) / 3
    assert torch.allclose(fleet.server.store.head_params(), expected, atol=1e-6)


def test_a_surrogate_worse_than_none_is_not_used():
    fleet = Fleet(surrogates=True)
    fleet.epoch()
    fleet.late_update()
    fleet.epoch()
    fleet.compensator.validation.nearest[2] = "zero"
    for _ in range(3):
        fleet.epoch()
        assert "surrogates" not in fleet.logged("commit")[0]


@pytest.mark.parametrize("switched", [True, False])
def test_a_surrogate_worse_than_the_last_delta_repeats_it(switched, monkeypatch):
    fleet = Fleet(surrogates=True)
    fleet.epoch()
    delta = fleet.delta(2, fleet.tasks[2].params)
    fleet.late_update()
    fleet.epoch()
    if switched:
        monkeypatch.setattr(fleet.compensator.validation.switch, "gamma", lambda *_: 0.0)
    else:
        fleet.compensator.validation.nearest[2] = "stale"
    head = fleet.server.store.head_params().clone()
    fleet.epoch()
    expected = head + (fleet.delta(0, head) + fleet.delta(1, head) + delta) / 3
    assert torch.allclose(fleet.server.store.head_params(), expected, atol=1e-6)


def test_surrogates_end_for_a_device_that_never_comes_back():
    fleet = Fleet(surrogates=True)
    for _ in range(3):
        fleet.epoch()
    fleet.late_update()
    fleet.epoch()
    counts = []
    for _ in range(20):
        fleet.epoch()
        counts.append(fleet.logged("commit")[0].get("surrogates", 0))
    # It had been away for 3 epochs: after twice as many it has no surrogate.
    assert counts == [1] * 7 + [0] * 13


def test_updates_of_a_device_that_is_being_inverted_share_the_result():
    run = ToyRun(
        toy_server("feddc", {"gate": "off", "reuse": 0.0, "server_gflops": 1e-9}), toy_fleet()
    )
    run.until(300)
    state = run.server.strategy.compensate.state()
    charged = [seconds for seconds in state["cost"].values() if seconds]
    assert len(charged) <= len({c.task.device for c in state["waiting"].values()}) <= 5


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.inner(x.unflatten(1, (1, 6))).flatten(1))


def test_attention_can_be_inverted():
    model = FlatModel(Attentive, (6,), 3)
    base = model.init(0)
    sought = InversionTarget(base, 0.01 * torch.ones_like(base), SPEC, COUNT, seed=0)
    (found,) = invert(model, [sought], Effort(samples=2, iterations=2))
    assert found.fit < 2.0


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Stubborn(nn.Linear):
    """Trains well, but its training cannot be transformed by torch.func."""

    def forward(self, x):
        return super().forward(OneWay.apply(x))


def test_a_network_that_cannot_be_inverted_is_logged_once():
    stubborn = FlatModel(lambda: nn.Sequential(Stubborn(6, 3)), (6,), 3)
    assert "cannot be differentiated" in reason_not_to_invert(stubborn)
    fleet = Fleet(networks=lambda submodel: stubborn)
    fleet.epoch()
    (line,) = fleet.logged("switch")
    assert "cannot be differentiated" in line["reason"]
    fleet.epoch()
    assert not fleet.logged("switch")


def test_a_sub_model_is_compensated_in_its_own_coordinates():
    """Devices with half of the network: the server runs that half, and moves nothing else."""
    half = flat_model("mlp", (6,), 3, (8,), width=0.5)
    whole = torch.arange(MODEL.layout.size)
    spans = [whole[MODEL.layout.span(name)] for name in MODEL.layout.names]
    index = torch.cat(
        [
            spans[0].view(8, 6)[:4].reshape(-1),
            spans[1][:4],
            spans[2].view(3, 8)[:, :4].reshape(-1),
            spans[3],
        ]
    )
    submodel = Submodel("half", index)
    fleet = Fleet(networks=lambda s: MODEL if s is None else half)
    server = fleet.server
    server.handle(Joined(2, submodel))
    fleet.epoch()
    fleet.tasks |= fleet.sent(Joined(2, submodel))
    task = fleet.tasks[2]
    assert task.params.numel() == half.layout.size
    for _ in range(5):
        fleet.epoch()

    def delta(params):
        y = torch.ones(COUNT, dtype=torch.int64)
        plan = plan_batches(COUNT, SPEC, task_rng(0, 2, 0))
        return local_update(half, params, fleet.x[2], y, SPEC, plan) - params

    stale = delta(task.params)
    fleet.sent(Arrived(2, Update(task.id, stale, COUNT)))
    fleet.sent(fleet.ready().event)
    (compensated,) = fleet.gathered
    fresh = delta(submodel.take(server.store.head_params()))
    assert misfit(compensated.delta, fresh) < 0.7 * misfit(stale, fresh)


@pytest.mark.parametrize("name", ["feddc", "feddc-fedasync", "feddc-fedbuff"])
def test_resume_with_a_compensation_in_flight(name):
    def fresh():
        more = {"surrogates": True} if name == "feddc" else {"min_ratio": 0.0}
        options = {"gate": "off", "server_gflops": 1e-7, **more}
        return ToyRun(toy_server(name, options), toy_fleet())

    def in_flight(run):
        return any(isinstance(item, Ready) for _, _, item in run.engine.state()["heap"])

    whole, first = fresh(), fresh()
    after = 0
    while not (after > 10 and in_flight(first)):
        after += 1
        first.until(after)
        whole.until(after)
        assert after < 60
    second = first.carried_over(fresh())
    second.until(100)
    whole.until(100)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()
    assert whole.lines("compensation")


def test_estimates_can_be_left_out_of_checkpoints():
    run = ToyRun(toy_server("feddc", {"gate": "off", "save_estimates": False}), toy_fleet())
    run.until(60)
    assert run.server.strategy.compensate.last
    tree, _ = encode(run.server.state())
    text = json.dumps(tree)
    assert '"Estimate"' not in text
    second = ToyRun(toy_server("feddc", {"gate": "off", "save_estimates": False}), toy_fleet())
    second.server.restore(run.server.state())
    second.engine.restore(run.engine.state())
    second.until(100)
    assert second.server.accepted == 100
