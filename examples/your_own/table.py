"""Regression on a table, one device per house: `python table.py energy.csv`, or without a file."""

import sys

import numpy as np
import pandas as pd
from torch import nn

import latecomer


def made_up(path: str = "energy.csv") -> str:
    """Writes a table of 20 houses with numbers, a column of text, and missing values."""
    rng = np.random.default_rng(1)
    cold, people = rng.normal(size=1000), rng.integers(1, 5, 1000)
    table = pd.DataFrame({"house": np.arange(1000) % 20, "cold": cold, "people": people})
    table["weather"] = np.where(cold > 1, "snow", "dry")
    table["energy"] = 2.0 * cold + people + 0.1 * rng.normal(size=1000)
    table.loc[::50, "cold"] = np.nan
    table.to_csv(path, index=False)
    print(f"no file given: a made-up table in {path}")
    return path


def main(path: str, updates: int = 400, out: str = "runs/table") -> latecomer.Result:
    columns = {"target": "energy", "subject": "house", "partition": "by-subject"}
    config = {
        "data": {"source": "csv", "path": path, **columns},
        "fleet": {"profile": "tiers"},  # fast and slow houses
        "training": {"lr": 0.02},
        "stop": {"updates": updates},
    }
    net = nn.Sequential(nn.LazyLinear(32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    return latecomer.run(config, out, model=net, loss="mse", strategy="fedbuff")


if __name__ == "__main__":
    result = main(sys.argv[1] if sys.argv[1:] else made_up())
    print(result.metrics[["updates", "rmse", "r2"]])
