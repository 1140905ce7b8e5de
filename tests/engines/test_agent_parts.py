"""A task trained in parts on a device gives bit for bit the update of the whole."""

from dataclasses import replace

import pytest
import torch

from latecomer.core.messages import Offer, Task, TrainSpec
from latecomer.device.client import Client
from latecomer.device.disk import DeviceDisk
from latecomer.device.flat import flat_model
from latecomer.device.networks import build_networks
from latecomer.device.privacy import Privacy
from latecomer.device.training import Plan, local_update
from latecomer.engines.agent import Agent
from latecomer.engines.wire import (
    InvalidPayload,
    ResumeOrder,
    decode_progress,
    decode_update,
    encode_resume,
    encode_task,
)

MODEL = flat_model("mlp", (4,), 3, (5,))
SPEC = TrainSpec(local_epochs=4, batch_size=4, lr=0.1)
PRIVATE = Privacy("gaussian", 2.0, clip=1.0, delta=1e-5)
PROGRAMS = {
    "momentum": SPEC,
    "plain": replace(SPEC, momentum=0.0),
    "adam": replace(SPEC, optimizer="adam"),
    "prox": replace(SPEC, prox=0.5),
    "decay": replace(SPEC, weight_decay=0.1),
    "clipped": replace(SPEC, clip=0.5),
    "last layer": replace(SPEC, last_layer_only=True),
    "feedback": replace(SPEC, feedback=True),
}


def data():
    rng = torch.Generator().manual_seed(1)
    return torch.randn(10, 4, generator=rng), torch.arange(10) % 3


def a_task(spec=SPEC, **changes):
    return replace(Task(0, 0, 0, "main", 0, spec, MODEL.init(1)), **changes)


class InParts:
    """A device whose process is new for every message, as on a stock SuperNode."""

    def __init__(self, folder, privacy=None, model=MODEL, width=1.0):
        self.folder, self.privacy, self.model, self.width = folder, privacy, model, width

    def receive(self, payload):
        agent = Agent("kitchen", self.model, data, self.folder, self.privacy, self.width)
        self.client = Client(0, self.model, *data(), agent.seed, self.privacy)
        return agent.answer(payload)

    def whole(self, task, news=()):
        """Start, and one message for each pass; `news` are (passes, number, model)."""
        payload, names = self.receive(encode_task(task, "k", "r", until=1)), {}
        while (progress := decode_progress(payload, "k")) is not None:
            due = [each for each in news if each[0] == progress.passes]
            order = ResumeOrder("k", progress.passes + 1)
            if due:
                _, number, newer = due[0]
                names[number] = f"s-{number}"
                order = replace(order, number=number, name=names[number], newer=newer)
            payload = self.receive(encode_resume(order))
        return decode_update(payload, task, "k", names)


def same(one, other):
    assert torch.equal(one.delta, other.delta)
    assert (one.choice, one.num_examples) == (other.choice, other.num_examples)
    assert dict(one.metrics) == dict(other.metrics)


@pytest.mark.parametrize("program", PROGRAMS)
def test_parts_give_the_numbers_of_the_whole(tmp_path, program):
    device, task = InParts(tmp_path), a_task(PROGRAMS[program])
    got = device.whole(task)
    same(got, device.client.perform(task))


def rebased_by_hand(client, task, one, two):
    """One pass from the task's model, two rebased on `one`, and the last rebased on `two`."""
    plan, (x, y), spec = client.plan(task), data(), task.spec
    steps = len(plan.order) // spec.local_epochs

    def trained(params, begin, end):
        part = Plan(*(rows[begin * steps : end * steps] for rows in plan))
        return local_update(MODEL, params, x, y, spec, part)

    params = trained(task.params, 0, 1)
    params = trained(one + (params - task.params), 1, 3)
    return trained(two + (params - one), 3, 4) - two


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_newer_models_they_are_those_of_the_simulation(tmp_path, program):
    device, task = InParts(tmp_path), a_task(PROGRAMS[program])
    one, two = MODEL.init(2), MODEL.init(3)
    got = device.whole(task, [(1, 1, one), (3, 2, two)])
    assert torch.equal(got.delta, rebased_by_hand(device.client, task, one, two))
    offers = (Offer("main", 1, one), Offer("main", 2, two))
    same(got, device.client.perform(replace(task, broadcasts=offers), rebases=((1, 1), (3, 2))))
    assert got.choice == 2


@pytest.mark.parametrize("better", [0, 1])
def test_a_broadcast_of_another_lineage_than_the_chosen_offer_is_ignored(tmp_path, better):
    """With models to choose from; a broadcast is for the lineage of one of them."""
    device, newer = InParts(tmp_path), MODEL.init(3)
    trained = device.whole(a_task())
    good = MODEL.init(1) + trained.delta
    device.folder = tmp_path / "other"
    models = [MODEL.init(1), good] if better else [good, MODEL.init(1)]
    task = a_task(params=models[0], offers=(Offer("b", 1, models[1]),))
    got = device.whole(task, [(1, 2, newer)])
    sent = replace(task, broadcasts=(Offer("main", 2, newer),))
    same(got, device.client.perform(sent, rebases=((1, 2),)))
    assert got.choice == (1 if better else 2)


def test_a_narrow_device_does_its_parts_of_a_sub_model(tmp_path):
    networks = build_networks("mlp", (4,), 3, (8,), (1.0, 0.5))
    part = networks.submodels[0.5]
    device = InParts(tmp_path, model=networks, width=0.5)
    task = a_task(params=networks.whole.init(1)[part.index], submodel=part)
    same(device.whole(task), device.client.perform(task))


def test_what_comes_again_is_not_done_again(tmp_path):
    device, task = InParts(tmp_path), a_task()
    start, second = encode_task(task, "k", "r", until=1), encode_resume(ResumeOrder("k", 2))
    for payload, passes in ((start, 1), (start, 1), (second, 2), (second, 2), (start, 2)):
        assert decode_progress(device.receive(payload), "k").passes == passes
    last = encode_resume(ResumeOrder("k", 4))
    answers = [decode_update(device.receive(p), task, "k") for p in (last, last, second, start)]
    for each in answers:
        same(each, answers[0])
    same(answers[0], device.client.perform(task))
    assert DeviceDisk(tmp_path).load().started == 1


def test_a_newer_model_that_was_taken_up_is_named_when_asked_again(tmp_path):
    device, task = InParts(tmp_path), a_task()
    device.receive(encode_task(task, "k", "r", until=1))
    device.receive(encode_resume(ResumeOrder("k", 2, 1, "s-1", 0, MODEL.init(2))))
    found = decode_progress(device.receive(encode_task(task, "k", "r", until=1)), "k")
    assert (found.passes, found.number, found.name) == (2, 1, "s-1")
    for _ in range(2):
        answer = device.receive(encode_resume(ResumeOrder("k", 4)))
        broadcasts = replace(task, broadcasts=(Offer("main", 1, MODEL.init(2)),))
        assert decode_update(answer, broadcasts, "k", {1: "s-1"}).choice == 1
        with pytest.raises(InvalidPayload, match="has not sent"):
            decode_update(answer, broadcasts, "k", {1: "t-1"})


def test_a_new_task_takes_the_place_of_an_unfinished_one(tmp_path):
    device, task = InParts(tmp_path), a_task()
    device.receive(encode_task(task, "old", "r", until=1))
    got = device.whole(task)
    same(got, device.client.perform(replace(task, number=1)))
    with pytest.raises(InvalidPayload, match="not in the middle"):
        device.receive(encode_resume(ResumeOrder("old", 2)))


@pytest.mark.parametrize(
    "order", [ResumeOrder("other", 2), ResumeOrder("k", 2, 1, "s-1", 0, torch.ones(3))]
)
def test_what_does_not_fit_is_refused(tmp_path, order):
    device = InParts(tmp_path)
    device.receive(encode_task(a_task(), "k", "r", until=1))
    with pytest.raises(InvalidPayload):
        device.receive(encode_resume(order))


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, balance=0.5), replace(SPEC, lazy=0.5)])
def test_devices_with_a_memory_do_it_all_at_once(tmp_path, spec):
    """Memory that a task has changed, and what it has spent, cannot be undone."""
    device = InParts(tmp_path, PRIVATE if spec is SPEC else None)
    answer = device.receive(encode_task(a_task(spec), "k", "r", until=1))
    assert decode_progress(answer, "k") is None
    assert decode_update(answer, a_task(spec), "k").num_examples == 10


def test_a_task_of_one_pass_is_not_divided(tmp_path):
    task = a_task(replace(SPEC, local_epochs=1))
    answer = InParts(tmp_path).receive(encode_task(task, "k", "r", until=1))
    assert decode_update(answer, task, "k").delta is not None
