"""Twenty families, from save_pretrained into shards and back to from_pretrained, in the Hub's names."""

from __future__ import annotations

import pathlib
import re

from support import round_trip
from support.families import FAMILIES
from support.ranks import Setting, on_ranks, this_rank, together
from support.training import shared_directory

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "names.md"


@on_ranks(Setting("cpu", 2))
def test_every_family_makes_the_round_trip_in_hub_names_in_every_direction() -> None:
    with shared_directory() as directory:
        if this_rank() == 0:
            round_trip.save_families(directory)
        together()
        answers = {family: round_trip.try_family(family, pathlib.Path(directory, family)) for family in FAMILIES}
    wrong = {
        (family, step): answer
        for family, steps in answers.items()
        for step, answer in steps.items()
        if step != "names" and answer != "yes"
    }
    assert wrong == {}


def test_the_page_has_every_family_and_every_direction() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (?:other|the same) (?:\| yes ){5}\|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(FAMILIES)
