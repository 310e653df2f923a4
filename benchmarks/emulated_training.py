"""Measures the cost of training on the emulated device compared with the CPU, for a model of 20 million parameters.

    python benchmarks/emulated_training.py [--steps 5] [--repeat 5]

Both devices train in one process and take turns, so that other load on the machine affects both equally. The ratio
compares the fastest repeat of each.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import fsdp_doctor.emulated  # noqa: F401, which registers the device

_WIDTH, _LAYERS, _TOKENS, _BATCH = 512, 6, 64, 4


def model_of_20_million() -> nn.Module:
    layer = nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, _LAYERS), nn.Linear(_WIDTH, 2 * _WIDTH))


class Training:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = model_of_20_million().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.inputs = torch.randn(_BATCH, _TOKENS, _WIDTH).to(device)

    def step(self) -> Tensor:
        loss: Tensor = self.model(self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def seconds(self, steps: int) -> float:
        """Returns the average seconds of one step over ``steps`` steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step().item()
        return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()

    trainings = [Training("cpu"), Training("emulated")]
    count = sum(parameter.numel() for parameter in trainings[0].model.parameters())
    print(f"parameters                 {count / 1e6:8.1f} million, {torch.get_num_threads()} threads")
    for training in trainings:
        training.step()
    times = [[training.seconds(options.steps) for training in trainings] for _ in range(options.repeat)]
    cpu, emulated = (min(each) for each in zip(*times, strict=True))
    print(f"a step on the CPU          {cpu * 1e3:8.0f} ms")
    print(f"a step on the device       {emulated * 1e3:8.0f} ms")
    print(f"emulated / cpu             {emulated / cpu:8.2f}")


if __name__ == "__main__":
    main()
