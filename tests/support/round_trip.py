"""Converts each family from save_pretrained to shards and back to from_pretrained, with the Hub's names at every step.

``torchrun --nproc-per-node 2 tests/support/round_trip.py`` prints the table in docs/names.md.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import fsdp_doctor
from fsdp_doctor.weights.names import read_hub_view
from support.families import FAMILIES, new_family

_SAVED_SEED = 7
_WRITER = f"""
import sys
from support.families import FAMILIES, new_family
for family in FAMILIES:
    new_family(family, seed={_SAVED_SEED}).save_pretrained(f"{{sys.argv[1]}}/{{family}}")
"""

State = dict[str, torch.Tensor]


def save_families(directory: str) -> None:
    """Writes each family's checkpoint with ``save_pretrained``, in a separate process."""
    path = os.pathsep.join([str(pathlib.Path(__file__).resolve().parents[1]), *sys.path])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", _WRITER, directory]
    subprocess.run(command, check=True, capture_output=True, env=environment | {"PYTHONPATH": path})


def shard(model: Any) -> Any:
    for module in reversed(list(model.modules())):
        for layer in module if isinstance(module, nn.ModuleList) else ():
            fully_shard(layer)
    return fully_shard(model)


def try_family(family: str, directory: pathlib.Path) -> dict[str, str]:
    """Maps each direction to "yes" or to a description of the error.

    All ranks must call this function; only rank 0's answers count.
    """
    disk = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    plain = new_family(family, seed=_SAVED_SEED)
    expected: State = {name: t.detach().clone() for name, t in plain.state_dict().items()}
    model = shard(new_family(family))
    answers = {"names": "other" if any(name != v.name for name, v in read_hub_view(plain).items()) else "the same"}
    steps: dict[str, Callable[[], str]] = {
        "save_pretrained to shards": lambda: _load(model, directory, expected),
        "fingerprint": lambda: _compare_fingerprints(model, directory),
        "shards to from_pretrained": lambda: _save(model, type(plain), plain.config, expected),
        "engines": lambda: _announce(model, disk),
        "local shards": lambda: _read_shards(model, disk),
    }
    for step, run in steps.items():
        try:
            answers[step] = run() or "yes"
        except Exception as error:
            answers[step] = f"{type(error).__name__}: {error}"
    return answers


def _differences(actual: State, expected: State) -> str:
    wrong = [name for name, t in expected.items() if name not in actual or not torch.equal(actual[name], t)]
    return f"{len(wrong)} differ: {wrong[:2]}" if wrong or actual.keys() != expected.keys() else ""


def _load(model: nn.Module, directory: pathlib.Path, expected: State) -> str:
    fsdp_doctor.load_full_tensors(model, directory)
    return _differences(dict(fsdp_doctor.full_tensors(model)), expected)


def _compare_fingerprints(model: nn.Module, directory: pathlib.Path) -> str:
    of_model = fsdp_doctor.fingerprint(model, names="hub")
    differences = fsdp_doctor.compare_fingerprints(of_model, fsdp_doctor.fingerprint_checkpoint(directory))
    return str(differences[0]) if differences else ""


def _save(model: nn.Module, kind: Any, config: Any, expected: State) -> str:
    state = fsdp_doctor.full_state_dict(model, names="hub")
    if dist.get_rank():
        return ""
    # safetensors does not write a tensor under two names.
    once = {(t.data_ptr(), t.shape, t.stride()): (name, t) for name, t in reversed(state.items())}
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        contiguous = {name: tensor.contiguous() for name, tensor in once.values()}
        save_file(contiguous, pathlib.Path(directory, "model.safetensors"), metadata={"format": "pt"})
        loaded, info = kind.from_pretrained(directory, output_loading_info=True)
    unlike = [f"{what}: {sorted(info[what])[:2]}" for what in ("missing_keys", "unexpected_keys") if info[what]]
    return "; ".join(unlike) or _differences(loaded.state_dict(), expected)


def _announce(model: nn.Module, disk: State) -> str:
    """Compares the tensors that engines receive with the files.

    Tied tensors may have second names that are not on disk.
    """
    announced = fsdp_doctor.weights_info(model, names="auto")
    tensors = dict(fsdp_doctor.engines.verl_weights(model)[0])
    if any((info.shape, info.dtype) != (tensors[name].shape, tensors[name].dtype) for name, info in announced.items()):
        return "announced otherwise than sent"
    tied = {name for name in tensors if name not in disk}
    twice = {name for name in tied if any(tensors[name].data_ptr() == tensors[other].data_ptr() for other in disk)}
    return (
        f"{len(tied - twice)} are not on disk"
        if tied - twice
        else _differences({name: tensor for name, tensor in tensors.items() if name in disk}, disk)
    )


def _read_shards(model: nn.Module, disk: State) -> str:
    shards = {shard.name: shard for shard in fsdp_doctor.local_shards(model, names="hub")}
    mine = {name: shards[name].tensor for name in disk}
    return _differences(mine, {name: shards[name].place.of(t).view(mine[name].shape) for name, t in disk.items()})


def main() -> None:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        directory = [own]
        dist.broadcast_object_list(directory)
        if dist.get_rank() == 0:
            save_families(own)
        dist.barrier()
        for number, family in enumerate(FAMILIES):
            answers = try_family(family, pathlib.Path(directory[0], family))
            if dist.get_rank() == 0:
                rows = [] if number else [["family", *answers], ["---"] * (len(answers) + 1)]
                for row in [*rows, [family, *answers.values()]]:
                    print(f"| {' | '.join(row)} |", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
