"""An LSTM predicts the next character; one device per speaker: `python text.py play.txt`."""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from torch import Tensor, nn

import latecomer

LENGTH = 32  # characters per example
SPEECHES = {"ANN": "To be, or not to be. ", "BOB": "The rest is silence. ", "EVE": "Who's there? "}
MADE_UP = "\n\n".join(f"{name}:\n{20 * speech}" for name, speech in SPEECHES.items())


class NextCharacter(nn.Module):
    def __init__(self, characters: int = 128, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.output = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(x))[0])


def speakers(text: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each speaker with enough text, characters (n, LENGTH) and the ones that follow them."""
    said = defaultdict(str)
    for block in text.split("\n\n"):
        name, _, speech = block.partition(":\n")
        said[name] += speech + "\n"
    enough = [text for text in said.values() if len(text) > 5 * LENGTH]
    codes = [np.frombuffer(text.encode("ascii", "replace"), "uint8") for text in enough]
    windows = [np.lib.stride_tricks.sliding_window_view(c, LENGTH + 1)[::LENGTH] for c in codes]
    return [(w[:, :-1].astype("int64"), w[:, 1:].astype("int64")) for w in windows]


def main(path: str = "", updates: int = 400, out: str = "runs/text") -> latecomer.Result:
    config = {
        "fleet": {"profile": "tiers"},
        "training": {"optimizer": "adam", "lr": 0.01, "batch_size": 8},
        "strategy": {"name": "fedbuff", "size": 3},
        "stop": {"updates": updates},
    }
    print(path or "no file given: three speakers who repeat one sentence each")
    data = speakers(Path(path).read_text() if path else MADE_UP)
    return latecomer.run(config, out, model=NextCharacter, data=data, loss="cross-entropy")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics[["updates", "perplexity", "token_accuracy"]])
