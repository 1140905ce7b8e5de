"""PAFLM by hand, and the limit in which everything is sent."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, Send, TrainSpec, Update
from latecomer.core.outcomes import Note, Outcome
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.errors import BadInput
from latecomer.fleet.fleet import make_fleet
from latecomer.strategies.papers.paflm import freshness, paflm
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import build_strategy

DEVICES = 6


def answer(task, *delta, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples))


def head(server):
    return server.store.head_params().item()


def run_with(strategy, updates=90):
    """Six devices with two to seven examples; gives the engine and its arrivals."""
    model, notes = flat_model("mlp", (5,), 3, (6,)), []
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for device in range(DEVICES):
        x = torch.randn(device + 2, 5, generator=generator)
        y = torch.randint(0, 3, (device + 2,), generator=generator)
        clients[device] = Client(device, model, x, y, seed=5)
    server = Server(model.init(0), strategy, TrainSpec(local_epochs=1, batch_size=4, lr=0.1))
    engine = VirtualEngine(
        server,
        make_fleet("tiers", DEVICES, seed=2),
        OneByOne(clients),
        clients,
        on_note=lambda time, note: notes.append(note),
    )
    engine.run(Bounds(updates=updates), lambda: True)
    return engine, [note.fields for note in notes if note.kind == "arrival"]


def test_full_weight_up_to_one_turn_of_the_fleet():
    assert [freshness(0.5, tau, devices=4) for tau in (0, 3, 4)] == [1.0, 1.0, 1.0]
    assert freshness(0.5, 8, devices=4) == 0.5  # 0.5^(8/4 - 1)
    assert freshness(0.5, 16, devices=4) == 0.125
    assert freshness(1.0, 1000, devices=4) == 1.0
    assert freshness(0.5, 10**6, devices=4) == 0.0  # no overflow


def test_the_weight_is_freshness_times_the_share_of_examples():
    server = Server(torch.zeros(1), paflm(alpha=0.5), TrainSpec())
    fast, slow = sends(server.handle(Joined(0), Joined(1)))
    for _ in range(4):
        (fast,) = sends(server.handle(answer(fast, 2.0, examples=10)))
    assert head(server) == 4.0  # half of 2, four times: the other counts with the mean
    # It is stale by 4 with 2 devices: 0.5^(4/2 - 1), and has 30 of 40 examples.
    server.handle(answer(slow, 8.0, examples=30))
    assert head(server) == 4.0 + 0.5 * 0.75 * 8.0


def test_devices_are_told_the_threshold():
    spec = Server(torch.zeros(1), paflm(threshold=3.0), TrainSpec()).spec
    assert (spec.lazy, spec.accumulate_residual) == (3.0, True)
    assert not Server(torch.zeros(1), paflm(accumulate=False), TrainSpec()).spec.accumulate_residual


def test_a_silent_device_moves_nothing_and_is_given_the_next_task():
    server = Server(torch.zeros(1), paflm(), TrainSpec())
    (task,) = sends(server.handle(Joined(0)))
    note, _, send = server.handle(Arrived(0, Update(task.id, None, 5)))
    assert isinstance(note, Outcome | Note)
    assert dict(note.fields) == {"device": 0, "task": 0, "sent": 0, "skipped": True, "saved": 4}
    assert isinstance(send, Send)
    assert (server.store.commits, server.accepted) == (0, 1)


def test_nothing_is_skipped_below_a_threshold_of_zero():
    """Bit for bit the plain asynchronous step, and no device needs a memory."""
    ours, arrivals = run_with(paflm(threshold=0.0))
    decay = lambda staleness, devices: freshness(0.5, staleness, devices)  # noqa: E731
    plain, _ = run_with(Strategy(weigh=ByShareOfExamples(decay), merge=Buffer(1)))
    assert not any("skipped" in fields for fields in arrivals)
    assert ours.server.spec == plain.server.spec
    assert not ours.server.spec.needs_memory
    assert torch.equal(ours.server.store.head_params(), plain.server.store.head_params())
    assert ours.bytes_saved == 0


def test_a_tiny_threshold_skips_nothing_either():
    ours, _ = run_with(paflm(threshold=1e-30))
    plain, _ = run_with(paflm(threshold=0.0))
    assert ours.server.spec.needs_memory
    assert torch.equal(ours.server.store.head_params(), plain.server.store.head_params())


@pytest.mark.parametrize("accumulate", [True, False])
def test_the_bytes_of_skipped_uploads_are_counted(accumulate):
    engine, arrivals = run_with(paflm(threshold=30.0, accumulate=accumulate))
    skipped = [fields for fields in arrivals if "skipped" in fields]
    size = 4 * engine.server.store.head_params().numel()
    assert 0 < len(skipped) < len(arrivals) == 90
    assert engine.bytes_saved == size * len(skipped) == sum(f["saved"] for f in skipped)
    assert engine.bytes_up == size * (len(arrivals) - len(skipped))
    assert engine.server.store.commits == len(arrivals) - len(skipped)


def test_the_lazier_the_fewer_uploads():
    engines = [run_with(paflm(threshold=threshold))[0] for threshold in (1.0, 10.0, 100.0)]
    saved = [engine.bytes_saved for engine in engines]
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]


def test_silence_ends_when_the_model_stands_still():
    """Nobody is silenced for ever: a model that does not move makes every change worth sending."""
    _, arrivals = run_with(paflm(threshold=1e6))
    sent = [fields["device"] for fields in arrivals[30:] if "skipped" not in fields]
    assert len(sent) > 5


@pytest.mark.parametrize(
    ("key", "value"), [("threshold", -1.0), ("alpha", 0.0), ("alpha", 2.0), ("accumulate", 1)]
)
def test_bad_options_are_named(key, value):
    with pytest.raises(BadInput, match=key):
        build_strategy("paflm", {key: value})
