"""The index of a checkpoint of several files, of safetensors and of torch.save's files alike."""

from __future__ import annotations

import pathlib
import re

import pytest

from fsdp_doctor.load.checkpoint_index import read_index
from fsdp_doctor.load.outcome import LoadError

_SUFFIXES = pytest.mark.parametrize("suffix", ["safetensors", "bin"])


def _write(directory: pathlib.Path, suffix: str, text: str, name: str = "model") -> None:
    (directory / f"{name}.{suffix}.index.json").write_text(text)


@_SUFFIXES
@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "[" * 100_000], ids=lambda t: t[:30]
)
def test_what_is_no_index_is_named_in_one_sentence(suffix: str, text: str, tmp_path: pathlib.Path) -> None:
    _write(tmp_path, suffix, text)
    with pytest.raises(LoadError, match=rf"model\.{suffix}\.index\.json is no index of a checkpoint: ") as raised:
        read_index(tmp_path, suffix)
    assert len(str(raised.value).splitlines()) == 1


@_SUFFIXES
@pytest.mark.parametrize("file", ["../a", "/a", "inside/a", "..", ""])
def test_a_file_elsewhere_is_refused(suffix: str, file: str, tmp_path: pathlib.Path) -> None:
    _write(tmp_path, suffix, f'{{"weight_map": {{"w": "{file}"}}}}')
    with pytest.raises(LoadError, match="names files outside of its directory: " + re.escape(file or '""') + "$"):
        read_index(tmp_path, suffix)


@_SUFFIXES
def test_an_index_belongs_to_files_of_its_suffix_and_is_the_only_one(suffix: str, tmp_path: pathlib.Path) -> None:
    other = "bin" if suffix == "safetensors" else "safetensors"
    assert read_index(tmp_path, suffix) == {}
    _write(tmp_path, suffix, '{"weight_map": {"w": "a"}}')
    assert (read_index(tmp_path, suffix), read_index(tmp_path, other)) == ({"w": "a"}, {})
    _write(tmp_path, suffix, '{"weight_map": {"w": "b"}}', name="second")
    assert read_index(tmp_path, suffix) == {}
