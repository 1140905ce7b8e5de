"""A private device: what leaves it, what bounds it, and when it falls silent."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.linalg import vector_norm

from latecomer.core.messages import MAIN, Offer, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel, take
from latecomer.device import client as client_module
from latecomer.device.client import LEDGER, Client
from latecomer.device.flat import FlatModel
from latecomer.device.ledger import Ledger, Release, composed_epsilon
from latecomer.device.memory import DeviceMemory
from latecomer.device.networks import build_networks
from latecomer.device.privacy import Privacy, noise_rng, per_release_multiplier
from latecomer.device.release import release
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.engines.trainers import Batched, OneByOne
from latecomer.errors import BadInput

NETWORKS = build_networks("mlp", (6,), 3, (8,), (1.0, 0.5))
MODEL, HALF = NETWORKS.whole, NETWORKS.submodels[0.5]
X = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(10) % 3
SPEC = TrainSpec(local_epochs=2, batch_size=4)
NOMINAL = per_release_multiplier(1.0, 1e-5)
STEP = Privacy("gaussian", NOMINAL, clip=0.8, delta=1e-5)
UPDATE = replace(STEP, where="update")
POISSON = replace(STEP, sampling="poisson")
EVERY = {
    "step": STEP,
    "update": UPDATE,
    "poisson": POISSON,
    "laplace": replace(STEP, kind="laplace"),
}
OPEN = replace(STEP, multiplier=0.0)  # clipped, and nothing hidden: a bound can be seen
every_kind = pytest.mark.parametrize("privacy", EVERY.values(), ids=EVERY.keys())


def device(privacy: Privacy = STEP, seed: int = 5, x: Tensor = X, y: Tensor = Y) -> Client:
    return Client(2, NETWORKS, x, y, seed, privacy)


def task(number: int = 0, spec: TrainSpec = SPEC, scale: float = 1.0) -> Task:
    return Task(100 + number, 2, number, MAIN, 0, spec, scale * MODEL.init(0))


def delta_of(update: Update) -> Tensor:
    assert update.delta is not None
    return update.delta


def history(memory: DeviceMemory) -> dict[Release, int]:
    return dict(Ledger.from_tensor(memory[LEDGER]).history)


@every_kind
def test_the_same_task_gives_the_same_update(privacy: Privacy) -> None:
    one, two = (device(privacy).perform(task(3), {}) for _ in range(2))
    assert torch.equal(delta_of(one), delta_of(two))
    assert (one.epsilon, one.noise_std) == (two.epsilon, two.noise_std)
    for other in (
        device(privacy).perform(task(4)),
        device(privacy, seed=6).perform(task(3)),
    ):
        assert not torch.equal(delta_of(other), delta_of(one))


def test_noise_and_batches_are_drawn_apart() -> None:
    """The order of a task's examples gives no information about its noise."""
    streams = {rng(5, 2, 3).initial_seed() for rng in (noise_rng, task_rng)}
    assert len(streams) == 2


def test_what_leaves_is_training_with_noise_in_every_step() -> None:
    spec = replace(SPEC, clip=0.8)
    hook = STEP.on_gradient([4, 4, 2] * 2, 10, spec, noise_rng(5, 2, 3))
    plan, base = plan_batches(10, spec, task_rng(5, 2, 3)), MODEL.init(0)
    expected = local_update(MODEL, base, X, Y, spec, plan, hook) - base
    assert torch.equal(delta_of(device().perform(task(3))), expected)


def test_what_leaves_is_the_clipped_update_with_noise() -> None:
    plan, base = plan_batches(10, SPEC, task_rng(5, 2, 3)), MODEL.init(0)
    moved = local_update(MODEL, base, X, Y, SPEC, plan) - base
    tight = replace(UPDATE, clip=vector_norm(moved).item() / 2)
    noise = torch.empty(len(base)).normal_(generator=noise_rng(5, 2, 3))
    expected = moved / 2 + noise * NOMINAL * 2 * tight.clip
    assert torch.allclose(delta_of(device(tight).perform(task(3))), expected, atol=1e-6)


@every_kind
def test_the_update_has_the_standard_deviation_of_its_noise(privacy: Privacy) -> None:
    spec = replace(SPEC, momentum=0.0)
    update = device(privacy).perform(task(0, spec))
    # 2 passes in batches of 4, 4 and 2; a step's noise is 2 C / b, an update's 2 C.
    by_hand = {
        "update": 2 * 0.8,
        "step": 0.01 * 2 * 0.8 * (4 / 4**2 + 2 / 2**2) ** 0.5,
        "poisson": 0.01 * 0.8 / 4 * 6**0.5,
    }
    by_hand["laplace"] = by_hand["step"] * 2**0.5
    name = next(name for name, value in EVERY.items() if value is privacy)
    assert update.noise_std == pytest.approx(NOMINAL * by_hand[name])


# Nothing un-noised


TALKATIVE = replace(
    SPEC,
    report_loss=True,
    report_shares=True,
    feedback=True,
)


@every_kind
def test_no_metric_leaves_whatever_is_asked_for(privacy: Privacy) -> None:
    asked = device(privacy).perform(task(0, TALKATIVE))
    assert dict(asked.metrics) == {}
    assert torch.equal(delta_of(asked), delta_of(device(privacy).perform(task(0))))
    plain = Client(2, NETWORKS, X, Y, 5).perform(task(0, TALKATIVE))
    assert {"loss_rms", "share_0", "error"} <= set(plain.metrics)


@every_kind
def test_no_choice_leaves_and_the_task_s_own_model_is_trained(privacy: Privacy) -> None:
    better = MODEL.init(0)
    for number in range(30):
        plan = plan_batches(10, SPEC, task_rng(5, 2, number))
        better = local_update(MODEL, better, X, Y, replace(SPEC, lr=0.1), plan)
    offered = replace(task(0), offers=(Offer("cluster-1", 0, better),))
    assert Client(2, NETWORKS, X, Y, 5).perform(offered).choice == 1
    update = device(privacy).perform(offered)
    assert update.choice == 0
    assert torch.equal(delta_of(update), delta_of(device(privacy).perform(task(0))))


@pytest.mark.parametrize("memory", [None, {}])
def test_everything_leaves_through_release(
    monkeypatch: pytest.MonkeyPatch, memory: DeviceMemory | None
) -> None:
    seen: list[tuple[Update, bool]] = []

    def watch(update: Update, private: bool = False) -> Update:
        seen.append((release(update, private), private))
        return seen[-1][0]

    monkeypatch.setattr(client_module, "release", watch)
    poor = device(replace(STEP, budget=1e-3))
    for client, silent in ((device(), False), (poor, True)):
        update = client.perform(task(), memory)
        last, private = seen.pop()
        assert update is last
        assert private
        assert (update.delta is None) is silent


def test_release_keeps_only_what_is_accounted_for() -> None:
    delta = torch.ones(2)
    full = Update(1, delta, 7, {"loss_rms": 3.0}, 0.5, choice=2, epsilon=1.5, last=True)
    kept = release(full, private=True)
    assert kept.delta is delta
    assert (dict(kept.metrics), kept.choice) == ({}, 0)
    assert (kept.task_id, kept.num_examples, kept.noise_std) == (1, 7, 0.5)
    assert (kept.epsilon, kept.last) == (1.5, True)
    assert release(full) is full


# The device's own bound

hostile = st.builds(
    TrainSpec,
    local_epochs=st.just(1),
    batch_size=st.just(10),
    lr=st.just(1.0),
    momentum=st.just(0.0),
    clip=st.sampled_from([0.0, 1e-3, 0.8, 1e9]),
    clip_norm=st.sampled_from([1, 2]),
    last_layer_only=st.booleans(),
    report_loss=st.booleans(),
)
values = st.floats(-100, 100, width=32)
scales = st.sampled_from([0.0, 1.0, 30.0, 1e6, 1e18, 1e30])


@settings(max_examples=60, deadline=None)
@given(hostile, st.lists(values, min_size=6, max_size=6), st.integers(0, 2), scales)
def test_no_example_moves_the_model_further_than_its_bound(
    spec: TrainSpec, features: list[float], label: int, scale: float
) -> None:
    """One step over all 10 at rate 1 is their mean gradient: replacing one moves it by 2 C / n."""
    x, y = X.clone(), Y.clone()
    x[3], y[3] = torch.tensor(features), label
    for privacy in (OPEN, replace(OPEN, kind="laplace")):
        base = task(0, spec, scale)
        own, other = (
            delta_of(device(privacy, x=a, y=b).perform(base)).double() for a, b in ((X, Y), (x, y))
        )
        # What the model was before is rounded away from the difference.
        rounding = 1e-6 * vector_norm(base.params.double(), privacy.norm).item() + 1e-5
        assert vector_norm(own, privacy.norm).item() <= 0.8 + rounding
        assert vector_norm(own - other, privacy.norm).item() <= 2 * 0.8 / 10 + rounding


def test_without_its_own_bound_it_would_be_further() -> None:
    spec = TrainSpec(local_epochs=1, batch_size=10, lr=1.0, momentum=0.0)
    plain = Client(2, NETWORKS, 10 * X, Y, 5).perform(task(0, spec))
    assert vector_norm(delta_of(plain)) > 2 * 0.8
    bounded = device(OPEN, x=10 * X).perform(task(0, spec))
    assert 0.01 < vector_norm(delta_of(bounded)) <= 0.8 + 1e-5


@settings(max_examples=40, deadline=None)
@given(
    lr=st.sampled_from([1e-3, 1.0, 1e3, 1e30]),
    epochs=st.integers(1, 4),
    optimizer=st.sampled_from(["sgd", "adam"]),
    clip=st.sampled_from([0.0, 5.0]),
    scale=st.sampled_from([1.0, 30.0, 1e30]),
)
def test_no_update_is_longer_than_its_bound(
    lr: float, epochs: int, optimizer: str, clip: float, scale: float
) -> None:
    spec = TrainSpec(epochs, 4, lr, 0.5, optimizer, clip=clip)
    update = device(replace(UPDATE, multiplier=0.0)).perform(task(0, spec, scale))
    assert vector_norm(delta_of(update).double()).item() <= 0.8 * (1 + 1e-5)


def test_a_sub_model_is_bounded_and_noised_in_its_own_coordinates() -> None:
    narrow = replace(task(0), submodel=HALF, params=take(MODEL.init(0), HALF))
    update = device(UPDATE).perform(narrow)
    assert delta_of(update).numel() == len(HALF.index) < MODEL.layout.size
    assert delta_of(update).count_nonzero() == len(HALF.index)
    stranger = replace(narrow, submodel=Submodel("stranger", HALF.index))
    with pytest.raises(BadInput, match="device 2: no network for 'stranger'"):
        device(UPDATE).perform(stranger)


class Unused(nn.Module):
    """A layer is run, and nothing comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        self.other(hidden)
        return self.two(hidden)


def in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


@pytest.mark.parametrize("build", [in_place, Unused])
def test_whatever_a_user_s_network_does_its_gradients_are_its_own(build: type[nn.Module]) -> None:
    """The fast way to clipped gradients must give those of the plain one, or stand back."""
    model, spec = FlatModel(build, (6,), 3), replace(SPEC, clip=0.8)
    plan, base = plan_batches(10, spec, task_rng(5, 2, 0)), model.init(0)
    expected = local_update(model, base, X, Y, spec, plan, functional=True) - base
    update = Client(2, model, X, Y, 5, OPEN).perform(replace(task(0), params=base))
    assert torch.allclose(delta_of(update), expected, atol=1e-6)


# The ledger


@pytest.mark.parametrize(
    ("privacy", "count", "rate"), [(STEP, 2, 1.0), (UPDATE, 1, 1.0), (POISSON, 6, 0.4)]
)
def test_the_ledger_grows_by_what_a_task_releases(
    privacy: Privacy, count: int, rate: float
) -> None:
    """2 passes over 10 examples in batches of 4: 2 passes, 1 update, or 6 draws of 4 in 10."""
    memory: DeviceMemory = {}
    for number in range(1, 4):
        update = device(privacy).perform(task(number), memory)
        expected = {Release("gaussian", NOMINAL, rate): count * number}
        assert history(memory) == expected
        assert update.epsilon == composed_epsilon(tuple(expected.items()), 1e-5, "pld")
        assert not update.last


def test_a_task_that_asks_for_more_is_charged_for_more() -> None:
    memory: DeviceMemory = {}
    greedy = task(0, replace(SPEC, local_epochs=7, clip=1e9, batch_size=1))
    device(STEP).perform(greedy, memory)
    assert history(memory) == {Release("gaussian", NOMINAL): 7}
    device(STEP).perform(task(1), memory)
    assert history(memory) == {Release("gaussian", NOMINAL): 9}


def test_an_update_that_is_not_sent_is_charged_too() -> None:
    lazy = replace(SPEC, lazy=1e9)
    memory: DeviceMemory = {}
    first = device().perform(task(0, lazy), memory)
    silent = device().perform(replace(task(1, lazy), params=0.9 * MODEL.init(0)), memory)
    assert first.delta is not None
    assert silent.delta is None
    assert not silent.last
    assert silent.epsilon > first.epsilon
    assert history(memory) == {Release("gaussian", NOMINAL): 4}


def affordable(tasks: int) -> float:
    """A budget for so many releases at a nominal epsilon of 1, and not for one more."""
    low, high = (
        composed_epsilon(((Release("gaussian", NOMINAL), n),), 1e-5, "pld")
        for n in (tasks, tasks + 1)
    )
    return (low + high) / 2


def test_the_last_affordable_task_is_the_last() -> None:
    poor, memory = device(replace(UPDATE, budget=affordable(3))), dict[str, Tensor]()
    updates = [poor.perform(task(number), memory) for number in range(6)]
    assert [update.delta is not None for update in updates] == [True] * 3 + [False] * 3
    assert [update.last for update in updates] == [False, False, True, True, True, True]
    assert history(memory) == {Release("gaussian", NOMINAL): 3}
    assert updates[2].epsilon <= affordable(3) < affordable(4)
    assert {update.epsilon for update in updates[3:]} == {updates[2].epsilon}
    assert {update.num_examples for update in updates} == {10}
    assert dict(updates[4].metrics) == {}


def test_an_exact_budget_is_spent_to_the_end() -> None:
    exact = composed_epsilon(((Release("gaussian", NOMINAL), 4),), 1e-5, "pld")
    poor, memory = device(replace(UPDATE, budget=exact)), dict[str, Tensor]()
    updates = [poor.perform(task(number), memory) for number in range(5)]
    assert [update.last for update in updates] == [False, False, False, True, True]
    assert updates[3].epsilon == exact


def test_a_task_beyond_the_budget_is_answered_with_nothing() -> None:
    """Even if a smaller one would fit: the device does not bargain."""
    memory: DeviceMemory = {}
    poor = device(replace(STEP, budget=affordable(5)))
    poor.perform(task(0), memory)
    greedy = poor.perform(task(1, replace(SPEC, local_epochs=50)), memory)
    assert greedy.delta is None
    assert greedy.last
    assert history(memory) == {Release("gaussian", NOMINAL): 2}


def test_from_the_start_there_may_be_nothing_to_spend() -> None:
    memory: DeviceMemory = {}
    update = device(replace(UPDATE, budget=0.1)).perform(task(0), memory)
    assert (update.delta, update.last, update.epsilon, memory) == (None, True, 0.0, {})


@pytest.mark.parametrize("order", [(5, 0, 3, 1, 2, 4), (0, 1, 2, 3, 4, 5), (2, 5, 4, 3, 1, 0)])
@pytest.mark.parametrize("batched", [False, True])
def test_with_many_tasks_open_the_budget_holds(order: tuple[int, ...], batched: bool) -> None:
    """Uploads of a pipeline overtake each other; the device did its tasks in their order."""
    clients = {2: device(replace(UPDATE, budget=affordable(3)))}
    trainer = Batched(clients, 4) if batched else OneByOne(clients)
    tasks = [task(number) for number in range(6)]
    for each in tasks:
        trainer.expect(each, 1.0)
    updates = {number: trainer.update(tasks[number]) for number in order}
    assert {number for number, update in updates.items() if update.delta is not None} == {0, 1, 2}
    assert [updates[number].last for number in range(6)] == [False, False] + [True] * 4
    assert max(update.epsilon for update in updates.values()) <= affordable(3)


def test_lost_tasks_cost_nothing() -> None:
    """Tasks 0 and 2 end with a crash of the device: nothing of them was released."""
    trainer = OneByOne({2: device(replace(UPDATE, budget=affordable(2)))})
    for number in (1, 3):
        trainer.expect(task(number), 1.0)
    updates = [trainer.update(task(number)) for number in (1, 3)]
    assert [(update.delta is None, update.last) for update in updates] == [
        (False, False),
        (False, True),
    ]


def test_the_ledger_is_part_of_the_trainer_s_state() -> None:
    clients = {2: device(replace(UPDATE, budget=affordable(3)))}
    first, second = OneByOne(clients), OneByOne(clients)
    for number in range(2):
        first.update(task(number))
    second.restore(first.state())
    assert [second.update(task(number)).last for number in (2, 3)] == [True, True]
    fresh = OneByOne(clients)
    assert not fresh.update(task(2)).last
