"""A toy fleet whose training is one line, so that engines and strategies are tested in no time."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
