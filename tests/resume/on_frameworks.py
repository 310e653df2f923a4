"""Scripts of frameworks' users: ``on_frameworks.py NAME --dir DIR [--resume CHECKPOINT]``.

They save after every fourth step. Nothing in them knows of the doctor.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn


def make_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        attention_dropout=0.1,
    )
    return Qwen3ForCausalLM(config)


def make_data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 128, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in tokens]


def trainer(options: argparse.Namespace, version: int = 2, state_dict_type: str = "SHARDED_STATE_DICT") -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    arguments = TrainingArguments(
        output_dir=options.dir,
        max_steps=12,
        save_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": version,
            "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
            "state_dict_type": state_dict_type,
            "reshard_after_forward": True if version == 2 else "full_shard",
        },
    )
    Trainer(model=make_model(), args=arguments, train_dataset=make_data()).train(resume_from_checkpoint=options.resume)


def trainer_fsdp2(options: argparse.Namespace) -> None:
    trainer(options)


def trainer_fsdp1(options: argparse.Namespace) -> None:
    trainer(options, version=1)


def trainer_fsdp1_full(options: argparse.Namespace) -> None:
    trainer(options, version=1, state_dict_type="FULL_STATE_DICT")


def accelerate_fsdp1(options: argparse.Namespace) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, state_dict_type="SHARDED_STATE_DICT", use_orig_params=True, auto_wrap_policy="NO_WRAP"
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    data = torch.randn(16, 4, 64, generator=torch.Generator().manual_seed(5))
    if options.resume:
        accelerator.load_state(options.resume)
    for step in range(4 if options.resume else 0, 12):
        accelerator.backward(model(data[step].to(accelerator.device)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            accelerator.save_state(os.path.join(options.dir, "checkpoint-4"))
    accelerator.end_training()


def lightning_ddp(options: argparse.Namespace) -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 3))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning.seed_everything(0)
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=options.dir, every_n_train_steps=4, filename="saved-{step}", save_top_k=-1
    )
    data = TensorDataset(torch.randn(256, 32, generator=torch.Generator().manual_seed(1)))
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=12,
        default_root_dir=options.dir,
        logger=False,
        enable_progress_bar=False,
        callbacks=[checkpoints],
    ).fit(Module(), DataLoader(data, 16, shuffle=True), ckpt_path=options.resume)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--resume")
    options = parser.parse_args()
    globals()[options.name](options)


if __name__ == "__main__":
    main()
