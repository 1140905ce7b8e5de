"""Next-character prediction on plays, with one device per speaker.

The text holds one speech per block: `NAME:` on a line of its own, the speech, an empty line.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from torch import Tensor, nn

LENGTH = 40  # characters per example
MIN_SPEECHES = 20  # of a speaker, to be a device
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def devices(path: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each speaker the characters (n, LENGTH) of its speeches, and those that follow them."""
    speeches = defaultdict(list)
    for block in Path(path).read_text(encoding="utf-8").split("\n\n"):
        name, colon, speech = block.strip().partition(":\n")
        if colon:
            speeches[name].append(speech + "\n")
    number = {character: i for i, character in enumerate(CHARACTERS)}
    made = []
    for name in sorted(speeches):
        text = "".join(speeches[name])
        codes = np.array([number[character] for character in text if character in number])
        count = (len(codes) - 1) // LENGTH
        if len(speeches[name]) >= MIN_SPEECHES and count > 1:
            x = codes[: count * LENGTH].reshape(count, LENGTH)
            made.append((x, codes[1 : count * LENGTH + 1].reshape(count, LENGTH)))
    return made


class NextCharacter(nn.Module):
    """Logits of the next character from the last four, by a causal convolution.

    `num_classes` is the number of different characters in the data.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 32)
        self.convolution = nn.Conv1d(32, 128, kernel_size=4)
        self.out = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        past = nn.functional.pad(self.embedding(x.long()).transpose(1, 2), (3, 0))
        return self.out(self.convolution(past).relu().transpose(1, 2))
