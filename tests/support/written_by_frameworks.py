"""Trains a framework's session for two steps and lets it write its own checkpoint. It is run on each rank.

The arguments are the framework, its configuration as in an id (``fsdp2/none/sharded``), and a directory. The program
writes into the directory: ``saved``, the framework's checkpoint for a resume; a directory for each of its exports,
named like the method; and ``weights.pt``, the parameters as torch itself gathers them, by their names without wrappers.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.frameworks import framework_worker
from fsdp_doctor.frameworks.adapter import FrameworkSession, PlainModel, SavedFiles
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import read_place
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkScenario

_SECONDS = 180


def main(framework: str, configuration: str, directory: pathlib.Path) -> None:
    framework_worker.preload([framework], directory / "scratch", _SECONDS)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    worker = framework_worker.start(framework, read_place(), RunDevice(type="emulated"), directory / "scratch", store)
    if worker.unavailable:
        print(f"unavailable: {worker.unavailable}")
        return
    scenario = FrameworkScenario(framework=framework, configuration=configuration)
    values, methods = scenario.values, {method.name for method in scenario.list_methods()}
    plain = PlainModel(
        name=values["model"],
        weights="own",
        device=worker.device,
        place=worker.place,
        workspace=directory / f"workspace-{worker.place.rank}",
    )
    plain.workspace.mkdir(parents=True)
    session = framework_worker.find_adapter(framework).build(values, plain)

    def write_at_the_end(step: int) -> None:
        if step < 2:
            return
        weights = gather(session)
        if worker.place.rank == 0:
            torch.save(weights, directory / "weights.pt")
        session.save(directory / "saved")
        parts = {"saved": [""]}
        for name, extract in session.list_extractions().items():
            found = extract(directory / name) if name in methods else None
            # With sharded state dicts, Trainer's save_model writes nothing.
            if isinstance(found, SavedFiles) and found.directory.exists():
                parts[name] = [str(found.directory.relative_to(directory / name)), *found.part]
        if worker.place.rank == 0:
            (directory / "written.json").write_text(json.dumps(parts))

    session.train(2, write_at_the_end)
    dist.barrier()


def gather(session: FrameworkSession) -> dict[str, torch.Tensor]:
    """Gathers the parameters with torch's own ``summon_full_params`` or ``full_tensor``, to the CPU."""
    if isinstance(session.model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(session.model, writeback=False, offload_to_cpu=False):
            return _copy(session)
    return _copy(session)


def _copy(session: FrameworkSession) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in session.model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            # The process group has no backend for a shard on the CPU.
            on_device = parameter.to(parameter.device_mesh.device_type)
            weights[strip_wrappers(name)] = on_device.full_tensor().detach().cpu().clone()
        else:
            weights[strip_wrappers(name)] = parameter.detach().cpu().clone()
    return weights


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
