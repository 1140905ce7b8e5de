"""Networks of every kind that people come with, for 8x8 images as 64 numbers; `module:callable`."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

FEATURES, CLASSES = 64, 10


def batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(FEATURES, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, CLASSES),
    )


def counting() -> nn.Module:
    """BatchNorm whose running statistics are means over all batches, so that the count matters."""
    net = batchnorm()
    net[2].momentum = None
    return net


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


def both() -> nn.Module:
    return nn.Sequential(*batchnorm()[:-1], nn.Dropout(0.2), nn.Linear(16, CLASSES))


class Positional(nn.Module):
    """Adds a constant buffer, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1, FEATURES))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1) + self.positions)


def frozen() -> nn.Module:
    """Random features that stay as they are, and an output layer that is trained."""
    features = nn.Linear(FEATURES, 32)
    features.requires_grad_(False)
    return nn.Sequential(nn.Flatten(), features, nn.ReLU(), nn.Linear(32, CLASSES))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.output = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.second(self.first(x.flatten(1)).relu()).relu())


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained matrix of low rank."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, inner.in_features))
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


def lora() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        LoraLinear(nn.Linear(FEATURES, 64), 4),
        nn.ReLU(),
        LoraLinear(nn.Linear(64, CLASSES), 4),
    )


def peft_lora() -> nn.Module:
    """LoRA layers of the package `peft` around the linear layers of a network."""
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    wanted = peft.LoraConfig(r=4, target_modules=["1", "3"], lora_dropout=0.1)
    return peft.get_peft_model(base, wanted)


def spectral() -> nn.Module:
    """A layer whose buffers a forward pass replaces instead of changing them in place."""
    return nn.Sequential(
        nn.Flatten(), spectral_norm(nn.Linear(FEATURES, 16)), nn.ReLU(), nn.Linear(16, CLASSES)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, 2, batch_first=True, dropout=0.1)
        self.output = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(x.reshape(-1, 8, 8))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.output = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layer(x.reshape(-1, 8, 8)).flatten(1))


KINDS = {
    "batchnorm": batchnorm,
    "counting": counting,
    "convolutional": convolutional,
    "dropout": dropout,
    "both": both,
    "Positional": Positional,
    "frozen": frozen,
    "Tied": Tied,
    "lora": lora,
    "spectral": spectral,
    "Recurrent": Recurrent,
    "Attentive": Attentive,
}
