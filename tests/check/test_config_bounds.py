"""Every input is read, or refused, within seconds and memory: what was made to break that, and what a fuzzer found."""

from __future__ import annotations

import pathlib
import time

import pytest

from fsdp_doctor.check import check, presentation
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.errors import UsageError

_MB = 1 << 20
_HOSTILE = {
    "lists.yaml": "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    "merges.yaml": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: 1}}\n" for i in range(1, 40)),
    "text.yaml": f'a: &a "{"x" * _MB}"\nb: [{",".join(["*a"] * 3000)}]\n',
    "nested.yaml": "a: " + "[" * 200_000,
    "itself.yaml": "a: &a [*a]\n",
    "chain.yaml": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)),
    "key.yaml": f"? {'k' * _MB}\n: {{a: 1, b: 2}}\n",
    "keys.yaml": "".join(f"k{i}: 1\n" for i in range(90_000)),
    "lines.txt": "\n" * (4 * _MB - 10) + "a",
    "dotted.toml": "a." * 200_000 + "b = 1\n",
    "dots.toml": ("a." * 300 + "b = 1\n") * 5000,
    "inline.toml": "a = " + "{a=" * 50_000,
    "nested.json": '{"a":' * 100_000,
    "variables.sh": "A0=xxxxxxxxxx\n" + "".join(f"A{i}=$A{i - 1}$A{i - 1}\n" for i in range(1, 60)),
    "used.sh": f"A0={'x' * 19_000}\n" + "torchrun t.py --fsdp $A0 $A0\n" * 60_000,
    "words.sh": "torchrun x.py " + "a.b.c=1 a.b=2 " * 200_000,
    "value.sh": "a.b=" + "x" * (4 * _MB - 10),
    "assigned.sh": "A=" * (2 * _MB - 10),
    "quotes.sh": "torchrun x.py " + '"' * (3 * _MB),
    "dollars.sh": "torchrun " + "${" * _MB,
    "ends.sh": "torchrun x;" * 380_000,
    "tildes.sh": "~a.b " * 800_000,
    "environment.md": "- compute_environment: {a: 1}\n" * 90_000,
    "fences.md": "```yaml\na: 1\n```\n" * 30_000,
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_and_in_time(name: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / name
    file.write_text(_HOSTILE[name])
    started = time.process_time()
    with pytest.raises(UsageError) as raised:
        check([str(file)])
    assert "\n" not in str(raised.value)
    assert time.process_time() - started < 2 * (1 + len(_HOSTILE[name]) / _MB)


def test_a_long_value_is_shown_in_part() -> None:
    row = Setting("a", "x" * 100_000, "file:1")
    assert len(str(row)) < 300
    result = check(["fsdp=full_shard", "output_dir=out", f"fsdp_config.{'k' * 100}={'x' * 100_000}"])
    assert len(presentation.as_text(result)) < 20_000


def test_many_unknown_keys_are_said_in_part(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("output_dir: x\nfsdp: full_shard\nfsdp_config:\n" + "".join(f"  k{i}: 1\n" for i in range(15_000)))
    unknown = [one for one in check([str(file)]).findings if one.kind == "unknown"]
    assert len(unknown) == 21
    assert unknown[-1].sentence == "14980 more keys of fsdp_config are not known"


def test_settings_that_replace_one_another_take_no_longer_the_more_there_are() -> None:
    started = time.process_time()
    rows = [Setting(f"x.k{i}", i, "f") for i in range(10_000)]
    settings = Settings.of([*rows, *(Setting(key, 1, "f") for _ in range(5_000) for key in ("a.b.c", "a.b"))])
    assert time.process_time() - started < 2
    assert [row.key for row in settings.below("a")] == ["a.b"]
    settings.without("x")
    assert [row.key for row in settings] == ["a.b"]


def test_a_model_that_is_a_huge_file_is_not_read(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    asked = ["actor_rollout_ref.actor.strategy=fsdp2", f"actor_rollout_ref.model.path={tmp_path}"]
    assert check(asked, framework_version="0.9.0").exit_code == 0
