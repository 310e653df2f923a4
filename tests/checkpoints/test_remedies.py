"""Every remedy that ``checkpoint verify`` prints is executed on the damage that it is for, and a good end follows."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable

import pytest
import torch
from program import run
from safetensors import safe_open
from support import saved_checkpoints as saved
from support.damages import DAMAGES, RANK_0, Damage, to_shards

from fsdp_doctor.checkpoints.troubles import Trouble, TroubleRemedy
from fsdp_doctor.checkpoints.verification import CheckpointFinding, verify

# The damaged directory, what was saved, and the finding; returns where the good end lies.
Cure = Callable[[pathlib.Path, pathlib.Path, CheckpointFinding], pathlib.Path]


def restore(directory: pathlib.Path, original: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    """The file that is named; all of a directory, if one is; of what is no part of the copy, an older checkpoint."""
    source, target = original / finding.file, directory / finding.file
    if not source.exists():
        return save_again(directory, original, finding)
    for file in original.rglob("*") if source.is_dir() else (source,):
        if file.is_file():
            (directory / file.relative_to(original)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, directory / file.relative_to(original))
    assert target.exists()
    return directory


def save_again(directory: pathlib.Path, original: pathlib.Path, _: CheckpointFinding) -> pathlib.Path:
    shutil.rmtree(directory)
    shutil.copytree(original, directory)
    return directory


def cut_off(directory: pathlib.Path, _: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    file = directory / finding.file
    saved.truncate(file, int(finding.what.split()[0]))
    return directory


def rename(directory: pathlib.Path, _: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    wrong = [each for each in verify(directory).findings if each.trouble == finding.trouble]
    for each in wrong:
        (directory / each.file).rename(directory / f"{each.file}.moved")
    for each in wrong:
        rank = re.findall(r"\d+", each.what)[-1]
        name = re.sub(r"\d+(\.\w+)$", rf"{rank}\1", each.file)
        (directory / f"{each.file}.moved").rename(directory / name)
    return directory


def remove(directory: pathlib.Path, _: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    path = directory / finding.file
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return directory


def write_index(directory: pathlib.Path, _: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    """Writes the index from the headers of the files, as the remedy says."""
    where = {}
    ending = ".bin" if ".bin" in finding.file else ".safetensors"
    for file in sorted(directory.glob(f"*{ending}")):
        if ending == ".bin":
            where |= dict.fromkeys(torch.load(file), file.name)
        else:
            with safe_open(file, "pt") as opened:
                where |= dict.fromkeys(opened.keys(), file.name)
    stem = "pytorch_model" if ending == ".bin" else "model"
    (directory / f"{stem}{ending}.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def convert(directory: pathlib.Path, original: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    command = shlex.split(finding.remedy)[1:7]
    assert command[:3] == ["checkpoint", "convert", str(directory)], finding.remedy
    command[3] = str(directory.with_name("new"))
    done = run(sys.executable, "-m", "fsdp_doctor", *command)
    assert done.code == 0, done.stdout + done.stderr
    return directory.with_name("new")


def convert_ranks(directory: pathlib.Path, original: pathlib.Path, finding: CheckpointFinding) -> pathlib.Path:
    ranks, new = original.parent / "verl", directory.with_name("new")
    done = run(sys.executable, "-m", "fsdp_doctor", "checkpoint", "convert", str(ranks), str(new), "--to", "hf")
    assert done.code == 0, done.stdout + done.stderr
    return new


def set_tied(directory: pathlib.Path, _: pathlib.Path, __: CheckpointFinding) -> pathlib.Path:
    saved.edit_json(directory / "config.json", tie_word_embeddings=False)
    return directory


def do_nothing(directory: pathlib.Path, _: pathlib.Path, __: CheckpointFinding) -> pathlib.Path:
    return directory


CURES: dict[TroubleRemedy, Cure] = {
    TroubleRemedy.RESTORE: restore,
    TroubleRemedy.RESTORE_LOST: restore,
    TroubleRemedy.SAVE_AGAIN: save_again,
    TroubleRemedy.SAVE_FULL: save_again,
    TroubleRemedy.SAVE_PLAIN: save_again,
    TroubleRemedy.SAVE_DECODED: save_again,
    TroubleRemedy.ONE_SAVE: save_again,
    TroubleRemedy.CUT_OFF: cut_off,
    TroubleRemedy.RENAME: rename,
    TroubleRemedy.REMOVE: remove,
    TroubleRemedy.REMOVE_OLDER: remove,
    TroubleRemedy.SAVE_ENDS: remove,
    TroubleRemedy.WRITE_INDEX: write_index,
    TroubleRemedy.CONVERT: convert,
    TroubleRemedy.CONVERT_RANKS: convert_ranks,
    TroubleRemedy.CONFIG: save_again,
    TroubleRemedy.TIE: set_tied,
    TroubleRemedy.COPY: restore,
    TroubleRemedy.LOOK: do_nothing,
}

# What restores nothing, and what is done to the command and not to the files, each with a test of its own below.
OF_THE_COMMAND = {
    TroubleRemedy.COMPARE,
    TroubleRemedy.REFERENCE,
    TroubleRemedy.DISTRUST,
    TroubleRemedy.READABLE,
    TroubleRemedy.OTHER_FORM,
    TroubleRemedy.WAIT,
    TroubleRemedy.NAME_ANOTHER,
    TroubleRemedy.ITS_TOOL,
}
WARNINGS: dict[str, tuple[str, Damage]] = {
    "files of another number of ranks": ("verl", lambda d: shutil.copy(d / RANK_0, d / RANK_0.replace("_2_", "_4_"))),
    "a wrong total_size": (
        "hub",
        lambda d: saved.edit_json(d / "model.safetensors.index.json", metadata={"total_size": 5}),
    ),
    "no config.json": ("hub", lambda d: (d / "config.json").unlink()),
    "no optimizer": ("verl", lambda d: [file.unlink() for file in d.glob("optim*")]),
    "names of a compiled model": (
        "full",
        lambda d: torch.save({f"_orig_mod.{n}": torch.ones(3, 3) for n in "ab"}, d / "last.pt"),
    ),
}
PLANTED = {name: damage[:2] for name, damage in (DAMAGES | WARNINGS).items()}


@pytest.mark.parametrize("name", PLANTED)
def test_doing_what_is_said_leads_to_a_sound_checkpoint(
    originals: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    source, damage = PLANTED[name]
    directory = tmp_path / source
    for each in {source, *({"verl"} if damage is to_shards else ()), *({"tied"} if name.startswith("an old") else ())}:
        shutil.copytree(originals / each, tmp_path / each)
    damage(directory)
    found = verify(directory)
    for _ in range(3):
        of_damage = [finding for finding in found.findings if finding.severity == "damage"]
        for finding in of_damage or found.findings:
            remedy = Trouble[finding.trouble.upper()].value.remedy
            if remedy is TroubleRemedy.COMPARE:
                return  # it says that it restores nothing
            end = CURES[remedy](directory, originals / source, finding)
            if end != directory or remedy in (TroubleRemedy.RENAME, TroubleRemedy.CUT_OFF):
                break
        found = verify(end) if found.findings else found
        if found.answer == "sound":
            break
    assert found.answer == "sound", found.to_text()


def test_every_remedy_is_executed() -> None:
    assert CURES.keys() | OF_THE_COMMAND == set(TroubleRemedy)
    assert {TroubleRemedy.LOOK, TroubleRemedy.COMPARE, TroubleRemedy.DISTRUST} == {
        remedy for remedy in TroubleRemedy if re.search("nothing( to restore|$)", remedy.value)
    }


def test_what_is_done_to_the_command_leads_to_an_answer(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(originals / "hub", tmp_path / "hub")
    (file,) = (tmp_path / "hub").glob("*-00001-*")
    hidden = file.rename(tmp_path / "hidden")
    file.symlink_to(hidden)
    hidden.rename(tmp_path / "elsewhere")
    assert saved.list_troubles(verify(tmp_path / "hub"), "refused") == {"unread"}
    (tmp_path / "elsewhere").rename(hidden)
    assert verify(tmp_path / "hub").answer == "sound"
    os.mkfifo(tmp_path / "hub" / "more.pt")
    assert saved.list_troubles(verify(tmp_path / "hub"), "refused") == {"form"}
    (tmp_path / "hub" / "more.pt").unlink()
    changing = verify(tmp_path / "hub", progress=lambda *_: os.utime(hidden))
    assert saved.list_troubles(changing, "refused") == {"changed"}
    assert verify(tmp_path / "hub").answer == "sound"
    (tmp_path / "none").mkdir()
    assert saved.list_troubles(verify(tmp_path / "none"), "refused") == {"unknown"}


def test_a_lost_file_is_not_hidden_by_a_new_index(originals: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The names of the files do not matter, nor whether the index or the names tell of one more."""
    shutil.copytree(originals / "hub", tmp_path / "hub")
    directory = tmp_path / "hub"
    text = (directory / "model.safetensors.index.json").read_text()
    for number in range(1, 4):
        (directory / f"model-0000{number}-of-00003.safetensors").rename(directory / f"part{number}.safetensors")
        text = text.replace(f"model-0000{number}-of-00003", f"part{number}")
    (directory / "model.safetensors.index.json").write_text(text)
    assert verify(directory).answer == "sound"
    (directory / "part2.safetensors").unlink()
    found = verify(directory)
    assert (found.answer, saved.list_troubles(found)) == ("damaged", {"missing_file"}), found.to_text()
    assert not any("index again" in finding.remedy for finding in found.findings)
