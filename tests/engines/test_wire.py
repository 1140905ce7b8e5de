"""What travels comes out as it went in; what is malformed is refused before it is read."""

from dataclasses import fields, replace
from io import BytesIO

import numpy as np
import pytest
import torch

from latecomer.core.messages import Offer, ServingSettings, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel
from latecomer.engines.wire import (
    MAX_FINETUNE_EPOCHS,
    MAX_METRICS,
    Introduction,
    InvalidPayload,
    Packed,
    Payload,
    decode_introduction,
    decode_task,
    decode_update,
    encode_introduction,
    encode_task,
    encode_update,
    pack,
    unpack,
)

SIZE = 5
HALF = Submodel("width-0.5", torch.tensor([0, 2]))


def a_task(**changes):
    task = Task(7, 3, 2, "main", 4, TrainSpec(lr=0.1, prox=0.5), torch.randn(SIZE))
    return replace(task, **changes)


def an_update(**changes):
    update = Update(7, torch.randn(SIZE), 12, {"loss_rms": 0.5}, 0.1, 0, 1.5, False)
    return replace(update, **changes)


def whole(name):
    if name == "width-0.5":
        return HALF, 2
    if name:
        raise InvalidPayload(f"no network for {name!r}")
    return None, SIZE


def test_a_server_cannot_make_a_device_import_code():
    payload = encode_task(a_task(spec=TrainSpec(optimizer="os:system")), "s-7")
    with pytest.raises(InvalidPayload, match="module:callable"):
        decode_task(payload, whole)


def test_a_task_comes_out_as_it_went_in():
    spec = TrainSpec(
        3, 8, 0.2, 0.1, "adam", 0.3, 0.4, 1.5, True, 0.7, True, True, True, 0.2, 1, 0.3, True, 7
    )  # fmt: skip
    assert all(getattr(spec, f.name) != f.default for f in fields(TrainSpec))
    offers = (Offer("b", 9, torch.randn(SIZE)), Offer("c", 8, torch.randn(SIZE)))
    sent = a_task(spec=spec, offers=offers)
    order = decode_task(encode_task(sent, "s-7", "run 1"), whole)
    assert (order.key, order.run) == ("s-7", "run 1")
    task = order.task
    assert (task.device, task.number, task.spec) == (3, 2, spec)
    assert torch.equal(task.params, sent.params)
    for ours, theirs in zip(task.offers, offers, strict=True):
        assert torch.equal(ours.params, theirs.params)


@pytest.mark.parametrize("serving", [ServingSettings(), ServingSettings(True, 3, (0.25, 0.75))])
def test_how_a_model_is_used_goes_with_the_task(serving):
    assert (
        decode_task(encode_task(a_task(), "s-7", "run 1", serving=serving), whole).serving
        == serving
    )


def test_default_serving_settings_take_no_fields():
    assert not any(name.startswith("serving.") for name in encode_task(a_task(), "s-7").fields)
    fields = encode_task(a_task(), "s-7", serving=ServingSettings(finetune_epochs=2)).fields
    assert [name for name in fields if name.startswith("serving.")] == ["serving.finetune_epochs"]


@pytest.mark.parametrize(
    "changes",
    [
        {"serving.prior": "yes"},
        {"serving.prior": 1},
        {"serving.finetune_epochs": "many"},
        {"serving.finetune_epochs": [1]},
        {"serving.finetune_epochs": 1.5},
        {"serving.finetune_epochs": True},
        {"serving.class_prior": "1.0"},
        {"serving.class_prior": [0.0, float("inf")]},
        {"serving.class_prior": [True, False]},
        {"serving.class_prior": [0.0] * (MAX_METRICS + 1)},
    ],
)
def test_a_device_refuses_a_use_that_cannot_be(changes):
    payload = encode_task(a_task(), "s-7", serving=ServingSettings(True))
    with pytest.raises(InvalidPayload, match="must be a"):
        decode_task(replace(payload, fields={**payload.fields, **changes}), whole)


@pytest.mark.parametrize("epochs", [-1, MAX_FINETUNE_EPOCHS + 1, 10**12, -(2**63)])
def test_a_device_refuses_to_fine_tune_without_end(epochs):
    payload = encode_task(a_task(), "s-7", serving=ServingSettings())
    fields = {**payload.fields, "serving.finetune_epochs": epochs}
    with pytest.raises(InvalidPayload, match="finetune_epochs must be 0 to 100"):
        decode_task(replace(payload, fields=fields), whole)


@pytest.mark.parametrize("epochs", [0, MAX_FINETUNE_EPOCHS])
def test_a_device_accepts_as_many_epochs_as_a_config_may_ask_for(epochs):
    settings = ServingSettings(finetune_epochs=epochs)
    assert decode_task(encode_task(a_task(), "s-7", serving=settings), whole).serving == settings


def test_a_task_does_not_reveal_lineage_and_version():
    payload = encode_task(a_task(lineage="cluster of the ill"), "k")
    assert "cluster of the ill" not in str(payload.fields)


def test_a_submodel_travels_by_name():
    sent = a_task(submodel=HALF, params=torch.randn(2))
    task = decode_task(encode_task(sent, "k"), whole).task
    assert task.submodel is HALF
    assert torch.equal(task.params, sent.params)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec.lr": "fast"}, "spec.lr is a str"),
        ({"spec.local_epochs": True}, "spec.local_epochs is a bool"),
        ({"spec.new": 1}, "unknown to this version"),
        ({"models": 2}, "shape"),
        ({"models": 0}, "models = 0"),
        ({"models": 10**9}, "allowed is 1 to 1000"),
        ({"submodel": "wide"}, "no network"),
        ({"task": 5}, "'task' is missing"),
    ],
)
def test_a_device_refuses_a_task_it_cannot_understand(changes, reason):
    payload = encode_task(a_task(), "k")
    with pytest.raises(InvalidPayload, match=reason):
        decode_task(Payload({**payload.fields, **changes}, array=payload.array), whole)


def test_a_spec_of_an_older_server_has_the_defaults():
    payload = encode_task(a_task(), "k")
    fields = {
        name: value for name, value in payload.fields.items() if name != "spec.accumulate_residual"
    }
    assert decode_task(Payload(fields, array=payload.array), whole).task.spec == a_task().spec


def test_an_update_comes_out_as_it_went_in():
    sent = an_update(last=True)
    got = decode_update(encode_update(sent, "k"), a_task(), "k")
    assert torch.equal(got.delta, sent.delta)
    for name in ("task_id", "num_examples", "metrics", "noise_std", "choice", "epsilon", "last"):
        assert getattr(got, name) == getattr(sent, name)


def test_a_sign_of_life_has_no_array():
    payload = encode_update(an_update(delta=None), "k")
    assert payload.array is None
    assert decode_update(payload, a_task(), "k").delta is None


def npy(values):
    file = BytesIO()
    np.save(file, values)
    return file.getvalue()


GOOD = np.zeros((1, SIZE), dtype="float32")
HUGE = npy(GOOD).replace(b"(1, 5), ", b"(1, 500000000), ")


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (None, "array is missing"),
        (Packed("float64", (1, SIZE), npy(GOOD.astype("float64"))), "must be float32"),
        (Packed("float32", (1, SIZE + 1), npy(GOOD)), "shape"),
        (Packed("float32", (SIZE,), npy(GOOD[0])), "shape"),
        (Packed("float32", (1, SIZE), npy(np.zeros((1, 5000), "float32"))), "more bytes"),
        (Packed("float32", (1, SIZE), npy(GOOD.astype("float64"))), "do not match its dtype"),
        (Packed("float32", (1, SIZE), npy(GOOD.astype("int32"))), "do not match its dtype"),
        (Packed("float32", (1, SIZE), npy(GOOD.astype(">f4"))), "do not match its dtype"),
        (Packed("float32", (1, SIZE), npy(GOOD)[:-4]), "do not match its dtype"),
        (Packed("float32", (1, SIZE), HUGE), "do not match its dtype"),
        (Packed("float32", (1, SIZE), b""), "do not match its dtype"),
        (Packed("float32", (1, SIZE), b"\x80\x04pickle"), "do not match its dtype"),
        (Packed("float32", (1, SIZE), "text"), "more bytes"),
    ],
)
def test_an_array_is_what_was_asked_for_or_refused(packed, reason):
    with pytest.raises(InvalidPayload, match=reason):
        unpack(packed, 1, SIZE)


def test_an_array_of_objects_is_refused_unread():
    hostile = Packed("float32", (1, SIZE), npy(np.array([[print] * SIZE], dtype=object)))
    with pytest.raises(InvalidPayload):
        unpack(hostile, 1, SIZE)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [1, 6, 70_000])
def test_arrays_of_any_size_pass(rows, size):
    vectors = [torch.randn(size) for _ in range(rows)]
    assert torch.equal(unpack(pack(*vectors), rows, size), torch.stack(vectors))


def test_what_is_unpacked_may_be_written_into():
    unpack(pack(torch.zeros(SIZE)), 1, SIZE)[0].add_(1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "another"}, "another task"),
        ({"skipped": True}, "contains an array"),
        ({"skipped": 1}, "skipped must be"),
        ({"choice": 1}, "choice"),
    ],
)
def test_an_answer_of_the_wrong_form_is_refused(changes, reason):
    payload = encode_update(an_update(), "k")
    with pytest.raises(InvalidPayload, match=reason):
        decode_update(
            Payload({**payload.fields, **changes}, payload.metrics, payload.array), a_task(), "k"
        )


@pytest.mark.parametrize("name", ["task", "skipped", "choice", "epsilon", "last", "noise-std"])
def test_a_missing_field_is_named(name):
    payload = encode_update(an_update(), "k")
    fields = {n: value for n, value in payload.fields.items() if n != name}
    with pytest.raises(InvalidPayload, match=name):
        decode_update(Payload(fields, payload.metrics, payload.array), a_task(), "k")


@pytest.mark.parametrize(
    "metrics",
    [{}, {"num-examples": 1, "x" * 300: 1.0}, {f"m{i}": 0 for i in range(MAX_METRICS + 1)}],
)
def test_impossible_metrics_are_refused(metrics):
    payload = encode_update(an_update(), "k")
    with pytest.raises(InvalidPayload):
        decode_update(Payload(payload.fields, metrics, payload.array), a_task(), "k")


def test_an_introduction_comes_out_as_it_went_in():
    device = Introduction("kitchen", "abc", 0.5)
    assert decode_introduction(encode_introduction(device)) == device


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "a", "key": "b"},
        {"name": "", "key": "b", "width": 1.0},
        {"name": "a" * 300, "key": "b", "width": 1.0},
        {"name": "a", "key": 5, "width": 1.0},
        {"name": "a", "key": "b", "width": True},
        {"name": "a", "key": "b", "width": float("nan")},
        {"name": "a", "key": "b", "width": 2.0},
    ],
)
def test_an_introduction_of_the_wrong_form_is_refused(fields):
    with pytest.raises(InvalidPayload):
        decode_introduction(Payload(fields))
