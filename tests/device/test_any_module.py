"""Networks with buffers, random layers, frozen and shared parameters as one flat vector."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kinds_of_networks import FEATURES, KINDS, Tied, batchnorm, both, dropout, frozen, lora
from latecomer.core.messages import Offer, Task, TrainSpec
from latecomer.device.client import BUFFERS, Client
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.privacy import Privacy
from latecomer.device.training import average_loss, local_update, plan_batches, task_rng
from latecomer.errors import BadInput

SPEC = TrainSpec(local_epochs=3, batch_size=8, lr=0.05)


def flat(kind: str, **options: object) -> FlatModel:
    return FlatModel(KINDS[kind], (FEATURES,), 10, **options)


def examples(n: int = 25) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, FEATURES, generator=g), torch.randint(0, 10, (n,), generator=g)


def task_of(model: FlatModel, number: int = 0, **options: object) -> Task:
    return Task(1, 0, number, "main", 0, SPEC, model.init(3), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(kind: str) -> None:
    model, (x, y) = flat(kind), examples()
    params = model.init(0)
    spec = replace(SPEC, local_epochs=40, optimizer="adam", lr=0.01)
    trained = local_update(model, params, x, y, spec, plan_batches(25, spec, task_rng(0, 0, 0)))
    assert average_loss(model, trained, x, y) < 0.8 * average_loss(model, params, x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_in_parts_is_the_whole_task(kind: str) -> None:
    model = flat(kind)
    client = Client(0, model, *examples(), seed=5)
    task = task_of(model)
    whole = client.perform(task)
    training = client.start(task)
    for passes in (1, 2, 3):
        client.perform(replace(task, number=9))  # another task in between
        model.logits(task.params, examples()[0])
        client.advance(task, training, passes)
    assert torch.equal(whole.delta, training.delta)
    again = Client(0, flat(kind), *examples(), seed=5).perform(task)
    assert torch.equal(whole.delta, again.delta)


@pytest.mark.parametrize("kind", ["dropout", "both", "Recurrent", "Attentive"])
def test_random_layers_draw_from_the_stream_of_the_task(kind: str) -> None:
    model, (x, y) = flat(kind), examples()
    assert model.traits.random
    plan, params = plan_batches(25, SPEC, task_rng(0, 0, 0)), model.init(0)
    client = Client(0, model, x, y, seed=5)
    trained = [
        local_update(model, params, x, y, SPEC, plan, stream=client.stream_of(task_of(model, i)))
        for i in (0, 1)
    ]
    assert not torch.equal(*trained)  # the same examples in the same order
    before = torch.get_rng_state()
    client.perform(task_of(model))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(model.logits(params, x), model.logits(params, x))


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_torch(kind: str) -> None:
    model, (x, y) = flat(kind), examples()
    spec, params = replace(SPEC, local_epochs=1, momentum=0.5), model.init(0)
    plan = plan_batches(25, spec, task_rng(0, 0, 0))
    trained = local_update(model, params, x, y, spec, plan)
    if model.traits.random:
        return
    module = KINDS[kind]()
    module.load_state_dict(model.state_dict(params))
    module.train()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.05, 0.5)
    for index, mask in zip(*plan, strict=True):
        index = index[mask > 0]
        module.train(len(index) > 1 or not model.traits.mixing)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[index]), y[index]).backward()
        optimizer.step()
    found = model.state_dict(trained)
    for name, value in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.allclose(found[name], value, atol=1e-6), name
    model.bind(trained)
    assert torch.allclose(model.module.eval()(x), model.logits(trained, x), atol=1e-6)
    assert torch.allclose(module.eval()(x), model.logits(trained, x), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_is_complete(kind: str) -> None:
    model = flat(kind, seed=4)
    params, (x, _) = model.init(3), examples()
    module = KINDS[kind]()
    module.load_state_dict(model.state_dict(params))
    assert torch.allclose(module.eval()(x), model.logits(params, x), atol=1e-6)


def test_only_what_is_trained_is_in_the_vector() -> None:
    assert flat("Positional").layout.size == FEATURES * 10 + 10
    assert flat("frozen").layout.names == ("3.weight", "3.bias")
    tied = flat("Tied").layout
    assert "second.weight" not in tied.names
    assert tied.size == sum(p.numel() for p in Tied().parameters())
    assert flat("lora").layout.size == sum(
        p.numel() for p in lora().parameters() if p.requires_grad
    )
    found = flat("batchnorm").layout
    assert found.names[-2:] == ("2.running_mean", "2.running_var")
    assert (found.buffers, found.size - found.trained) == (2, 32)


def test_frozen_parameters_keep_the_values_of_the_seed() -> None:
    one, same, other = flat("frozen", seed=1), flat("frozen", seed=1), flat("frozen", seed=2)
    (x, y), params = examples(), one.init(5)
    first = one.logits(params, x)
    local_update(one, params, x, y, SPEC, plan_batches(25, SPEC, task_rng(0, 0, 0)))
    one.init(7)
    assert torch.equal(first, one.logits(params, x))
    assert torch.equal(first, same.logits(params, x))
    assert not torch.equal(first, other.logits(params, x))


def test_evaluation_neither_draws_nor_changes_statistics() -> None:
    model, (x, _) = FlatModel(both, (FEATURES,), 10), examples()
    params = model.init(0)
    kept = params.clone()
    assert torch.allclose(model.logits(params, x)[:3], model.logits(params, x[:3]), atol=1e-6)
    assert torch.equal(params, kept)
    negative = params.clone()
    negative[model.layout.span("2.running_var")] = -1.0
    assert model.logits(negative, x).isfinite().all()


def test_a_batch_of_one_example_uses_the_running_statistics() -> None:
    client = Client(0, FlatModel(batchnorm, (FEATURES,), 10), *examples(1), seed=0)
    delta = client.perform(task_of(client.networks.whole)).delta
    assert delta.isfinite().all()
    assert not delta[client.networks.whole.layout.trained :].any()


class TestLocalBuffers:
    def client(self) -> Client:
        return Client(0, flat("batchnorm", buffers="local"), *examples(), seed=5)

    def test_they_are_not_sent_and_kept_from_task_to_task(self) -> None:
        client, averaged = self.client(), flat("batchnorm")
        model = client.networks.whole
        assert model.layout.size == averaged.layout.trained
        task, memory = task_of(model), {}
        assert client.needs_memory(task)
        first = client.perform(task, memory)
        assert first.delta.numel() == model.layout.size
        one = memory[BUFFERS]
        second = client.perform(replace(task, number=1), memory)
        assert memory[BUFFERS].numel() == 32
        assert not torch.equal(one, memory[BUFFERS])
        assert second.delta.numel() == model.layout.size
        # The first task is that of a model whose buffers travel.
        whole = Client(0, averaged, *examples(), seed=5).perform(task_of(averaged))
        assert torch.equal(first.delta, whole.delta[: model.layout.size])
        assert torch.equal(one, (whole.delta + averaged.init(3))[model.layout.size :])

    def test_without_them_a_model_uses_the_statistics_of_the_examples(self) -> None:
        model, (x, _) = flat("batchnorm", buffers="local"), examples()
        params, module = model.init(3), batchnorm()
        module.load_state_dict(model.state_dict(params))
        assert torch.allclose(model.logits(params, x), module.train()(x), atol=1e-6)
        shifted = torch.cat([params, torch.full((32,), 4.0)])
        assert not torch.allclose(model.logits(shifted, x), model.logits(params, x))
        assert model.logits(params, x[:1]).isfinite().all()


def test_offers_and_broadcasts_of_networks_with_buffers() -> None:
    model = flat("both")
    client = Client(0, model, *examples(), seed=5)
    task = task_of(model)
    newer = Offer("main", 1, model.init(8))
    update = client.perform(replace(task, broadcasts=(newer,)), rebases=((1, 1),))
    assert update.choice == 1
    training = client.start(task)
    client.advance(task, training, 1)
    training.rebase(1, newer.params)
    client.advance(task, training, 3)
    assert torch.equal(update.delta, training.delta)


def test_per_example_gradients_and_sub_models_are_refused() -> None:
    privacy = Privacy("gaussian", 1.0, 1.0, 1e-5)
    with pytest.raises(BadInput, match=r"BatchNorm1d at '2' mixes.*GroupNorm"):
        Client(0, flat("batchnorm"), *examples(), 0, privacy)
    Client(0, flat("batchnorm"), *examples(), 0, replace(privacy, where="update"))
    Client(0, flat("dropout"), *examples(), 0, privacy).perform(task_of(flat("dropout")), {})
    with pytest.raises(BadInput, match=r"buffer '2\.running_mean'"):
        Networks(flat("batchnorm"), {0.5: flat("batchnorm")})
    with pytest.raises(BadInput, match="frozen"):
        Networks(FlatModel(frozen, (FEATURES,), 10), {0.5: flat("frozen")})


def test_private_updates_of_networks_with_buffers_are_noised_whole() -> None:
    privacy = Privacy("gaussian", 1.0, 1.0, 1e-5, where="update")
    model = flat("batchnorm")
    update = Client(0, model, *examples(), 0, privacy).perform(task_of(model), {})
    assert update.delta.numel() == model.layout.size
    assert (update.delta != 0).all()
    task = replace(task_of(model), spec=replace(SPEC, last_layer_only=True))
    update = Client(0, model, *examples(), 0, privacy).perform(task, {})
    rest = torch.ones(model.layout.size, dtype=torch.bool)
    rest[model.head] = False
    assert not update.delta[rest].any()


def test_dropout_is_clipped_per_example() -> None:
    model, (x, y) = FlatModel(dropout, (FEATURES,), 10), examples()
    spec = replace(SPEC, clip=0.1, momentum=0.0)
    plan = plan_batches(25, spec, task_rng(0, 0, 0))
    trained = local_update(model, model.init(0), x, y, spec, plan)
    assert (trained - model.init(0)).norm() <= 0.1 * 0.05 * len(plan.order) + 1e-6


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x)


def test_lazy_layers_and_other_precisions() -> None:
    model = FlatModel(lambda: nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 2)), (4,), 2)
    assert model.layout.size == 4 * 5 + 5 + 5 * 2 + 2
    double = FlatModel(lambda: nn.Linear(4, 2).double(), (4,), 2)
    assert double.init(0).dtype is torch.float32
    assert double.logits(double.init(0), torch.zeros(3, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Counting(), "buffer 'steps' of torch.int64"),
        (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)), "GroupNorm"),
        (nn.Linear(4, 2).requires_grad_(False), "all parameters are frozen"),
    ],
)
def test_what_cannot_be_federated_is_refused_in_one_line(module: nn.Module, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        FlatModel(lambda: module, (4,), 2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
