from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latecomer.data.dataset import Dataset
from latecomer.data.exclusive_classes import ExclusiveClasses
from latecomer.data.federated_dataset import FederatedDataset, _split, federate
from latecomer.errors import BadInput

NAN = float("nan")
SPLIT = (0.64, 0.16, 0.2)


def numbered(n: int, classes: int = 2, **fields: Any) -> Dataset:
    """Example i has the value i + 1, so that every example is unique."""
    x = np.arange(1, n + 1, dtype=np.float32).reshape(-1, 1)
    return Dataset(x=x, y=np.arange(n) % classes, **fields)


def lay_out(dataset: Dataset, **change: Any) -> FederatedDataset:
    options: dict[str, Any] = {
        "partition": "iid",
        "devices": 4,
        "alpha": 0.5,
        "test": "fair",
        "scale": "none",
        "augment": "none",
        "seed": 1,
    }
    return federate(dataset, **options | change)


def values(x: torch.Tensor) -> list[int]:
    return sorted(int(value) for value in x.flatten())


def held(federation: FederatedDataset) -> list[int]:
    parts = [p for c in federation.clients for p in (c.train, c.validation, c.test)]
    return sorted(value for part in parts for value in values(part.x))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, (0, 0, 0)),
        (1, (1, 0, 0)),
        (2, (1, 0, 1)),
        (3, (2, 0, 1)),
        (4, (2, 1, 1)),
        (5, (3, 1, 1)),
        (25, (16, 4, 5)),
        (100, (64, 16, 20)),
    ],
)
def test_split_sizes(size: int, expected: tuple[int, ...]) -> None:
    parts = _split(np.arange(size), SPLIT, np.random.default_rng(0))
    assert tuple(len(part) for part in parts) == expected
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(8, 50),
    devices=st.integers(3, 60),
    partition=st.sampled_from(["iid", "dirichlet", "one-class"]),
    test=st.sampled_from(["fair", "held-out-clients", "official"]),
    seed=st.integers(0, 1000),
)
def test_every_example_is_in_exactly_one_part(
    n: int, devices: int, partition: str, test: str, seed: int
) -> None:
    data = numbered(n, test=np.arange(n) >= n - 2)
    if test == "fair":
        # A device of one example has nothing to test on, so at least one must have two.
        devices = min(devices, n - 1)
    made = lay_out(data, devices=devices, partition=partition, test=test, seed=seed)
    assert len(made.clients) == devices
    official = [n - 1, n] if test == "official" else []
    assert sorted(held(made) + official) == list(range(1, n + 1))
    seen = values(made.pooled().x) + values(made.validation.x)
    assert not set(values(made.test.x)) & set(seen)
    if test == "official":
        assert values(made.test.x) == official
    for client in made.clients:
        if len(client.validation.y):
            assert len(client.train.y)


def test_fair_is_the_union_of_the_devices_shares() -> None:
    made = lay_out(numbered(40))
    assert [len(c.train.y) for c in made.clients] == [6, 6, 6, 6]
    assert [len(c.validation.y) for c in made.clients] == [2, 2, 2, 2]
    assert torch.equal(made.test.x, torch.cat([c.test.x for c in made.clients]))
    assert len(made.test.y) == 8
    assert (made.num_classes, made.input_shape, made.notes) == (2, (1,), ())
    assert made.test.x.dtype == torch.float32
    assert made.test.y.dtype == torch.int64
    counts = made.class_counts()
    assert counts.shape == (4, 2)
    assert counts.sum(1).tolist() == [6, 6, 6, 6]
    assert len(made.pooled().y) == 24


def test_held_out_clients_keep_their_id_and_get_no_task() -> None:
    made = lay_out(numbered(100), devices=10, test="held-out-clients")
    out = [d for d, client in enumerate(made.clients) if len(client.train.y) == 0]
    assert len(out) == 2
    assert all(len(made.clients[d].test.y) == 10 for d in out)
    assert all(len(made.clients[d].validation.y) == 0 for d in out)
    assert torch.equal(made.test.x, torch.cat([made.clients[d].test.x for d in out]))
    assert made.notes == (
        f"2 devices hold the central test set, hence no task: {out[0]}, {out[1]}",
    )
    others = [lay_out(numbered(100), devices=10, test="held-out-clients", seed=s) for s in range(5)]
    assert len({tuple(values(other.test.x)) for other in others}) > 1


def test_official_keeps_the_marked_rows_apart() -> None:
    made = lay_out(numbered(50, test=np.arange(50) < 10), test="official")
    assert made.test.x.flatten().tolist() == list(range(1, 11))
    assert held(made) == list(range(11, 51))
    assert all(len(client.test.y) == 2 for client in made.clients)


def test_the_number_of_subjects_overrides_the_number_of_devices() -> None:
    subject = np.repeat([30, 10, 20], 10)
    made = lay_out(numbered(30, subject=subject), partition="by-subject", devices=5)
    assert len(made.clients) == 3
    first = [values(p.x) for p in (made.clients[0].train, made.clients[0].validation)]
    assert {value for part in first for value in part} <= set(range(11, 21))
    assert made.notes == ("partition by-subject makes 3 devices, one per subject, not 5",)
    assert lay_out(numbered(30, subject=subject), partition="by-subject", devices=3).notes == ()


def test_same_seed_same_federation() -> None:
    data = Dataset(x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 3)
    options = {"partition": "dirichlet", "scale": "local", "augment": "balanced"}
    one, two, other = (lay_out(data, seed=seed, **options) for seed in (5, 5, 6))
    assert torch.equal(one.pooled().x, two.pooled().x)
    assert torch.equal(one.test.x, two.test.x)
    assert not torch.equal(one.test.x, other.test.x)


def test_a_devices_split_depends_on_seed_and_device_only() -> None:
    subject = np.repeat([1, 2, 3], 10)
    whole = lay_out(numbered(30, subject=subject), partition="by-subject")
    fewer = lay_out(numbered(20, subject=subject[:20]), partition="by-subject")
    for device in range(2):
        assert torch.equal(whole.clients[device].train.x, fewer.clients[device].train.x)


def test_global_scale_uses_training_parts_only() -> None:
    data = numbered(40)
    raw, made = lay_out(data), lay_out(data, scale="global")
    train = raw.pooled().x.double()
    mean, std = train.mean(), train.std(correction=0)
    for part in ("test", "validation"):
        expected = (getattr(raw, part).x - mean) / std
        torch.testing.assert_close(getattr(made, part).x, expected.float())
    torch.testing.assert_close(made.pooled().x.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_local_scale_uses_each_devices_own_training_part() -> None:
    data = numbered(50, test=np.arange(50) < 10)
    raw, made = lay_out(data, test="official"), lay_out(data, test="official", scale="local")
    for before, after in zip(raw.clients, made.clients, strict=True):
        train = before.train.x.double()
        expected = (before.test.x - train.mean()) / train.std(correction=0)
        torch.testing.assert_close(after.test.x, expected.float())
    # The official test set belongs to no device.
    train = raw.pooled().x.double()
    expected = (raw.test.x - train.mean()) / train.std(correction=0)
    torch.testing.assert_close(made.test.x, expected.float())


def test_local_scale_of_held_out_devices_uses_their_test_part() -> None:
    made = lay_out(numbered(100), devices=10, test="held-out-clients", scale="local")
    for client in made.clients:
        if len(client.train.y) == 0:
            torch.testing.assert_close(client.test.x.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
            torch.testing.assert_close(client.test.x.std(correction=0), torch.tensor(1.0))


def test_a_feature_unobserved_on_a_device_has_the_pooled_mean() -> None:
    x = np.ones((20, 2), dtype=np.float32)
    x[:10, 1] = NAN
    x[10:, 1] = np.arange(10)
    data = Dataset(x=x, y=np.arange(20) % 2, subject=np.repeat([1, 2], 10))
    made = lay_out(data, partition="by-subject", devices=2, scale="local")
    assert (made.clients[0].train.x[:, 1] == 0).all()
    assert made.notes == ("10 missing values (25.00%) are set to the mean",)
    raw = lay_out(data, partition="by-subject", devices=2)
    mean = raw.clients[1].train.x[:, 1].mean()
    torch.testing.assert_close(raw.clients[0].train.x[:, 1], mean.expand(6))


def test_replicas_are_training_examples_only() -> None:
    plain, made = lay_out(numbered(40)), lay_out(numbered(40), augment="base")
    assert torch.equal(made.class_counts(), 2 * plain.class_counts())
    assert torch.equal(made.test.x, plain.test.x)
    assert torch.equal(made.validation.x, plain.validation.x)


def test_notes_on_empty_devices_and_absent_classes() -> None:
    data = numbered(8, class_names=("a", "b", "c"))
    made = lay_out(data, devices=16, partition="one-class", test="held-out-clients")
    assert made.notes[0].startswith("8 devices hold no data, hence no task: ")
    assert made.notes[-1].startswith("classes absent from the central test set: ")
    assert made.notes[-1].endswith("c")
    assert made.absent_classes == made.notes[-1].split(": ")[1].split(", ")
    many = lay_out(data, devices=20, test="held-out-clients").notes[0]
    assert many.endswith("8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 2 more")
    assert made.class_counts().shape == (16, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"partition": "pie"},
            r"partition 'pie' is unknown.* \(allowed: iid, dirichlet, one-class",
        ),
        ({"partition": "by-subject"}, "needs data with a subject"),
        ({"test": "official"}, "needs data that mark their test rows"),
        ({"test": "held-out-clients", "devices": 1}, "at least 2 devices with data"),
        ({"devices": 40}, "gives an empty central test set"),
    ],
)
def test_bad_requests(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        lay_out(numbered(40), **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("marked", [0, 10])
def test_official_needs_some_rows_but_not_all(marked: int) -> None:
    with pytest.raises(BadInput, match=f"{marked} of 10 rows are marked as test"):
        lay_out(numbered(10, test=np.arange(10) < marked), test="official")


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "one-class", "by-subject"])
@pytest.mark.parametrize("devices", [3, 17])
def test_global_scaling_is_scaling_the_pooled_data(partition: str, devices: int) -> None:
    """To 1e-6, for any partition, with missing values, a constant and a far-off feature."""
    rng = np.random.default_rng(7)
    y = rng.integers(0, 3, 200)
    x = rng.normal(size=(200, 5)) + y[:, None]
    x[:, 1] = 0.1  # constant
    x[:, 2] = 1e4 + x[:, 2]  # far off
    x[rng.random(x.shape) < 0.2] = NAN
    x[:, 3] = np.where(y == 1, x[:, 3], NAN)  # whole devices never see it
    data = Dataset(x=x.astype(np.float32), y=y, subject=rng.integers(0, devices, 200))
    raw = lay_out(data, partition=partition, devices=devices, scale="none")
    made = lay_out(data, partition=partition, devices=devices, scale="global")
    direct = _pooled_by_hand(data, raw)
    np.testing.assert_allclose(made.pooled().x.numpy(), direct, atol=1e-6)
    assert not made.pooled().x[:, 1].any()
    assert torch.isfinite(made.test.x).all()


def _pooled_by_hand(data: Dataset, raw: FederatedDataset) -> np.ndarray:
    """The training rows in the federation's order, scaled in one place in double precision."""
    by_value = {}
    for row in data.x:
        by_value.setdefault(tuple(row[~np.isnan(row)].tolist()), row)
    found = []
    for row in raw.pooled().x.numpy():
        match = [
            kept
            for kept in by_value.values()
            if np.array_equal(row[~np.isnan(kept)], kept[~np.isnan(kept)])
        ]
        found.append(max(match, key=lambda kept: (~np.isnan(kept)).sum()))
    train = np.stack(found).astype(np.float64)
    std = np.nanstd(train, axis=0)
    std[1] = 1.0
    return np.nan_to_num((train - np.nanmean(train, axis=0)) / std)


def test_replicas_by_name_of_the_class() -> None:
    data = numbered(20, class_names=("sit", "run"))
    made = lay_out(data, augment="base", devices=1, replicas={"run": 3})
    sit, run = made.class_counts()[0].tolist()
    plain = lay_out(data, devices=1).class_counts()[0].tolist()
    assert [sit, run] == [plain[0], 4 * plain[1]]
    with pytest.raises(BadInput, match=r"data\.replicas 'rum' is unknown; did you mean 'run'"):
        lay_out(data, augment="base", replicas={"rum": 3})


def test_a_note_counts_examples_outside_of_all_windows() -> None:
    made = lay_out(numbered(40), partition="time-window", window=6)
    assert len(held(made)) == 24
    assert made.notes[0] == "16 of 40 examples are in no device's window"


def test_notes_of_the_data_come_first() -> None:
    made = lay_out(numbered(40, notes=("half of it is gone",)))
    assert made.notes == ("half of it is gone",)


def test_only_the_holders_of_an_exclusive_class_have_it() -> None:
    data = numbered(400, classes=4)
    plain = lay_out(data)
    tied = lay_out(data, exclusive=ExclusiveClasses((3,), lambda counts: [1]))
    assert [3 in c.train.y for c in tied.clients] == [False, True, False, False]
    assert 3 in tied.test.y
    # The holder has what it had.
    assert values(tied.clients[1].train.x) == values(plain.clients[1].train.x)
    lost = len(held(plain)) - len(held(tied))
    (note,) = set(tied.notes) - set(plain.notes)
    left_out = f"{lost} of 400 examples are left out"
    assert note == f"{left_out}: fleet.late.only restricts their class to 1 devices"
    assert tied.holders == (1,)


def test_an_exclusive_class_must_be_trained_on() -> None:
    data = numbered(400, classes=4)
    few = lay_out(data, per_device=1)
    holder = next(d for d, c in enumerate(few.clients) if 3 not in c.train.y)
    with pytest.raises(BadInput, match=r"fleet\.late\.only: no training example of '3' is left"):
        lay_out(data, per_device=1, exclusive=ExclusiveClasses((3,), lambda _: [holder]))


def test_held_out_devices_are_tested_on_exclusive_classes_too() -> None:
    tied = lay_out(
        numbered(400, classes=4),
        devices=10,
        test="held-out-clients",
        exclusive=ExclusiveClasses((3,), lambda counts: [int(counts[:, 3].argmax())]),
    )
    assert 3 in tied.test.y
    assert not set(tied.holders) & set(tied.held_out)


@pytest.mark.parametrize(
    "y",
    [
        np.linspace(0, 1, 40),
        np.stack([np.arange(40) % 2, np.where(np.arange(40) % 3, 1.0, NAN)], axis=1),
        np.arange(120).reshape(40, 3),
    ],
    ids=["numbers", "multi-label", "tokens"],
)
def test_targets_of_any_kind_reach_the_devices(y: Any) -> None:
    data = Dataset(x=np.arange(1, 41, dtype=np.float32).reshape(-1, 1), y=y)
    made = lay_out(data, scale="none", augment="base")
    for client in made.clients:
        for part in (client.train, client.validation, client.test):
            rows = part.x[:, 0].round().long() - 1
            np.testing.assert_array_equal(part.y, data.y[rows])
            assert part.y.dtype == torch.from_numpy(data.y).dtype
    assert made.class_counts().tolist() == [[12], [12], [12], [12]]
    assert (made.num_classes, made.absent_classes) == (0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition": "dirichlet"}, "data.partition = 'dirichlet' needs class labels"),
        ({"partition": "one-class"}, "allowed are iid, by-subject and time-window"),
        ({"augment": "balanced"}, "data.augment = 'balanced' needs class labels"),
    ],
)
def test_settings_that_need_classes_refuse_other_targets(
    change: dict[str, Any], message: str
) -> None:
    data = Dataset(x=np.ones((40, 1)), y=np.linspace(0, 1, 40))
    with pytest.raises(BadInput, match=message):
        lay_out(data, **change)


@pytest.mark.parametrize("scale", ["global", "local", "none"])
def test_integer_inputs_are_never_scaled(scale: str) -> None:
    tokens = np.arange(80).reshape(40, 2)
    made = lay_out(Dataset(x=tokens, y=tokens), scale=scale, augment="base")
    assert made.test.x.dtype == torch.int64
    assert torch.equal(made.test.x, made.test.y)
    assert all(torch.equal(client.train.x, client.train.y) for client in made.clients)
