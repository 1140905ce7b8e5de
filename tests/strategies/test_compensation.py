"""The compensate slot, driven through the server and the virtual engine."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.codec import encode
from latecomer.core.messages import Arrived, Joined, Later, Ready, Send, TrainSpec, Update
from latecomer.core.outcomes import Note, Outcome
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts import compensation
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.inversion import (
    Effort,
    Sought,
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
        self.compensator = InversionCompensator(**options)
        weigh = by_examples()
        speak = SurrogateUpdates(self.compensator, weigh) if surrogates else None
        strategy = Strategy(
            compensate=self.compensator,
            weigh=weigh,
            merge=Epochs(quorum=0.5, surrogates=speak),
            dispatch=AtEpochStart(),
            has_epochs=True,
        )
        networks = networks or (lambda submodel: MODEL if submodel is None else None)
        self.server = Server(MODEL.init(1), strategy, SPEC, networks=networks)
        rng = torch.Generator().manual_seed(0)
        self.x = (
            torch.randn(3, COUNT, 6, generator=rng) + torch.tensor([0.0, 0.2, 1.0])[:, None, None]
        )
        self.tasks = self.sent(Joined(0), Joined(1), Joined(2))
        self.commands = []

    def sent(self, *events):
        self.commands = self.server.handle(*events)
        return {c.task.device: c.task for c in self.commands if isinstance(c, Send)}

    def truth(self, device, params):
        y = torch.full((COUNT,), int(device == 2))
        plan = plan_batches(COUNT, SPEC, task_rng(0, device, 0))
        return local_update(MODEL, params, self.x[device], y, SPEC, plan) - params

    def answer(self, task, **fields):
        return Arrived(
            task.device, Update(task.id, self.truth(task.device, task.params), COUNT, **fields)
        )

    def epoch(self):
        """Devices 0 and 1 are on time; whoever else is free gets the new model too."""
        self.tasks |= self.sent(self.answer(self.tasks[0]), self.answer(self.tasks[1]))

    def notes(self, kind):
        return [
            dict(c.fields)
            for c in self.commands
            if isinstance(c, Outcome | Note) and c.kind == kind
        ]

    def ready(self):
        (later,) = [c for c in self.commands if isinstance(c, Later) and isinstance(c.event, Ready)]
        return later

    def late_word(self):
        """Device 2 comes in with what it was sent, and its repair ends at once."""
        self.tasks |= self.sent(self.answer(self.tasks[2]))
        self.tasks |= self.sent(self.ready().event)


def test_an_update_in_time_is_left_alone():
    fleet = Fleet()
    fleet.epoch()
    assert fleet.server.store.commits == 1
    assert not fleet.notes("compensation")


def test_a_late_update_becomes_what_the_device_would_send_now():
    fleet = Fleet()
    for _ in range(10):
        fleet.epoch()
    late = fleet.tasks[2]
    assert late.version == 0
    again = fleet.sent(fleet.answer(late))
    (arrival,) = fleet.notes("arrival")
    assert arrival["staleness"] == 10
    later = fleet.ready()
    assert later.seconds > 0
    assert again == {}  # the epoch is under way; the device waits for the next model
    fleet.epoch()  # the inversion runs beside it
    fleet.sent(later.event)
    (line,) = fleet.notes("compensation")
    assert line["staleness"] == 11
    assert line["gamma"] == 1.0
    assert line["weight"] == COUNT
    (repaired,) = fleet.server.strategy.merge._gathered
    assert repaired.staleness == 0
    head = fleet.server.store.head_params()
    assert torch.equal(repaired.base, head)  # today's, not that of its arrival
    truth, stale = fleet.truth(2, head), fleet.truth(2, late.params)
    assert misfit(repaired.delta, truth) < 0.5 * misfit(stale, truth)


def test_the_cost_is_what_the_work_takes():
    """Forward: 2 (6 * 8 + 8 * 3) = 144 operations; 9 passes, 8 samples, 3 steps, 20 iterations."""
    fleet = Fleet(gflops=1e-6)
    fleet.epoch()
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.ready().seconds == pytest.approx(144 * 9 * 8 * 3 * 20 / 1e3)


def test_a_server_that_computes_for_nothing():
    fleet = Fleet(gflops=0.0)
    fleet.epoch()
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.ready().seconds == 0.0


def test_what_is_known_of_a_device_is_used_again(monkeypatch):
    fleet = Fleet(reuse=3.0)
    fleet.epoch()
    fleet.late_word()
    for _ in range(3):
        fleet.epoch()
    monkeypatch.setattr(compensation, "invert", None)  # may not be called
    fleet.sent(fleet.answer(fleet.tasks[2]))
    (line,) = fleet.notes("compensation")
    assert line["seconds"] == 0.0


def test_without_reuse_every_update_is_inverted_from_a_warm_start():
    fleet = Fleet(reuse=0.0)
    fleet.epoch()
    fleet.late_word()
    for _ in range(3):
        fleet.epoch()
    cold = Fleet()
    cold.epoch()
    cold.sent(cold.answer(cold.tasks[2]))
    fleet.sent(fleet.answer(fleet.tasks[2]))
    assert fleet.ready().seconds == pytest.approx(cold.ready().seconds * 8 / 20)


def test_all_that_wait_are_inverted_together(monkeypatch):
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
def test_what_is_not_repaired_is_bit_for_bit_the_stale_update(options, monkeypatch):
    if options.get("gate"):
        monkeypatch.setattr(compensation, "is_unique", lambda *_: False)
    fleet = Fleet(**options)
    for _ in range(4):
        fleet.epoch()
    late = fleet.tasks[2]
    fleet.sent(fleet.answer(late))
    assert not fleet.notes("compensation")
    (gathered,) = fleet.server.strategy.merge._gathered
    assert torch.equal(gathered.delta, fleet.truth(2, late.params))
    assert gathered.staleness == 4


def test_once_switched_off_it_is_bit_for_bit_the_stale_update():
    switch = SwitchOff(decay=0.0)
    switch.judge("main", 2, 0, 2.0, 1.0)
    switch.decide("main", 0)
    fleet = Fleet(switch=switch)
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.sent(fleet.answer(late))
    (gathered,) = fleet.server.strategy.merge._gathered
    assert torch.equal(gathered.delta, fleet.truth(2, late.params))


def test_while_it_fades_estimate_and_stale_update_are_mixed(monkeypatch):
    fleet = Fleet()
    monkeypatch.setattr(fleet.compensator.judge.switch, "gamma", lambda *_: 0.25)
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_word()
    (gathered,) = fleet.server.strategy.merge._gathered
    head = fleet.server.store.head_params()
    (fresh,) = replay(MODEL, head, [fleet.compensator.known[2].estimate])
    expected = 0.25 * fresh + 0.75 * fleet.truth(2, late.params)
    assert torch.allclose(gathered.delta, expected, atol=1e-6)


def test_the_next_update_of_the_device_judges_the_estimate():
    fleet = Fleet()
    for _ in range(5):
        fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_word()
    fleet.epoch()  # device 2 is sent the model that its estimate was merged into
    truth_task = fleet.tasks[2]
    for _ in range(2):
        fleet.epoch()
    fleet.sent(fleet.answer(truth_task))
    (judgement,) = fleet.notes("judgement")
    truth = fleet.truth(2, truth_task.params)
    stale = (fleet.truth(2, late.params) - truth).abs().mean().item()
    assert judgement["gap"] == 1
    assert judgement["error_stale"] == pytest.approx(stale, rel=1e-5)
    assert judgement["error_estimate"] < judgement["error_stale"]
    assert not fleet.notes("switch")


def test_an_estimate_worse_than_the_stale_update_switches_it_off(monkeypatch):
    from latecomer.strategies import judging

    fleet = Fleet()
    fleet.epoch()
    fleet.late_word()
    fleet.epoch()
    monkeypatch.setattr(judging, "replay", lambda m, p, e: [torch.full_like(p, 9.0)])
    truth_task = fleet.tasks[2]
    fleet.epoch()
    fleet.sent(fleet.answer(truth_task))
    (switch,) = fleet.notes("switch")
    assert switch["error_estimate"] > switch["error_stale"]
    assert "repair ends" in switch["reason"]
    assert switch["below"] is None
    assert fleet.compensator.judge.verdicts[2] == "word"


def test_who_is_far_later_is_repaired_when_it_has_ended_for_others(monkeypatch):
    """Device 2 is judged at a staleness of 1: from 2 on updates are repaired, not before."""
    from latecomer.strategies import judging

    fleet = Fleet(switch=SwitchOff(decay=0.0, spare=2.0), surrogates=True)
    fleet.epoch()
    fleet.late_word()
    fleet.epoch()
    with monkeypatch.context() as patch:
        patch.setattr(judging, "replay", lambda m, p, e: [torch.full_like(p, 9.0)])
        truth_task = fleet.tasks[2]
        fleet.epoch()
        fleet.tasks |= fleet.sent(fleet.answer(truth_task))
    (switch,) = fleet.notes("switch")
    assert "repair of what is less than 2 stale ends" in switch["reason"]
    assert switch["below"] == 2.0
    fleet.tasks |= fleet.sent(fleet.ready().event)  # it had begun before that was known
    (line,) = fleet.notes("compensation")
    assert line["gamma"] == 0.0
    assert fleet.compensator.known[2].staleness == 1
    (gathered,) = fleet.server.strategy.merge._gathered
    assert torch.equal(gathered.delta, fleet.truth(2, truth_task.params))  # it was 1 stale
    (other,) = _stand_ins(fleet, verdict="estimate")
    assert torch.equal(other.delta, fleet.compensator.known[2].word)  # which repeats an old word
    assert torch.equal(other.base, truth_task.params)
    known = fleet.compensator.known
    known[2] = replace(known[2], noise_std=0.5)
    (other,) = _stand_ins(fleet, verdict="word")
    assert other.update.noise_std == 0.5  # of a word that is repeated, its noise is too
    known[2] = replace(known[2], noise_std=0.0)
    late = fleet.tasks[2] if 2 in fleet.server.working else None
    for _ in range(3):
        fleet.epoch()
        late = late or fleet.tasks[2]
    fleet.tasks |= fleet.sent(fleet.answer(late))
    if not fleet.notes("compensation"):
        fleet.sent(fleet.ready().event)
    (line,) = fleet.notes("compensation")
    assert (line["gamma"], line["staleness"] >= 2) == (1.0, True)
    assert fleet.compensator.known[2].staleness >= 2


def _stand_ins(fleet, verdict):
    """What would be said for device 2, if it were away now."""
    server, task = fleet.server, fleet.tasks[2]
    fleet.compensator.judge.verdicts[2] = verdict
    speak = server.strategy.merge.surrogates
    head = server.store.head_params()
    found = speak._words([task], [head], "main", server)
    return [speak._contribution(task, *says, "main", server) for says in found]


def test_an_update_that_cannot_be_explained_counts_as_it_is(monkeypatch):
    fleet = Fleet()
    plain = compensation.invert
    monkeypatch.setattr(compensation, "invert", lambda *a: [replace(e, fit=1.5) for e in plain(*a)])
    fleet.epoch()
    late = fleet.tasks[2]
    fleet.late_word()
    (line,) = fleet.notes("compensation")
    assert line["gamma"] == 0.0
    (gathered,) = fleet.server.strategy.merge._gathered
    assert torch.equal(gathered.delta, fleet.truth(2, late.params))
    assert fleet.compensator.known == {}


def test_a_device_that_is_away_has_a_stand_in():
    fleet = Fleet(surrogates=True)
    fleet.epoch()
    fleet.late_word()
    fleet.epoch()
    (commit,) = fleet.notes("commit")
    assert "surrogates" not in commit  # it has a word of its own in this epoch
    assert fleet.tasks[2].version == 2
    head = fleet.server.store.head_params().clone()
    fleet.epoch()
    (commit,) = fleet.notes("commit")
    assert (commit["updates"], commit["surrogates"]) == (2, 1)
    (surrogates,) = replay(MODEL, head, [fleet.compensator.known[2].estimate])
    expected = head + (fleet.truth(0, head) + fleet.truth(1, head) + surrogates) / 3
    assert torch.allclose(fleet.server.store.head_params(), expected, atol=1e-6)


def test_a_stand_in_that_failed_is_silent():
    fleet = Fleet(surrogates=True)
    fleet.epoch()
    fleet.late_word()
    fleet.epoch()
    fleet.compensator.judge.verdicts[2] = "silence"
    for _ in range(3):
        fleet.epoch()
        assert "surrogates" not in fleet.notes("commit")[0]


@pytest.mark.parametrize("switched", [True, False])
def test_a_stand_in_that_lost_to_the_devices_last_word_repeats_that(switched, monkeypatch):
    fleet = Fleet(surrogates=True)
    fleet.epoch()
    word = fleet.truth(2, fleet.tasks[2].params)
    fleet.late_word()
    fleet.epoch()
    if switched:
        monkeypatch.setattr(fleet.compensator.judge.switch, "gamma", lambda *_: 0.0)
    else:
        fleet.compensator.judge.verdicts[2] = "word"
    head = fleet.server.store.head_params().clone()
    fleet.epoch()
    expected = head + (fleet.truth(0, head) + fleet.truth(1, head) + word) / 3
    assert torch.allclose(fleet.server.store.head_params(), expected, atol=1e-6)


def test_nobody_speaks_for_ever_for_a_device_that_never_comes_back():
    fleet = Fleet(surrogates=True)
    for _ in range(3):
        fleet.epoch()
    fleet.late_word()
    fleet.epoch()
    spoken = []
    for _ in range(20):
        fleet.epoch()
        spoken.append(fleet.notes("commit")[0].get("surrogates", 0))
    # It had been away for 3 epochs: after twice as many there is silence.
    assert spoken == [1] * 7 + [0] * 13


def test_updates_that_come_while_their_device_is_inverted_share_it():
    run = ToyRun(
        toy_server("feddc", {"gate": "off", "reuse": 0.0, "server_gflops": 1e-9}), toy_fleet()
    )
    run.until(300)
    waiting = run.server.strategy.compensate._waiting.values()
    charged = [c for c in run.server.strategy.compensate._cost.values() if c]
    assert len(charged) <= len({c.task.device for c in waiting}) <= 5


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
    sought = Sought(base, 0.01 * torch.ones_like(base), SPEC, COUNT, seed=0)
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


def test_a_network_that_cannot_be_inverted_is_left_alone_with_a_word():
    stubborn = FlatModel(lambda: nn.Sequential(Stubborn(6, 3)), (6,), 3)
    assert "cannot be differentiated" in reason_not_to_invert(stubborn)
    fleet = Fleet(networks=lambda submodel: stubborn)
    fleet.epoch()
    (line,) = fleet.notes("switch")
    assert "cannot be differentiated" in line["reason"]
    fleet.epoch()
    assert not fleet.notes("switch")


def test_a_sub_model_is_repaired_in_its_own_coordinates():
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

    def truth(params):
        y = torch.ones(COUNT, dtype=torch.int64)
        plan = plan_batches(COUNT, SPEC, task_rng(0, 2, 0))
        return local_update(half, params, fleet.x[2], y, SPEC, plan) - params

    stale = truth(task.params)
    fleet.sent(Arrived(2, Update(task.id, stale, COUNT)))
    fleet.sent(fleet.ready().event)
    (repaired,) = server.strategy.merge._gathered
    fresh = truth(submodel.take(server.store.head_params()))
    assert misfit(repaired.delta, fresh) < 0.7 * misfit(stale, fresh)


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
    assert run.server.strategy.compensate.known
    tree, _ = encode(run.server.state())
    text = json.dumps(tree)
    assert '"Estimate"' not in text
    second = ToyRun(toy_server("feddc", {"gate": "off", "save_estimates": False}), toy_fleet())
    second.server.restore(run.server.state())
    second.engine.restore(run.engine.state())
    second.until(100)
    assert second.server.accepted == 100
