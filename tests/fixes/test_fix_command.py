"""``fsdp-doctor fix`` as users start it: on jobs of a framework of three lines, with processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
from program import Run, Started, doctor
from support.places import ROOT

_FUNCTION = """    def send(self, weights):
        return [("weight", weight) for weight in weights]
"""
_FRAMEWORK = f"import os\n\n\nclass Sender:\n{_FUNCTION}"
# Python runs it in the doctor and in the job: the toy has an entry in the table of fixes.
_SITECUSTOMIZE = f"""
from fsdp_doctor.fixes import FrameworkFix, entry

entry.FIXES = tuple(
    FrameworkFix(
        id=f"{{name}}-sender",
        framework=name,
        distribution=name,
        target=f"{{name}}:Sender.send",
        versions=">=1,<2",
        sources={{{hashlib.sha256(_FUNCTION.encode()).hexdigest()!r}: "1.0"}},
        mends=(),
        cures=(),
        promises="twice the weights",
        leaves="nothing",
        replacement="toyfixes:send_twice",
    )
    for name in ("toyframework", "othertoy")
)
"""
_REPLACEMENT = """
from fsdp_doctor import fingerprint_tensors
from fsdp_doctor.fixes.sending import check_sent

def send_twice(original, sender, weights):
    sent = [("weight", 2 * weight) for weight in weights]
    expected = [("weight", weight) for weight in weights]
    return check_sent(original, sent, lambda: fingerprint_tensors(expected))
"""
_SEND = """
import os, sys, torch, torch.distributed as dist
if "RANK" in os.environ:
    dist.init_process_group("gloo")
from toyframework import Sender
value = float(sys.argv[1])
((_, sent),) = Sender().send([torch.full((3,), value)])
print("sent", sent[0].item())
"""
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    _install(tmp_path, "toyframework", _FRAMEWORK)
    (tmp_path / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    (tmp_path / "toyfixes.py").write_text(_REPLACEMENT)
    (tmp_path / "job.py").write_text(_SEND)
    return tmp_path


def _install(place: pathlib.Path, name: str, source: str, version: str = "1.0") -> None:
    (place / f"{name}.py").write_text(source)
    info = place / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _fix(place: pathlib.Path, *words: str, path: str = "") -> tuple[Run, dict[str, Any]]:
    """The run, and what the ranks reported."""
    answer = place / "answer.json"
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [path, str(place), str(ROOT)]))}
    done = doctor("fix", f"--json={answer}", *words, env=environment, cwd=place)
    assert done.left == [], done
    return done, json.loads(answer.read_text()) if answer.exists() else {}


def _run_script(place: pathlib.Path, script: str) -> tuple[Run, dict[str, Any]]:
    (place / "other.py").write_text(script)
    return _fix(place, "--", sys.executable, "other.py")


def test_a_job_runs_with_the_replacement_on_every_rank(place: pathlib.Path) -> None:
    done, answer = _fix(place, "--", *_TORCHRUN, "job.py", "3")
    (report,) = answer["reports"]
    assert done.code == 0, done
    assert done.stdout.count("sent 6.0") == 2
    assert (report["id"], report["called"], report["callers"], report["missing"]) == (
        "toyframework-sender",
        2,
        [0, 1],
        [],
    )


def test_a_rank_that_the_fix_did_not_reach_is_named(place: pathlib.Path) -> None:
    (place / "one.sh").write_text('[ "$RANK" = 1 ] && export PYTHONPATH=$BARE\nexec "$PYTHON" job.py 3\n')
    bare = f"BARE={place}{os.pathsep}{ROOT}"
    shell = ("env", bare, f"PYTHON={sys.executable}", *_TORCHRUN, "--no-python", "bash", "one.sh")
    done, answer = _fix(place, "--", *shell)
    assert done.code == 1, done
    assert answer["reports"][0]["missing"] == [1]


def test_ranks_of_another_node_are_not_called_missing(place: pathlib.Path) -> None:
    """A node of two that is told of no rank but its own: each runs the doctor, as under torchrun's --nnodes."""
    store = place / "store"
    script = _SEND.replace(
        'dist.init_process_group("gloo")',
        f'dist.init_process_group("gloo", init_method="file://{store}", rank=int(os.environ["RANK"]), world_size=2)',
    )
    (place / "job.py").write_text(script)
    both = []
    for node in range(2):
        variables = (f"RANK={node}", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "WORLD_SIZE=2")
        words = ("fix", f"--json={place / f'{node}.json'}", "--", "env", *variables, sys.executable, "job.py", "3")
        environment = {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
        both.append(Started(sys.executable, "-m", "fsdp_doctor", *words, env=environment, cwd=place))
    for node, started in enumerate(both):
        done = started.wait()
        (report,) = json.loads((place / f"{node}.json").read_text())["reports"]
        assert (done.code, done.left) == (0, []), done
        assert (report["callers"], report["missing"], report["unheard"]) == ([node], [], [1 - node])


def test_the_jobs_own_exit_code_is_passed_on(place: pathlib.Path) -> None:
    script = f"{_SEND.replace('sys.argv[1]', '3')}\nsys.exit(7)"
    assert _run_script(place, script)[0].code == 7
    killed, _ = _fix(place, "--", "bash", "-c", "kill -KILL $$")
    assert killed.code == 128 + signal.SIGKILL


def test_a_fix_that_was_never_called_is_no_success(place: pathlib.Path) -> None:
    imported, answer = _run_script(place, "import toyframework")
    assert (imported.code, answer["reports"][0]["processes"]) == (3, 1), imported
    assert "replaced in 1 of the job's processes, but never called" in imported.stderr
    unreached, answer = _fix(place, "--", "true")
    assert (unreached.code, answer["reports"][0]["processes"]) == (3, 0), unreached


def test_a_class_that_overrides_the_function_is_named(place: pathlib.Path) -> None:
    done, answer = _run_script(
        place, "import toyframework\nclass Mine(toyframework.Sender):\n    def send(self, weights):\n        pass\n"
    )
    assert done.code == 3, done
    assert answer["reports"][0]["overridden"] == ["__main__.Mine"]


@pytest.mark.parametrize("value", [0, 1])
def test_a_verified_sync_that_differs_from_the_model_is_no_success(place: pathlib.Path, value: int) -> None:
    """Zero doubled is zero: a sync that doubles it is right."""
    done, answer = _fix(place, "--verify", "--", sys.executable, "job.py", str(value))
    ((num_tensors, differences),) = answer["reports"][0]["verified"].values()
    assert (done.code, num_tensors, len(differences)) == (value, 1, value), done
    assert "replaced on 1 of 1 rank, called 1 time\n" in done.stderr
    assert "rank 0, 1 tensor: " in done.stderr


def test_a_function_of_unknown_source_keeps_the_job_from_starting(place: pathlib.Path) -> None:
    (place / "toyframework.py").write_text(_FRAMEWORK.replace("for weight", "for  weight"))
    done, _ = _fix(place, "--", "touch", "started")
    assert done.code == 3, done
    assert not (place / "started").exists()


def test_a_function_that_the_job_has_replaced_ends_the_job(place: pathlib.Path) -> None:
    (place / "toyframework.py").write_text(f"{_FRAMEWORK}\n\nSender.send = lambda self, weights: weights\n")
    done, answer = _fix(place, "--", sys.executable, "job.py", "3")
    assert done.code == 3, done
    assert "toyframework.py:9" in answer["refusals"][0]
    assert "sent" not in done.stdout


def test_workers_of_ray_with_a_path_of_their_own_are_refused(place: pathlib.Path) -> None:
    (place / "ray.py").write_text("def init(runtime_env=None):\n    print('started')\n")
    start = "import ray, os\nray.init(runtime_env={'env_vars': {'PYTHONPATH': %s}})\nimport toyframework"
    refused, answer = _run_script(place, start % "'/mine'")
    assert refused.code == 3, refused
    assert "started" not in refused.stdout
    # The line that the sentence says to add is the remedy.
    path = answer["refusals"][0].split()[-1]
    assert path.endswith("/mine")
    followed, _ = _run_script(place, f"{start % repr(path)}\ntoyframework.Sender().send([])")
    assert "started" in followed.stdout, followed
    assert followed.code == 0, followed


@pytest.mark.parametrize("options", ["-I", "-E", "-uS"])
def test_a_python_that_ignores_its_environment_is_refused(place: pathlib.Path, options: str) -> None:
    done, _ = _fix(place, "--", sys.executable, options, "job.py", "3")
    assert done.code == 2, done
    assert done.stdout == ""


def test_no_framework_and_two_frameworks_are_refused(place: pathlib.Path) -> None:
    _install(place, "othertoy", _FRAMEWORK)
    both, _ = _fix(place, "--dry-run")
    named, _ = _fix(place, "--dry-run", "--framework=othertoy")
    assert (both.code, named.code) == (2, 0), both
    assert "(toyframework, othertoy): name the job's with --framework" in both.stderr
    assert "othertoy:Sender.send" in named.stdout
    for name in ("toyframework", "othertoy"):
        (place / f"{name}-1.0.dist-info" / "METADATA").unlink()
        (place / f"{name}-1.0.dist-info").rmdir()
    assert _fix(place, "--dry-run")[0].code == 3


def _set_libraries(place: pathlib.Path, *names: str) -> None:
    (place / "sitecustomize.py").write_text(f"{_SITECUSTOMIZE}\nentry.LIBRARIES = {names!r}\n")


def test_libraries_are_fixed_by_default_where_no_other_framework_is_installed(place: pathlib.Path) -> None:
    _install(place, "othertoy", _FRAMEWORK)
    _set_libraries(place, "othertoy")
    of_framework, _ = _fix(place, "--dry-run")
    _set_libraries(place, "othertoy", "toyframework")
    of_both, _ = _fix(place, "--dry-run")
    assert (of_framework.code, of_both.code) == (0, 0), of_both
    assert "othertoy" not in of_framework.stdout
    assert of_both.stdout.count("Sender.send") == 2, of_both


def test_a_fix_that_is_named_alone_needs_no_framework(place: pathlib.Path) -> None:
    _install(place, "othertoy", _FRAMEWORK)
    done, _ = _fix(place, "--dry-run", "--only=othertoy-sender")
    assert (done.code, done.stdout.count("Sender.send")) == (0, 1), done


def test_a_function_that_one_rank_calls_makes_no_other_missing(place: pathlib.Path) -> None:
    one_rank = "import dataclasses\nentry.FIXES = [dataclasses.replace(f, on_every_rank=False) for f in entry.FIXES]\n"
    (place / "sitecustomize.py").write_text(f"{_SITECUSTOMIZE}\n{one_rank}")
    (place / "job.py").write_text(_SEND.replace("((_, sent),)", "if dist.get_rank():\n    sys.exit()\n((_, sent),)"))
    done, answer = _fix(place, "--", *_TORCHRUN, "job.py", "3")
    (report,) = answer["reports"]
    assert (done.code, report["callers"], report["missing"], report["unheard"]) == (0, [0], [], []), done


@pytest.mark.parametrize("words", [(), ("--only=other", "--", "true"), ("--", "no-such-program"), ("--diff", "a", "b")])
def test_a_command_that_means_nothing_is_a_usage_error(place: pathlib.Path, words: tuple[str, ...]) -> None:
    done, _ = _fix(place, *words)
    assert done.code == 2, done


def test_a_bare_name_with_dry_run_is_the_framework(place: pathlib.Path) -> None:
    _install(place, "othertoy", _FRAMEWORK)
    named, _ = _fix(place, "othertoy", "--dry-run")
    assert (named.code, [line for line in named.stdout.splitlines() if line.endswith("-sender")]) == (
        0,
        ["othertoy-sender"],
    ), named
    assert _fix(place, "nothing-like-it", "--dry-run")[0].code == 2


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (("toyframework",), "fsdp-doctor fix --framework toyframework -- torchrun train.py"),
        (("toyframework", "python", "job.py"), "fsdp-doctor fix --framework toyframework -- python job.py"),
    ],
)
def test_a_framework_where_the_job_is_expected_gets_the_command(
    place: pathlib.Path, words: tuple[str, ...], typed: str
) -> None:
    done, _ = _fix(place, *words)
    assert done.code == 2, done
    assert typed in done.stderr


def test_the_patch_of_a_release_replaces_the_function_where_it_is_applied(place: pathlib.Path) -> None:
    done, _ = _fix(place, "toyframework", "--diff")
    assert done.code == 0, done
    subprocess.run(["patch", "-p1"], input=done.stdout, text=True, cwd=place, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    job = [sys.executable, "job.py", "3"]
    patched = subprocess.run(job, cwd=place, env=environment, capture_output=True, text=True, check=True)
    assert patched.stdout == "sent 6.0\n", patched


def test_a_signal_is_passed_on_to_the_job(place: pathlib.Path) -> None:
    (place / "waits.py").write_text("import signal\nopen('ready', 'w').write('ready')\nsignal.pause()\n")
    os.mkfifo(place / "ready")
    environment = {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "fsdp_doctor", "fix", "--", sys.executable, "waits.py"]
    job = Started(*command, env=environment, cwd=place)
    assert job.told(place / "ready") == "ready"
    os.kill(job.pid, signal.SIGTERM)
    done = job.wait()
    assert (done.code, done.left) == (128 + signal.SIGTERM, []), done
