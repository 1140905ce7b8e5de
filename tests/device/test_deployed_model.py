"""The model that a device uses between its tasks."""

import pytest
import torch
from safetensors.torch import save

from latecomer.core.messages import ServingSettings
from latecomer.device.deployed_model import FILE, load_deployed_model, save_deployed_model
from latecomer.device.disk import replace_file
from latecomer.device.flat import flat_model
from latecomer.device.networks import build_networks
from latecomer.device.personalisation import prior_shift
from latecomer.errors import BadInput

MODEL = flat_model("mlp", (4,), 3, (5,))
LABELS = torch.tensor([0, 0, 0, 1])
MINE = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def kept(folder, use, change=None, model=MODEL, submodel=""):
    params = model.init(1)
    save_deployed_model(folder, params, change, submodel, use)
    return params


def trained(params, labels=LABELS):
    """After it has learnt these labels of its own examples."""
    params = params.clone()
    for _ in range(300):
        at = params.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(MODEL.logits(at, MINE), labels)
        params -= 0.3 * torch.autograd.grad(loss, at)[0]
    return params


def test_without_settings_it_is_the_model_of_the_task(tmp_path):
    params = kept(tmp_path, ServingSettings(), torch.ones(MODEL.layout.size))
    assert torch.equal(
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)(X), MODEL.logits(params, X).detach()
    )


def test_interpolation_prior_correction_and_output_bias_by_hand(tmp_path):
    change = 2 * (trained(MODEL.init(1)) - MODEL.init(1))
    use = ServingSettings(0.5, 1.0, class_prior=(0.5, 0.25, 0.25), output_bias=(0.0, 1.0, -1.0))
    params = kept(tmp_path, use, change)
    found = load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    offset = torch.tensor([0.0, 1.0, -1.0])
    offset = offset + prior_shift(LABELS, 3, torch.tensor([0.5, 0.25, 0.25]))
    tried = [params + part * change for part in (0.0, 0.125, 0.25, 0.5)]
    wrong = [int(((MODEL.logits(p, MINE) + offset).argmax(1) != LABELS).sum()) for p in tried]
    assert min(wrong) < wrong[0]
    best = tried[wrong.index(min(wrong))]
    assert torch.allclose(found(X), MODEL.logits(best, X) + offset)
    assert found.settings == use


def test_an_update_that_raises_the_training_errors_is_left_out(tmp_path):
    right = trained(MODEL.init(1))
    save_deployed_model(
        tmp_path, right, trained(right, (LABELS + 1) % 3) - right, "", ServingSettings(1.0)
    )
    assert torch.equal(load_deployed_model(tmp_path, MODEL, MINE, LABELS).params, right)


def test_a_prior_of_other_classes_is_ignored(tmp_path):
    params = kept(
        tmp_path,
        ServingSettings(prior_correction=1.0, class_prior=(0.5, 0.5), output_bias=(9.0, -9.0)),
    )
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
    with pytest.raises(BadInput, match="format 1, this version reads 2; the device's next task"):
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(BadInput, match="damaged"):
        load_deployed_model(tmp_path, MODEL, MINE, LABELS)
