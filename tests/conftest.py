"""A toy fleet whose training is one line, so that engines and strategies are tested in no time."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)

# A busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
