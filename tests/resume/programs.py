"""A program that resumes rightly, and one with each published fault: ``programs.py NAME --dir DIR [--resume]``.

:class:`Right` saves everything that training depends on. Each other class is that program with one thing wrong, and
names where that was published.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Sampler, TensorDataset

_LAST_STEP = 24


class Order(Sampler[int]):
    """A random order, another in each epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 24


class Ema:
    """An average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)


class Right:
    """Six batches an epoch, a save after every fourth step, in a file of each rank."""

    ranks = 1
    at = 4
    every = 4
    twice = False
    accumulated = 1

    def __init__(self, directory: str) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.directory = directory
        self.seed()
        self.model = self.make_model()
        self.trained = self.list_trained()
        self.optimizer = self.make_optimizer()
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=_LAST_STEP)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        self.ema = Ema(self.model)
        data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        self.order = Order()
        self.loader = DataLoader(TensorDataset(data), 4, sampler=self.order, generator=torch.Generator())
        self.step = 0
        self.position = 0  # in batches, of the whole run

    def seed(self) -> None:
        torch.manual_seed(7 + self.rank)

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def list_trained(self) -> list[Any]:
        return list(self.model.parameters())

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, lr=0.1)

    def file(self) -> str:
        return os.path.join(self.directory, f"saved{self.rank}.pt")

    def collect(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.shadow,
            "step": self.step,
            "position": self.position,
            "generator": torch.get_rng_state(),
        }

    def save(self) -> None:
        torch.save(self.collect(), self.file())

    def load(self) -> None:
        saved = torch.load(self.file(), weights_only=False)
        self.load_model(saved)
        self.load_optimizer(saved)
        self.load_schedule(saved)
        self.load_scaler(saved)
        self.load_ema(saved)
        self.step = saved["step"]
        self.load_position(saved)
        self.load_generator(saved)

    def load_model(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        # Which takes over the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    def load_schedule(self, saved: dict[str, Any]) -> None:
        self.schedule.load_state_dict(saved["schedule"])

    def load_scaler(self, saved: dict[str, Any]) -> None:
        self.scaler.load_state_dict(saved["scaler"])

    def load_ema(self, saved: dict[str, Any]) -> None:
        self.ema.shadow = saved["ema"]

    def load_position(self, saved: dict[str, Any]) -> None:
        self.position = saved["position"]

    def load_generator(self, saved: dict[str, Any]) -> None:
        torch.set_rng_state(saved["generator"])

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            epoch, begin = divmod(self.position, len(self.loader))
            self.order.epoch = epoch
            for (batch,) in itertools.islice(self.loader, begin, None):
                self.position += 1
                yield batch

    def train(self, resume: bool) -> None:
        if resume:
            self.load()
        batches = self.batches()
        while self.step < _LAST_STEP:
            for batch in itertools.islice(batches, self.accumulated):
                self.scaler.scale(self.model(batch).square().mean()).backward()
            self.update()
            self.step += 1
            if self.step % self.every == 0:
                self.save()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.ema.update(self.model)


class Sharded(Right):
    """Program on two ranks under FSDP2; the head has three rows, so its shards are uneven."""

    ranks = 2

    def make_model(self) -> nn.Module:
        dist.init_process_group("gloo")
        model = super().make_model()
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class EndOfEpoch(Right):
    at = every = 6


class SecondEpoch(Right):
    at = every = 8


class Twice(Right):
    twice = True


class Accumulated(Right):
    accumulated = 2


class TimeSeed(Right):
    """Seeded by the clock, but the generator's state is saved."""

    def seed(self) -> None:
        torch.manual_seed(7)

    def train(self, resume: bool) -> None:
        random.seed(time.time_ns())
        super().train(resume)


class Closure(Right):
    """The forward comes within the optimizer's step, as Lightning has it."""

    def train(self, resume: bool) -> None:
        if resume:
            self.load()
        batches = self.batches()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(next(batches)).square().mean()
            loss.backward()
            return loss

        while self.step < _LAST_STEP:
            self.optimizer.step(closure)
            self.schedule.step()
            self.ema.update(self.model)
            self.step += 1
            if self.step % self.every == 0:
                self.save()


class TwoOptimizers(Right):
    """Program in which each layer has an optimizer of its own."""

    def list_trained(self) -> list[Any]:
        self.second = torch.optim.SGD(self.model[2].parameters(), lr=0.1, momentum=0.9)
        return list(self.model[0].parameters())

    def collect(self) -> dict[str, Any]:
        return super().collect() | {"second": self.second.state_dict()}

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        super().load_optimizer(saved)
        self.second.load_state_dict(saved["second"])

    def update(self) -> None:
        self.scaler.step(self.second)
        super().update()
        self.second.zero_grad()


class Grouped(Right):
    """A model with matrices of one shape, in groups of other decays that change their order after a resume."""

    order_of_groups = (2, 0, 1)

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3))

    def list_trained(self) -> list[Any]:
        first, second, *rest = sorted(self.model.parameters(), key=lambda p: -p.numel())
        groups = [
            {"params": [first], "weight_decay": 0.5},
            {"params": [second], "weight_decay": 0.0},
            {"params": rest, "weight_decay": 0.1},
        ]
        return self.arrange(groups) if "--resume" in sys.argv else groups

    def arrange(self, groups: list[Any]) -> list[Any]:
        return [groups[at] for at in self.order_of_groups]

    def collect(self) -> dict[str, Any]:
        names = {p: name for name, p in self.model.named_parameters()}
        return super().collect() | {"by_name": {names[p]: state for p, state in self.optimizer.state.items()}}

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        named = dict(self.model.named_parameters())
        for name, state in copy.deepcopy(saved["by_name"]).items():
            self.optimizer.state[named[name]] = state
        for group in self.optimizer.param_groups:
            group["lr"] = saved["optimizer"]["param_groups"][0]["lr"]
            group["initial_lr"] = saved["optimizer"]["param_groups"][0]["initial_lr"]


class GroupsByNumber(Grouped):
    """The first two groups have each other's matrix after a resume, and the state is loaded by numbers."""

    def arrange(self, groups: list[Any]) -> list[Any]:
        groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
        return groups

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        Right.load_optimizer(self, saved)


class SecondOptimizerNotLoaded(TwoOptimizers):
    def load_optimizer(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(saved["optimizer"])


class Augmented(Right):
    """Batches with noise of the generator that is saved; it is restored before the first one is fetched."""

    def batches(self) -> Iterator[torch.Tensor]:
        for batch in super().batches():
            yield batch + torch.randn(batch.shape)


class Scratch(Right):
    """A buffer that is not saved, and counts calls."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_buffer("calls", torch.zeros(()), persistent=False)

        def count(module: Any, _: Any) -> None:
            module.calls.add_(1)

        model.register_forward_pre_hook(count)
        return model


class Masters(Right):
    """The model is bfloat16, and the optimizer has copies in FP32."""

    def make_model(self) -> nn.Module:
        return super().make_model().bfloat16()

    def list_trained(self) -> list[Any]:
        return [nn.Parameter(p.detach().float()) for p in self.model.parameters()]

    def collect(self) -> dict[str, Any]:
        return super().collect() | {"masters": [p.detach().clone() for p in self.trained]}

    def load_model(self, saved: dict[str, Any]) -> None:
        super().load_model(saved)
        for p, value in zip(self.trained, saved["masters"], strict=True):
            p.data.copy_(value)

    def batches(self) -> Iterator[torch.Tensor]:
        yield from (batch.bfloat16() for batch in super().batches())

    def update(self) -> None:
        for master, p in zip(self.trained, self.model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        super().update()
        for master, p in zip(self.trained, self.model.parameters(), strict=True):
            p.data.copy_(master)


class EmptyTemplate(Right):
    """KempnerForge 115: distributed checkpoint loads into the state dict of an optimizer that has none."""

    def save(self) -> None:
        super().save()
        dcp.save({"optimizer": self.optimizer.state_dict()}, checkpoint_id=self.directory + "/dcp", no_dist=True)

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        state = {"optimizer": self.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=self.directory + "/dcp", no_dist=True)
        self.optimizer.load_state_dict(state["optimizer"])


class OptimizerOfRankZero(Sharded):
    """transformers 23034: the optimizer is saved and loaded on rank 0 alone."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        if self.rank == 0:
            super().load_optimizer(saved)


class OptionsNotLoaded(Right):
    """prime-rl 3561: tensors are loaded, and the options of the groups are not. The decay is changed in training."""

    def update(self) -> None:
        super().update()
        self.optimizer.param_groups[0]["weight_decay"] *= 0.9

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        options = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        super().load_optimizer(saved)
        self.optimizer.param_groups[0].update(options, lr=self.optimizer.param_groups[0]["lr"])


class LoadedInPlace(Right):
    """dcp.load has filled the tensors of the optimizer's state, and nothing has loaded the options of its groups."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        for number, p in enumerate(self.trained):
            self.optimizer.state[p] = copy.deepcopy(saved["optimizer"]["state"][number])


class DummyStateKept(Right):
    """Megatron-Bridge 5680: a step makes the state, and then nothing is loaded into it."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        for p in self.trained:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.load_model(saved)


class MastersNotRefreshed(Masters):
    """prime-rl 3234: the model is loaded, and the copies in FP32 are those of the start."""

    def load_model(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])


class QuantizedState(Right):
    """flashoptim 3: moments come back from the checkpoint with other values."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        super().load_optimizer(saved)
        for state in self.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].half().float()


class MastersFromBfloat16(Masters):
    """OpenTau 185: the copies in FP32 are made of the bfloat16 weights."""

    def load_model(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        for master, p in zip(self.trained, self.model.parameters(), strict=True):
            master.data.copy_(p)


class UnevenShardsKept(Sharded):
    """torchtitan 1136: a state dict is made once, and its padded shards are copies."""

    every = 2
    kept: Any = None

    def collect(self) -> dict[str, Any]:
        state = super().collect()
        if self.kept is None:
            self.kept = {name: value.clone() for name, value in state["model"].items() if name.startswith("2.")}
        return state | {"model": {**state["model"], **self.kept}}


class FirstSaveAgain(Right):
    """NeMo-RL 3312: an asynchronous save stages its copy once, and writes it at each save."""

    every = 2
    staged: Any = None

    def collect(self) -> dict[str, Any]:
        state = super().collect()
        if self.staged is None:
            self.staged = {name: value.clone() for name, value in state["model"].items()}
        return state | {"model": self.staged}


class ScheduleTwice(Right):
    """slime 1546: the schedule is loaded, and stepped to where it is again."""

    def load_schedule(self, saved: dict[str, Any]) -> None:
        super().load_schedule(saved)
        for _ in range(saved["step"]):
            self.schedule.step()


class ScheduleSavedBeforeStep(Right):
    """Lightning 1772: the schedule is saved before it is stepped."""

    def update(self) -> None:
        self.before = self.schedule.state_dict()
        super().update()

    def collect(self) -> dict[str, Any]:
        return super().collect() | {"schedule": self.before}


class ScheduleAfterLoad(Right):
    """yolov5 292: the schedule is made after the load."""

    def load_schedule(self, saved: dict[str, Any]) -> None:
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=_LAST_STEP)


class LengthOfTheRest(Right):
    """OneTrainer 1604: the length of the schedule is computed of what is left."""

    def load_schedule(self, saved: dict[str, Any]) -> None:
        super().load_schedule(saved)
        self.schedule.T_max = _LAST_STEP - saved["step"]


class ScalerNotLoaded(Right):
    """transformers 34053."""

    def load_scaler(self, saved: dict[str, Any]) -> None:
        pass


class ScalerAdvanced(Right):
    """accelerate 4289: a step that makes the optimizer's state goes through the restored scaler."""

    def load_scaler(self, saved: dict[str, Any]) -> None:
        super().load_scaler(saved)
        self.scaler.scale(torch.zeros(()))
        for p in self.trained:
            p.grad = torch.zeros_like(p)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.load_model(saved)
        self.load_optimizer(saved)


class EmaMadeAnew(Right):
    """Samudra 282."""

    def load_ema(self, saved: dict[str, Any]) -> None:
        self.ema = Ema(self.model)


class WeightsOfEma(Right):
    """YOLOX 1318: the average is loaded into the model."""

    def load_model(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["ema"])


class LoaderNotSaved(Right):
    """KempnerForge 51."""

    def load_position(self, saved: dict[str, Any]) -> None:
        pass


class SkipOffByOne(Right):
    """mini_trainer 79."""

    def load_position(self, saved: dict[str, Any]) -> None:
        self.position = saved["position"] - 1


class SkipWithoutAccumulation(Accumulated):
    """transformers 8624: steps are skipped as if each were one batch."""

    def load_position(self, saved: dict[str, Any]) -> None:
        self.position = saved["step"] + 1


class EpochNotSet(SecondEpoch):
    """accelerate 2016: the first epoch after a resume has the order of epoch 0."""

    resumed = False

    def load_position(self, saved: dict[str, Any]) -> None:
        super().load_position(saved)
        self.resumed = True

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            epoch, begin = divmod(self.position, len(self.loader))
            self.order.epoch, self.resumed = 0 if self.resumed else epoch, False
            for (batch,) in itertools.islice(self.loader, begin, None):
                self.position += 1
                yield batch


class LoaderExhausted(EndOfEpoch):
    """verl 5725: at the end of an epoch the restored loader has nothing left, and the job takes itself for finished."""

    def train(self, resume: bool) -> None:
        if not resume:
            super().train(resume)


class OffsetLost(Twice):
    """KempnerForge 57: a resumed run saves the batches since its own start."""

    begun = 0

    def load_position(self, saved: dict[str, Any]) -> None:
        super().load_position(saved)
        self.begun = self.position

    def collect(self) -> dict[str, Any]:
        return super().collect() | {"position": self.position - self.begun}


class GeneratorNotLoaded(Right):
    """speculators 1027."""

    def load_generator(self, saved: dict[str, Any]) -> None:
        pass


class GeneratorAfterFirstBatch(Augmented):
    """transformers 46628: the first batch is fetched before the generator is restored."""

    def batches(self) -> Iterator[torch.Tensor]:
        inner = super().batches()
        if self.step:
            before = torch.get_rng_state()
            torch.manual_seed(1234)
            first = next(inner)
            torch.set_rng_state(before)
            torch.randn(first.shape)
            yield first
        yield from inner


class SeededAgain(Right):
    """ms-swift 9935."""

    def load_generator(self, saved: dict[str, Any]) -> None:
        self.seed()
        self.make_model()


class GeneratorOfRankZero(Sharded):
    """Megatron-LM 6858: every rank restores the generator of rank 0."""

    def load_generator(self, saved: dict[str, Any]) -> None:
        states = torch.load(os.path.join(self.directory, "saved0.pt"), weights_only=False)
        torch.set_rng_state(states["generator"])


class StepLabel(Right):
    """verl 7933: a step is counted twice in what is logged, and nowhere else."""

    def load_position(self, saved: dict[str, Any]) -> None:
        super().load_position(saved)
        self.logged = saved["step"] + 1


class NotRepeatable(Right):
    """Dropout by the clock: no two runs of it are alike."""

    def seed(self) -> None:
        torch.manual_seed(7)

    def batches(self) -> Iterator[torch.Tensor]:
        for batch in super().batches():
            torch.manual_seed(time.time_ns())
            yield batch


class NotRepeatableNorLoaded(NotRepeatable):
    """A program whose runs are never alike, and whose optimizer is not loaded."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        pass


class Unordered(Right):
    """Gradients with a rounding of their own in each run, unless torch is asked for deterministic algorithms."""

    def update(self) -> None:
        if not torch.are_deterministic_algorithms_enabled():
            for p in self.trained:
                p.grad *= 1 + 1e-6 * (time.time_ns() % 1000)
        super().update()


class OfMatrices(Right):
    """A model of matrices alone, large enough for 8-bit state."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 512, bias=False), nn.Dropout(0.2), nn.Linear(512, 3, bias=False))


class Sgd(OfMatrices):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trained, lr=0.01, momentum=0.9)


class Muon(OfMatrices):
    def make_optimizer(self) -> torch.optim.Optimizer:
        muon: Any = vars(torch.optim)["Muon"]
        return muon(self.trained, lr=0.01)  # type: ignore[no-any-return]


class Adafactor(OfMatrices):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.trained, lr=0.01)


class FusedAdamW(OfMatrices):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, lr=0.01, fused=True)


class TensorLr(OfMatrices):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, lr=torch.tensor(0.01))


class AdamW8bit(OfMatrices):
    def make_optimizer(self) -> torch.optim.Optimizer:
        import torchao.optim

        torch.compiler.set_stance("force_eager")  # its step is compiled otherwise
        optimizer: torch.optim.Optimizer = torchao.optim.AdamW8bit(self.trained, lr=0.01)
        return optimizer

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        # No copy can be made of its tensors.
        self.optimizer.load_state_dict(saved["optimizer"])


class _NotLoaded:
    def load_optimizer(self, saved: dict[str, Any]) -> None:
        pass


for _kind in OfMatrices.__subclasses__():
    globals()[f"{_kind.__name__}NotLoaded"] = type(f"{_kind.__name__}NotLoaded", (_NotLoaded, _kind), {})


class HiddenState(Right):
    """A curriculum in a closure, which is not restored."""

    difficulty = 1.0

    def update(self) -> None:
        for p in self.trained:
            p.grad *= self.difficulty
        self.difficulty *= 1.5
        super().update()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    globals()[options.name](options.dir).train(options.resume)


if __name__ == "__main__":
    main()
