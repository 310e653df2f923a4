"""What ``fsdp-doctor bench`` refuses."""

from __future__ import annotations

import pytest
from support.inside import doctor


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "qwen9"), "--model qwen9: "),
        (("--offload", "some"), "'--offload': 'some'"),
        (("--staging", "staged"), "--offload param"),
        (("--pinning", "unpinned"), "--offload policy"),
        (("--direction", "in", "--offload", "param", "--staging", "staged"), "--direction out"),
        (("--dtype", "int8"), "'--dtype': 'int8'"),
        (("--bucket-bytes", "0"), "'--bucket-bytes': "),
        (("--path", "telepathy"), "'telepathy'"),
        (("--repeat", "0"), "'--repeat'"),
        (("--layers", "-1"), "'--layers'"),
        (("--direction", "up"), "'--direction': 'up'"),
        (("--source", "files"), "--direction in"),
        (("--direction", "in", "--source", "tape"), "'--source': 'tape'"),
        (("--direction", "in", "--path", "full_tensors"), "'full_tensors'"),
        (("--device", "tpu"), "'--device': 'tpu'"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(options: tuple[str, ...], sentence: str) -> None:
    run = doctor("bench", *options)
    assert run.code == 2
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
