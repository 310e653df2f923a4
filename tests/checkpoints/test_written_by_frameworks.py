"""Checkpoints that the installed frameworks write in their own jobs: sound, and what is converted has their weights."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file
from support.forked import run_script

from fsdp_doctor.checkpoints.conversion import convert
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.checkpoints.verification import verify

# By framework: configurations as in an id, and the numbers of ranks. verl and torchtitan are rarely installed.
_WRITERS = {
    "accelerate": (
        *(
            (f"{version}/none/{kind}", 2)
            for version in ("fsdp2", "fsdp1", "fsdp1-orig")
            for kind in ("full", "sharded")
        ),
        *(("fsdp2/offload/sharded", 2), ("fsdp2/none/sharded/tied", 2), ("fsdp2/none/sharded/lora", 2)),
        *(("fsdp2/none/sharded/uneven", 4), ("fsdp1/none/sharded", 4)),
    ),
    "trainer": (
        *((f"{version}/none/{kind}", 2) for version in ("fsdp2", "fsdp1") for kind in ("full", "sharded")),
        *(("fsdp2/none/sharded/lora", 2), ("fsdp2/none/full/tied", 2), ("fsdp2/none/sharded", 4)),
    ),
    "transformers": (("none", 2), ("none/uneven", 4)),
    "lightning": (
        *(("fsdp/none/full", 2), ("fsdp/none/sharded", 4), ("fsdp/cpu_offload/sharded", 2)),
        *(("model-parallel/none/full", 2),),
    ),
    "verl": (
        *(("fsdp2/none", 2), ("fsdp2/policy", 2), ("fsdp/none", 2), ("fsdp/param+optimizer", 2), ("fsdp2/none", 4)),
        ("fsdp2/none/lora", 2),
    ),
    "torchtitan": (("none/sync", 2), ("none/async", 2), ("cpu_offload/sync", 4)),
}
_SCRIPT = pathlib.Path(__file__).parent.parent / "support" / "written_by_frameworks.py"


@pytest.mark.parametrize(
    ("framework", "configuration", "ranks"),
    [(framework, *writer) for framework, writers in _WRITERS.items() for writer in writers],
)
def test_what_a_framework_writes_is_sound_and_converts_bit_by_bit(
    tmp_path: pathlib.Path, framework: str, configuration: str, ranks: int
) -> None:
    done = run_script(_SCRIPT, ranks=ranks, arguments=[framework, configuration, str(tmp_path)])
    assert done.codes == [0] * ranks, done.output
    if "unavailable: " in done.output:
        why = done.output.partition("unavailable: ")[2].partition("\n")[0]
        assert "is not installed" in why
        pytest.skip(why)
    expected = torch.load(tmp_path / "weights.pt")
    written = json.loads((tmp_path / "written.json").read_text())
    assert "saved" in written
    for name, keys in written.items():
        source, target = tmp_path.joinpath(name, keys[0]), tmp_path / "converted" / name
        found = verify(source)
        assert found.answer == "sound", found.to_text()
        convert(source, target, ConversionTarget.HF)
        weights = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
        check_equal(weights, expected)


def check_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares in the dtype of the file: by name, and by the values alone under names of another program.

    An adapter's files have the adapter alone, and no tied weight is written twice.
    """
    assert len(weights) >= 20
    by_values = {tensor.numpy().tobytes() for tensor in expected.values()}
    for name, tensor in weights.items():
        whole = expected.get(name, expected.get(name.replace(".weight", ".default.weight")))
        if whole is None:
            assert tensor.numpy().tobytes() in by_values, name
        else:
            assert torch.equal(tensor, whole.to(tensor.dtype)), name
    missing = expected.keys() - weights.keys()
    is_adapter = all("lora_" in name for name in weights)
    are_renamed = not weights.keys() & expected.keys()
    assert is_adapter or are_renamed or missing <= {"lm_head.weight"}, missing
