"""A complete checkpoint survives whatever stops a save while its files get their names, and the message says where."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import forked
from support.ranks import Setting, of_all_ranks, on_ranks, this_device, this_rank, together
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import SaveError, save_full_tensors, save_optimizer_state
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.save.directory import SaveDirectory

# All that gives files their names, makes and removes folders, or looks for them.
CALLS = ("rename", "mkdir", "rmdir", "unlink", "listdir", "scandir", "lstat", "open", "fsync", "close")
Tensors = dict[str, torch.Tensor]


@contextlib.contextmanager
def failing(call: str, number: int, act: Callable[[], object], when: Literal["before", "after"]) -> Iterator[list[int]]:
    """Context in which the commit acts at its call of this number; yields a list of how many calls it has made."""
    calls, original = [0], getattr(os, call)
    methods = {name: getattr(SaveDirectory, name) for name in ("commit", "clear")}

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and when == "before":
            act()
        result = original(*args, **kwargs)
        if calls[0] == number and when == "after":
            act()
        return result

    def run(name: str, *args: Any) -> None:
        with mock.patch.object(os, call, wrapped):
            methods[name](*args)

    with mock.patch.multiple(
        SaveDirectory, **{name: functools.partialmethod(lambda self, n, *a: run(n, self, *a), name) for name in methods}
    ):
        yield calls


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def list_complete(directory: pathlib.Path) -> dict[pathlib.Path, Tensors]:
    """The folders with a complete checkpoint: the directory, and those in it."""
    found = {}
    for folder in (directory, *(path for path in directory.iterdir() if path.is_dir())):
        if (folder / "fsdp-doctor.json").exists():
            verification = verify(folder)
            if not {each.trouble for each in verification.findings if each.severity == "damage"}:
                found[folder] = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        elif (folder / "optimizer.pt").exists():
            with contextlib.suppress(Exception):
                state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
                found[folder] = {f"{n} {k}": v for n, entries in state.items() for k, v in entries.items()}
    return found


def are_alike(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check(directory: pathlib.Path, before: Tensors, after: Tensors, message: str = "") -> None:
    complete = list_complete(directory)
    known = [folder for folder, each in complete.items() if are_alike(each, before) or are_alike(each, after)]
    assert known, sorted(directory.rglob("*"))
    named = [pathlib.Path(each) for each in re.findall(r"(?:complete|as it was) in (\S+?)(?:,|$)", message)]
    assert not message or (named and set(named) <= set(known)), (message, known, sorted(directory.rglob("*")))


def _new_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model and its optimizer after a step."""
    torch.manual_seed(seed)
    model: nn.Module = fully_shard(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 5)).to(this_device()))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16, device=this_device())).square().mean().backward()
    optimizer.step()
    return model, optimizer


def _save_model(pair: tuple[nn.Module, torch.optim.Optimizer], directory: pathlib.Path, size: int) -> None:
    save_full_tensors(pair[0], directory, names="model", largest_file=size, overwrite=True)


def _save_optimizer(pair: tuple[nn.Module, torch.optim.Optimizer], directory: pathlib.Path, size: int) -> None:
    save_optimizer_state(*pair, directory, overwrite=True)


_SAVES = {"model": _save_model, "optimizer": _save_optimizer}
# In several files with an index, of other names before and after.
_BEFORE, _AFTER = 500, 900


def _list_saved(save: Callable[..., None], pair: Any, size: int) -> Tensors:
    with new_directory() as directory:
        save(pair, directory, size)
        return list_complete(directory)[directory]


@on_ranks(Setting("emulated", 2), seconds=400)
def test_an_error_in_the_commit_loses_no_checkpoint_and_locates_each() -> None:
    old, new = _new_model(0), _new_model(1)
    for save in _SAVES.values():
        before, after = _list_saved(save, old, _BEFORE), _list_saved(save, new, _AFTER)
        for call, when in (*((each, "before") for each in CALLS), ("rename", "after"), ("mkdir", "after")):
            made = number = 1
            while made >= number:
                with new_directory() as directory:
                    save(old, directory, _BEFORE)
                    (directory / "tokenizer.json").write_text("{}")
                    message = ""
                    with failing(call, number, fail if this_rank() == 0 else bool, when) as calls:
                        try:
                            save(new, directory, _AFTER)
                        except SaveError as error:
                            message = str(error)
                    made, failed, *_ = of_all_ranks((calls[0], message))[0]
                    assert bool(failed) == bool(message)
                    check(directory, before, after, message)
                    together()
                    save(new, directory, _AFTER)
                    left = [name for name in os.listdir(directory) if name.startswith(".")]
                    assert not left, (call, when, number, left)
                    assert are_alike(list_complete(directory)[directory], after)
                    assert (directory / "tokenizer.json").exists()
                number += 1


def _die(directory: pathlib.Path, name: str, call: str, number: int, when: Literal["before", "after"]) -> None:
    """Rank 0 ends at that call of the commit, or prints that it has made fewer."""
    os.environ["FSDP_DOCTOR_TEST_DEVICE"] = "cpu"
    dist.init_process_group("gloo")
    save, old, new = _SAVES[name], _new_model(0), _new_model(1)
    save(old, directory / "saved", _BEFORE)
    act = (lambda: os._exit(7)) if dist.get_rank() == 0 else bool
    with failing(call, number, act, when) as calls:
        try:
            save(new, directory / "saved", _AFTER)
            print(f"made {calls[0]} calls", flush=True)
        except SaveError as error:
            print(f"refused: {error}", flush=True)
    os._exit(0)


def _save_again(directory: pathlib.Path, name: str) -> None:
    os.environ["FSDP_DOCTOR_TEST_DEVICE"] = "cpu"
    dist.init_process_group("gloo")
    for seed, size, folder in ((0, _BEFORE, "before"), (1, _AFTER, "after")):
        _SAVES[name](_new_model(seed), directory / folder, size)
    _SAVES[name](_new_model(1), directory / "saved", _AFTER)
    os._exit(0)


@pytest.mark.parametrize("name", _SAVES)
@pytest.mark.parametrize("call", ["rename", "rmdir"])
def test_the_death_of_the_first_rank_during_the_commit_loses_no_checkpoint(
    tmp_path: pathlib.Path, name: str, call: str
) -> None:
    for number in itertools.count(1):
        directory = tmp_path / str(number)
        directory.mkdir()
        with forked.job(_die, [(directory, name, call, number, "before")] * 2) as started:
            for process in started.ranks:
                process.join(60)
            codes, printed = [process.exitcode for process in started.ranks], started.printed()
        found = list_complete(directory / "saved")
        with forked.job(_save_again, [(directory, name)] * 2) as again:
            for process in again.ranks:
                process.join(120)
            assert [process.exitcode for process in again.ranks] == [0, 0], again.printed()
        before, after = (list_complete(directory / each)[directory / each] for each in ("before", "after"))
        assert any(are_alike(each, before) or are_alike(each, after) for each in found.values()), (number, printed)
        assert are_alike(list_complete(directory / "saved")[directory / "saved"], after)
        assert not [each for each in os.listdir(directory / "saved") if each.startswith(".")]
        if "made" in printed:
            break
        assert codes == [7, 0]
        refused = re.search(r"refused: (.*)", printed)
        assert refused is not None
        named = re.findall(r"(?:complete|as it was) in (\S+?)(?:,|;|$)", refused[1])
        assert {*map(pathlib.Path, named)} <= {*found}, (refused[1], found.keys())
