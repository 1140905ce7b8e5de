"""EchoPFL's Algorithm 1 and the distance of soft labels, by hand."""

import math

import pytest
import torch

from latecomer.strategies.parts.cluster_merge import merged_params, symmetric_kl


def test_algorithm_1_by_hand():
    main = torch.tensor([0.0, 0.0, 0.0, 1.0])
    auxiliary = torch.tensor([1.0, 2.0, -1.0, 3.0])
    posterior = torch.tensor([0.5, 0.5, 0.5, -1.0])
    # (aux - main) * posterior = 0.5, 1, -0.5, -2: alpha = 0.5, 1, 0, 0.
    assert merged_params(main, auxiliary, posterior).tolist() == [0.5, 2.0, 0.0, 1.0]


def test_only_the_way_counts_not_how_far_a_device_went():
    generator = torch.Generator().manual_seed(0)
    main, auxiliary, posterior = torch.randn(3, 50, generator=generator)
    short, long = (merged_params(main, auxiliary, scale * posterior) for scale in (0.01, 100.0))
    assert torch.allclose(short, long, atol=1e-6)


@pytest.mark.parametrize("posterior", [[-1.0, 2.0], [0.0, 0.0]])
def test_where_nothing_agrees_the_main_model_stays(posterior):
    main, auxiliary = torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0])
    merged = merged_params(main, auxiliary, torch.tensor(posterior))
    assert torch.equal(merged, main)


def test_the_models_themselves_are_left_alone():
    main, auxiliary = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    for posterior in (torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])):
        merged = merged_params(main, auxiliary, posterior)
        merged += 5
        assert main.tolist() == [0.0, 1.0]
        assert auxiliary.tolist() == [1.0, 1.0]


def test_the_result_lies_between_the_two():
    generator = torch.Generator().manual_seed(1)
    main, auxiliary, posterior = torch.randn(3, 200, generator=generator)
    merged = merged_params(main, auxiliary, posterior)
    low, high = torch.minimum(main, auxiliary), torch.maximum(main, auxiliary)
    assert (merged >= low - 1e-6).all()
    assert (merged <= high + 1e-6).all()
    most = ((auxiliary - main) * posterior).argmax()
    assert merged[most] == auxiliary[most]


def test_symmetric_kl_by_hand():
    p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.25, 0.75]).double()
    there = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    back = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert symmetric_kl(p, q) == pytest.approx(there + back)
    assert symmetric_kl(q, p) == pytest.approx(there + back)
    assert symmetric_kl(p, p) == 0


def test_a_class_that_is_never_predicted_is_no_infinity():
    apart = symmetric_kl(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert math.isfinite(apart)
    assert apart > 10
