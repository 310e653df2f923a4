"""The corpus of public configurations: what its manifest holds, and how a configuration is judged."""

from __future__ import annotations

import pathlib
import re
from collections import Counter

import pytest
from corpus.score_configs import configs, half, judged

from fsdp_doctor.check.frameworks import FRAMEWORKS


def test_there_are_at_least_60_and_a_good_part_was_kept_unseen() -> None:
    halves = Counter(half(config) for config in configs())
    assert sum(halves.values()) >= 60
    assert min(halves[which] for which in ("seen", "unseen", "last")) >= 25


def test_each_says_where_it_is_from_and_what_is_expected() -> None:
    names = [framework.facts.name for framework in FRAMEWORKS]
    for config in configs():
        assert re.fullmatch(r"[0-9a-f]{40}", config["commit"])
        assert config["url"].endswith(f"/{config['commit']}/{config['path']}")
        assert len(config["sha256"]) == 64
        expected = config["expected"]
        assert isinstance(expected, dict) or expected in ("refused", "undetermined", "not FSDP")
        assert isinstance(expected, str) or any(config["framework"] in name for name in names)
    assert len({config["url"] for config in configs()}) == len(configs())


@pytest.mark.parametrize(
    ("text", "expected", "verdict"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", {"model": "fsdp2/none"}, "right"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", {"model": "fsdp2/policy"}, "misread silently"),
        ("distributed_type: DEEPSPEED\n", "not FSDP", "right"),
        ("distributed_type: DEEPSPEED\n", {"model": "fsdp2/none"}, "misread"),
        ("distributed_type: new\n", "undetermined", "right"),
        ("distributed_type: new\n", {"model": "fsdp2/none"}, "asked"),
        ("nothing: here\n", "refused", "right"),
        ("nothing: here\n", {"model": "fsdp2/none"}, "asked"),
    ],
)
def test_a_configuration_is_judged_by_what_it_was_read_as(
    text: str, expected: object, verdict: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    config = {"path": "config.yaml", "expected": expected, "framework": "accelerate", "version": "1.10"}
    assert judged(config, tmp_path)[0] == verdict
