"""What ``fsdp-doctor bench`` refuses."""

from __future__ import annotations

import pytest
from support.inside import doctor


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "qwen9"), "--model qwen9: neither a built-in model"),
        (("--offload", "some"), "--offload: unknown value 'some'; use one of none, param, policy"),
        (("--staging", "staged"), "staged needs --offload param"),
        (("--pinning", "unpinned"), "unpinned needs --offload policy"),
        (("--direction", "in", "--offload", "param", "--staging", "staged"), "use it with --direction out"),
        (("--dtype", "int8"), "--dtype: unknown value 'int8'; use one of bf16, fp32, fp32:bf16"),
        (("--bucket-bytes", "0"), "--bucket-bytes 0: not a size"),
        (("--path", "telepathy"), "fsdp2 has no path 'telepathy' to measure"),
        (("--repeat", "0"), "--repeat must be more than 0"),
        (("--layers", "-1"), "--layers must be more than 0"),
        (("--direction", "up"), "--direction: unknown value 'up'; use one of out, in"),
        (("--source", "files"), "--source says where a load is from: use it with --direction in"),
        (("--direction", "in", "--source", "tape"), "--source: unknown value 'tape'; use one of rank0, ranks, files"),
        (("--direction", "in", "--path", "full_tensors"), "no path 'full_tensors' to load by; use one of load_full"),
        (("--device", "tpu"), "--device: unknown value 'tpu'; use one of auto"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(options: tuple[str, ...], sentence: str) -> None:
    run = doctor("bench", *options)
    assert run.code == 2
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
