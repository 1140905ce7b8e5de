"""The agent of a device: its answers, its stored state, and what it never does twice."""

from dataclasses import replace

import pytest
import torch

from latecomer.core.messages import Offer, ServingSettings, Task, TrainSpec
from latecomer.device.client import Client
from latecomer.device.disk import DeviceDisk
from latecomer.device.flat import flat_model
from latecomer.device.ledger import Ledger
from latecomer.device.limits import Limits
from latecomer.device.networks import build_networks
from latecomer.device.personalisation import personalise
from latecomer.device.privacy import Privacy
from latecomer.engines.agent import Agent
from latecomer.engines.wire import (
    InvalidPayload,
    ResumeOrder,
    decode_introduction,
    decode_update,
    encode_resume,
    encode_task,
)
from latecomer.errors import BadInput

MODEL = flat_model("mlp", (4,), 3, (5,))
SPEC = TrainSpec(local_epochs=1, batch_size=4, lr=0.1)
PRIVATE = Privacy("gaussian", 2.0, clip=1.0, delta=1e-5)


def data():
    rng = torch.Generator().manual_seed(1)
    return torch.randn(10, 4, generator=rng), torch.arange(10) % 3


def an_agent(folder, privacy=None, model=MODEL, width=1.0):
    return Agent("kitchen", model, data, folder, privacy, width)


def a_task(**changes):
    return replace(Task(0, 0, 0, "main", 0, SPEC, MODEL.init(1)), **changes)


def asked(agent, key="s-0", run="r", **changes):
    task = a_task(**changes)
    return decode_update(agent.answer(encode_task(task, key, run)), task, key)


def test_it_trains_as_the_same_client_does(tmp_path):
    agent = an_agent(tmp_path)
    got = asked(agent)
    expected = Client(0, MODEL, *data(), agent.seed).perform(a_task())
    assert torch.equal(got.delta, expected.delta)
    assert got.num_examples == 10


@pytest.mark.parametrize("until", [0, 1])  # at once, or in parts
def test_the_deployed_model_follows_the_serving_settings_of_the_task(tmp_path, until):
    agent = an_agent(tmp_path)
    task = a_task(spec=replace(SPEC, local_epochs=2))
    use = ServingSettings(True, 2, (0.2, 0.3, 0.5))
    answer = agent.answer(encode_task(task, "s-0", "r", until, use))
    if until:
        answer = agent.answer(encode_resume(ResumeOrder("s-0", 2)))
    assert decode_update(answer, task, "s-0").delta is not None
    own = an_agent(tmp_path).load_deployed_model()
    assert own.settings == use
    expected = personalise(MODEL, task.params, use, task.spec, *data())
    assert torch.equal(own.params, expected.params)
    assert not torch.equal(own.params, task.params)
    assert torch.equal(own.output_bias, expected.output_bias)
    asked(agent, "s-1")  # of a server that says nothing of it
    assert an_agent(tmp_path).load_deployed_model().settings == ServingSettings()


def test_the_class_prior_is_not_used_with_an_offered_model(tmp_path):
    x, y = data()
    good = a_task().params
    for _ in range(30):
        good = good + Client(0, MODEL, x, y, 1).perform(a_task(params=good)).delta
    task = a_task(offers=(Offer("b", 1, good),))
    agent = an_agent(tmp_path)
    answer = agent.answer(
        encode_task(task, "s-0", "r", serving=ServingSettings(True, 0, (0.2, 0.3, 0.5)))
    )
    assert decode_update(answer, task, "s-0").choice == 1
    own = agent.load_deployed_model()
    assert own.settings == ServingSettings(prior=True)
    assert torch.equal(own.params, good)


@pytest.mark.parametrize(
    ("limit", "spec", "reason"),
    [
        ("max-epochs", {"local_epochs": 4}, r"4 local epochs: .* at most 3 \(max-epochs\)"),
        ("max-steps", {"local_epochs": 2}, r"6 steps: .* at most 3 \(max-steps\)"),
        ("max-steps", {"local_steps": 4}, "4 steps"),
        ("max-bytes", {}, r"bytes: .* at most 3 \(max-bytes\)"),
        ("", {"local_epochs": 1_000_000}, "1,000,000 local epochs: .* at most 1,000"),
        ("", {"local_steps": 10_000_000}, "10,000,000 steps: .* at most 1,000,000"),
    ],
)
def test_a_task_beyond_the_limits_of_the_device_is_refused(tmp_path, limit, spec, reason):
    limits = Limits.of({limit: 3} if limit else {})
    agent = Agent("kitchen", MODEL, data, tmp_path, limits=limits)
    with pytest.raises(InvalidPayload, match=reason):
        asked(agent, spec=replace(SPEC, **spec))
    assert DeviceDisk(tmp_path).load().started == 0
    if limit not in ("", "max-bytes"):
        assert asked(agent, "s-1").delta is not None


def test_tasks_per_day_are_counted_over_runs_and_restarts(tmp_path, monkeypatch):
    def agent():
        return Agent("kitchen", MODEL, data, tmp_path, limits=Limits(tasks_per_day=2))

    clock = [20_000.5 * 86_400]
    monkeypatch.setattr("latecomer.engines.agent.time.time", lambda: clock[0])
    asked(agent(), "s-0", "one")
    asked(agent(), "s-0", "one")  # the message came again
    asked(agent(), "s-1", "two")
    for run in ("two", "three"):
        with pytest.raises(InvalidPayload, match=r"3 tasks today: .* at most 2"):
            asked(agent(), "s-2", run)
    clock[0] += 86_400
    assert asked(agent(), "s-2", "two").delta is not None


def test_limits_that_are_no_numbers_are_refused():
    for text in ("many", -1, 1.5):
        with pytest.raises(BadInput, match=r"max-epochs = .*: must be a whole number"):
            Limits.of({"max-epochs": text})


HOSTILE = {
    "no clipping": {"clip": 0.0},
    "wide clipping": {"clip": 1e9},
    "another norm": {"clip_norm": 1},
    "loss": {"report_loss": True},
    "class shares": {"report_shares": True},
    "feedback": {"feedback": True},
}


@pytest.mark.parametrize("where", ["step", "update"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_task_cannot_loosen_the_privacy_of_a_device(tmp_path, kind, where):
    """Noise, charge, bound and content of the reply are those of a task that asks for nothing."""
    privacy = replace(PRIVATE, where=where, multiplier=1e-3, clip=0.01)
    honest = asked(an_agent(tmp_path / "honest", privacy))
    spec = replace(SPEC, **HOSTILE[kind])
    got = asked(an_agent(tmp_path / "hostile", privacy), spec=spec)
    assert (got.noise_std, got.epsilon) == (honest.noise_std, honest.epsilon)
    assert got.noise_std > 0
    assert not got.metrics
    # 3 steps with momentum 0.5 move the model by less than 6 clipped gradients.
    bound = 6 * spec.lr * privacy.clip if where == "step" else privacy.clip
    assert got.delta.norm() < 1.1 * bound


def test_an_answer_is_sent_even_if_the_model_cannot_be_stored(tmp_path, monkeypatch):
    def full(*given):
        raise OSError("no space left")

    monkeypatch.setattr("latecomer.engines.agent.save_deployed_model", full)
    assert asked(an_agent(tmp_path)).delta is not None
    assert DeviceDisk(tmp_path).load().answered == "s-0"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_private_device_fine_tunes_without_noise_and_sends_nothing_of_it(tmp_path, optimizer):
    spec = replace(SPEC, optimizer=optimizer, report_shares=True)
    task, use = a_task(spec=spec), ServingSettings(True, 1)
    agent = an_agent(tmp_path, PRIVATE)
    update = decode_update(agent.answer(encode_task(task, "s-0", "r", serving=use)), task, "s-0")
    assert not update.metrics
    spent = Ledger.from_tensor(DeviceDisk(tmp_path).load_ledger(DeviceDisk(tmp_path).load()))
    expected = personalise(MODEL, task.params, use, spec, *data())
    assert torch.equal(agent.load_deployed_model().params, expected.params)
    after = Ledger.from_tensor(DeviceDisk(tmp_path).load_ledger(DeviceDisk(tmp_path).load()))
    assert PRIVATE.epsilon(after) == PRIVATE.epsilon(spent) == update.epsilon


def test_a_device_has_the_same_key_after_a_restart_which_is_not_its_secret(tmp_path):
    one, two = (decode_introduction(an_agent(tmp_path).introduce()) for _ in range(2))
    assert one == two
    assert one.name == "kitchen"
    assert DeviceDisk(tmp_path).secret().hex() not in one.key
    other = decode_introduction(an_agent(tmp_path / "other").introduce())
    assert other.key != one.key


@pytest.mark.parametrize("privacy", [None, PRIVATE])
def test_a_task_that_comes_again_gets_the_same_answer_and_costs_nothing(tmp_path, privacy):
    first = asked(an_agent(tmp_path, privacy))
    again = asked(an_agent(tmp_path, privacy))  # another process
    assert torch.equal(first.delta, again.delta)
    assert first.epsilon == again.epsilon
    assert DeviceDisk(tmp_path).load().started == 1


def test_noise_is_never_used_twice_even_if_the_server_counts_anew(tmp_path):
    agent = an_agent(tmp_path, replace(PRIVATE, where="update", multiplier=1e3))
    one = asked(agent, "s-0", number=0).delta
    two = asked(agent, "t-0", number=0).delta
    assert not torch.allclose(one, two, atol=1.0)


def test_noise_is_not_repeated_by_a_device_that_lost_its_count_of_tasks(tmp_path):
    agent = an_agent(tmp_path, replace(PRIVATE, where="update", multiplier=1e3))
    one = asked(agent).delta
    (tmp_path / "state.safetensors").unlink()
    assert not torch.allclose(one, asked(agent).delta, atol=1.0)


def test_two_devices_draw_different_noise(tmp_path):
    privacy = replace(PRIVATE, where="update", multiplier=1e3)
    one, two = (asked(an_agent(tmp_path / str(i), privacy)).delta for i in range(2))
    assert not torch.allclose(one, two, atol=1.0)


def test_a_number_is_used_up_by_a_task_in_which_the_device_dies(tmp_path):
    agent, read = an_agent(tmp_path), []

    def killed():
        if read:  # after the task was admitted
            raise KeyboardInterrupt
        read.append(data())
        return read[0]

    agent.data = killed
    with pytest.raises(KeyboardInterrupt):
        asked(agent)
    assert DeviceDisk(tmp_path).load().started == 1


def test_the_ledger_grows_over_restarts_and_over_runs(tmp_path):
    spent = [
        asked(an_agent(tmp_path, PRIVATE), f"{run}-{i}", run).epsilon
        for run in ("a", "b")
        for i in range(2)
    ]
    assert spent == sorted(set(spent))
    disk = DeviceDisk(tmp_path)
    rows = disk.load_ledger(disk.load())
    assert sum(count for _, count in Ledger.from_tensor(rows).history) == 4
    with pytest.raises(BadInput, match="unit 'step'"):
        asked(an_agent(tmp_path, replace(PRIVATE, where="update")), "b-2", "b")


def test_a_spent_budget_ends_it_for_good(tmp_path):
    tight = replace(PRIVATE, budget=3.0)
    answers = [asked(an_agent(tmp_path, tight), f"s-{i}") for i in range(30)]
    assert answers[-1].last
    assert answers[-1].delta is None
    assert max(answer.epsilon for answer in answers) <= 3.0


def test_what_a_strategy_had_it_remember_ends_with_the_run(tmp_path):
    spec = replace(SPEC, balance=0.5)
    asked(an_agent(tmp_path), "a-0", "a", spec=spec)
    assert "gradient" in DeviceDisk(tmp_path).load().memory
    second = asked(an_agent(tmp_path), "b-0", "b", spec=spec)
    agent = an_agent(tmp_path)
    alone = Client(0, MODEL, *data(), agent.seed).perform(a_task(spec=spec, number=1), {})
    assert torch.equal(second.delta, alone.delta)


def test_it_chooses_among_offers(tmp_path):
    trained = a_task().params
    for i in range(30):
        trained = (
            trained + Client(0, MODEL, *data(), 5).perform(a_task(params=trained, number=i)).delta
        )
    update = asked(an_agent(tmp_path), offers=(Offer("b", 1, trained),))
    assert update.choice == 1


def test_it_trains_the_sub_model_that_the_task_names(tmp_path):
    networks = build_networks("mlp", (4,), 3, (6,), (1.0, 0.5))
    agent = an_agent(tmp_path, model=networks, width=0.5)
    half = networks.submodels[0.5]
    params = half.take(networks.whole.init(1))
    task = a_task(submodel=half, params=params)
    update = decode_update(agent.answer(encode_task(task, "k")), task, "k")
    assert update.delta.numel() == len(half.index) < networks.whole.layout.size


def test_a_model_of_another_size_is_refused_untrained(tmp_path):
    with pytest.raises(InvalidPayload, match="shape"):
        asked(an_agent(tmp_path), params=torch.zeros(7))
    assert DeviceDisk(tmp_path).load().started == 0
