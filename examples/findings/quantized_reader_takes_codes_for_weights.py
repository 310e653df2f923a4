"""QuantizedHuggingFaceStorageReader reads FP8 codes as weights, without their scale, where it is called weight_scale.

torchrun --nproc-per-node 1 quantized_reader_takes_codes_for_weights.py
"""

import json
import pathlib
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

scale = torch.full((1, 1), 1 / 64)
loaded = {}
for name in ("weight_scale_inv", "weight_scale"):  # DeepSeek's name, and that of compressed-tensors and ModelOpt
    directory = pathlib.Path(tempfile.mkdtemp())
    codes = torch.full((128, 128), 32.0).to(torch.float8_e4m3fn)  # times the scale: 0.5
    tensors = {"linear.weight": codes, f"linear.{name}": scale}
    save_file(tensors, directory / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"linear.weight": torch.zeros(128, 128)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(directory)), no_dist=True)
    loaded[name] = state["linear.weight"][0, 0].item()
print(f"a weight of 0.5 is read as {loaded}")
print("shown" if loaded == {"weight_scale_inv": 0.5, "weight_scale": 32.0} else "not shown", flush=True)
