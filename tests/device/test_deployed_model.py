"""The model that a device uses between its tasks."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from latecomer.core.messages import ServingSettings, TrainSpec
from latecomer.device.deployed_model import (
    FILE,
    FORMAT,
    load_deployed_model,
    save_deployed_model,
)
from latecomer.device.disk import replace_file
from latecomer.device.flat import flat_model
from latecomer.device.networks import build_networks
from latecomer.device.personalisation import personalise, prior_shift
from latecomer.device.training import average_loss
from latecomer.errors import BadInput

MODEL = flat_model("mlp", (4,), 3, (5,))
LABELS = torch.tensor([0, 0, 0, 1])
MINE = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


SPEC = TrainSpec(local_epochs=1, batch_size=2, lr=0.3)


def kept(folder, settings, model=MODEL, submodel="", spec=SPEC):
    params = model.init(1)
    save_deployed_model(folder, params, submodel, settings, spec)
    return params


def test_without_settings_it_is_the_model_of_the_task(tmp_path):
    params = kept(tmp_path, ServingSettings())
    assert torch.equal(
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)(X), MODEL.logits(params, X).detach()
    )


def test_prior_correction_by_hand(tmp_path):
    settings = ServingSettings(True, 0, (0.5, 0.25, 0.25))
    params = kept(tmp_path, settings)
    found = load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    bias = prior_shift(LABELS, 3, torch.tensor([0.5, 0.25, 0.25]))
    assert torch.allclose(found(X), MODEL.logits(params, X) + bias)
    assert torch.equal(found.params, params)
    assert found.settings == settings


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_it_is_fine_tuned_by_the_stored_training_program(tmp_path, optimizer):
    """Every field of the program and of the settings is read back as it was stored."""
    spec = replace(SPEC, optimizer=optimizer, weight_decay=0.01, momentum=0.9, report_shares=True)
    settings = ServingSettings(True, 5, (0.5, 0.25, 0.25))
    params = kept(tmp_path, settings, spec=spec)
    expected = personalise(MODEL, params, settings, spec, MINE, LABELS)
    found = load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    assert found.settings == settings
    assert torch.equal(found.params, expected.params)
    assert torch.equal(found.output_bias, expected.output_bias)
    assert average_loss(MODEL, found.params, MINE, LABELS) < average_loss(
        MODEL, params, MINE, LABELS
    )


def test_a_prior_of_other_classes_is_ignored(tmp_path):
    params = kept(tmp_path, ServingSettings(prior=True, class_prior=(0.5, 0.5)))
    expected = MODEL.logits(params, X) + prior_shift(LABELS, 3)
    assert torch.allclose(load_deployed_model(tmp_path, MODEL, MINE, LABELS)(X), expected)


def test_a_narrower_network_is_found_again(tmp_path):
    networks = build_networks("mlp", (4,), 3, (8,), (1.0, 0.5))
    name, narrow = networks.submodels[0.5].name, networks(networks.submodels[0.5])
    params = kept(tmp_path, ServingSettings(), model=narrow, submodel=name)
    assert torch.equal(
        load_deployed_model(tmp_path, networks, MINE, LABELS)(X), narrow.logits(params, X).detach()
    )


def test_a_model_that_cannot_be_used_gives_one_line(tmp_path):
    with pytest.raises(BadInput, match="has not finished a task"):
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    kept(tmp_path, ServingSettings())
    with pytest.raises(BadInput, match="of another network"):
        load_deployed_model(tmp_path, flat_model("mlp", (4,), 3, (6,)), MINE, LABELS)
    replace_file(tmp_path / FILE, save({"params": torch.zeros(1)}, {"told": "{}"}))
    with pytest.raises(BadInput, match="format 1, this version reads 4; the device's next task"):
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    stored = {"format": FORMAT, "submodel": "", "settings": {}, "spec": {"unknown": 1}}
    replace_file(tmp_path / FILE, save({"params": torch.zeros(1)}, {"model": json.dumps(stored)}))
    with pytest.raises(BadInput, match="damaged"):
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(BadInput, match="damaged"):
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)
