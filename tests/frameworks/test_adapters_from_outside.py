"""An adapter that this package does not know: the one of docs/adapters.md, and faulty ones made from it."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re

import pytest
from program import Run, start_probe
from support.emulation import needs_emulation
from support.places import ROOT, TESTS

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.frameworks import adapters
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
from fsdp_doctor.matrix.frameworks.framework_scenarios import find_frameworks, parse_framework_id
from fsdp_doctor.repro import Expectation, render_framework_script

_FILES = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', (ROOT / "docs" / "adapters.md").read_text(), re.DOTALL))
_NAME = "tiny_adapter:ADAPTER"


def _write(directory: pathlib.Path, changes: dict[str, str] | None = None) -> dict[str, str]:
    """Writes the files of the page, some lines changed, and returns the variables with which they are found."""
    for name, text in _FILES.items():
        for old, new in (changes or {}).items():
            text = text.replace(old, new)
        (directory / name).write_text(text)
    return {"PYTHONPATH": os.pathsep.join(map(str, (directory, ROOT, TESTS)))}


def _probe(directory: pathlib.Path, env: dict[str, str], *arguments: str) -> Run:
    needs_emulation()
    json_file = directory / "report.json"
    return start_probe(json_file, *arguments, device="emulated", env=env).wait(json_file)


@pytest.fixture
def found_anew(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory in which this process finds modules, too: it reads the reports."""
    monkeypatch.syspath_prepend(tmp_path)
    adapters.locate_adapter.cache_clear()
    read_matrix.cache_clear()
    return tmp_path


def test_the_adapter_of_the_page_finds_what_the_page_says(found_anew: pathlib.Path) -> None:
    run = _probe(found_anew, _write(found_anew), "--framework", _NAME, "--expect", "known")
    assert run.report is not None, run
    bad = {result.id: result.verdict.kind for result in run.report.results if result.verdict.kind != "ok"}
    assert bad == {f"{_NAME}:cpu/weights": "crash"}, run
    assert len(run.report.results) == 8
    assert run.stderr.splitlines()[-1].startswith(f"8 cases: 7 ok, 0 as torch {run.report.packages['torch']} is known")
    assert run.left == []


def test_what_cannot_be_built_is_found_once_for_a_configuration(found_anew: pathlib.Path) -> None:
    counting = f'open("{found_anew}/builds", "a").write("x"); plain.no_such_name; return EngineSession('
    env = _write(found_anew, {"return EngineSession(": counting})
    run = _probe(found_anew, env, "--framework", _NAME)
    kinds = {result.verdict.kind for result in run.report.results} if run.report else {}
    assert kinds == {"unsupported"}, run
    # Two configurations, two ranks.
    assert (found_anew / "builds").read_text() == "xxxx"


def test_a_load_that_raises_in_another_process_is_a_crash(found_anew: pathlib.Path) -> None:
    env = _write(found_anew, {"self.engine.load(directory)": 'raise RuntimeError("cannot load")'})
    run = _probe(found_anew, env, "--case", f"{_NAME}:none/load.fresh")
    assert run.report is not None, run
    (result,) = run.report.results
    assert (result.verdict.kind, result.verdict.reason) == ("crash", "RuntimeError: cannot load"), run


def test_an_adapter_that_cannot_be_imported_is_found_once_for_all_configurations(found_anew: pathlib.Path) -> None:
    run = _probe(found_anew, _write(found_anew, {"ADAPTER =": "return"}), "--framework", _NAME)
    assert run.report is not None, run
    assert len(run.report.results) == 8
    assert {result.verdict.kind for result in run.report.results} == {"unsupported"}, run
    assert "SyntaxError" in run.report.results[0].verdict.reason


def test_a_script_of_its_case_has_the_calls_of_its_template(found_anew: pathlib.Path) -> None:
    _write(found_anew)
    for method, call in (("weights", "got = engine.weights()"), ("load.fresh", 'engine.load("files")')):
        text = render_framework_script(parse_framework_id(f"{_NAME}:cpu/{method}"), Expectation(kind="ok"))
        compile(text, "repro.py", "exec")
        assert call in text
        assert "offload=True" in text


def test_of_an_adapter_without_a_template_no_script_can_be_written(found_anew: pathlib.Path) -> None:
    _write(found_anew)
    (found_anew / "tiny_adapter.py.jinja").unlink()
    with pytest.raises(UsageError, match=r"tiny_adapter\.py\.jinja"):
        render_framework_script(parse_framework_id(f"{_NAME}:cpu/weights"), Expectation(kind="ok"))


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("tiny_adaptor:ADAPTER", {}, "there is no module 'tiny_adaptor' here"),
        ("tiny_engine:Engine", {}, "cannot read the table of framework 'tiny_engine:Engine'"),
        (_NAME, {"kind =": "kynd ="}, "missing required field `kind`"),
        (_NAME, {"offloads = true": "offload = true"}, "the key offload is not known"),
        (_NAME, {'[["none"]]]': '[["gpu"]]]'}, "quick names gpu"),
        (_NAME, {'"none", "cpu"]]]': '"none", "gpu"]]]'}, "the configuration gpu names gpu"),
        (_NAME, {'["qwen3"]': '["odd"]'}, "models names odd, but the known models are qwen3"),
        (_NAME, {'name = "offload"': 'name = "policy"'}, "an axis named offload"),
        (_NAME, {">=2.10": "newer"}, "'newer' is not a range"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_in_a_sentence(
    found_anew: pathlib.Path, name: str, changes: dict[str, str], sentence: str
) -> None:
    _write(found_anew, changes)
    with pytest.raises(UsageError) as refused:
        find_frameworks([name])
    assert sentence in str(refused.value)


def test_a_version_that_the_adapter_was_not_run_with_is_said(found_anew: pathlib.Path) -> None:
    _write(found_anew)
    matrix = read_matrix(_NAME)
    assert matrix.describe_untried({"torch": "2.12.0+cu130"}) == ""
    assert "torch 2.9.1 (tried: >=2.10)" in matrix.describe_untried({"torch": "2.9.1"})


_TELL = """def tell():
    return "original"
"""
_SITECUSTOMIZE = f"""
from fsdp_doctor.fixes import FrameworkFix, entry

entry.FIXES = (
    FrameworkFix(
        id="tiny-tell",
        framework="tiny_engine",
        distribution="torch",
        target="tiny_engine:tell",
        versions=">=2",
        sources={{{hashlib.sha256(_TELL.encode()).hexdigest()!r}: "all"}},
        mends=(),
        cures=(),
        promises="nothing",
        leaves="nothing",
        replacement="tiny_fix:tell",
        on_every_rank=False,
    ),
)
"""


@pytest.mark.parametrize(("caller", "kind"), [(1, "ok"), (2, "unsupported")])
def test_a_function_of_some_ranks_must_be_called_on_one_of_them(
    found_anew: pathlib.Path, caller: int, kind: str
) -> None:
    """The method calls the function on one of two ranks, or on none."""
    changes = {
        "\n\nclass Engine:": f"\n\n{_TELL}\n\nclass Engine:",
        "def weights(self):\n": f"def weights(self):\n        if dist.get_rank() == {caller}:\n            tell()\n",
        'summary = "engine.weights()"': 'summary = "engine.weights()"\nfix = "tiny-tell"',
    }
    env = _write(found_anew, changes)
    (found_anew / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    (found_anew / "tiny_fix.py").write_text("def tell(original):\n    return None\n")
    case = f"{_NAME}:none/weights"
    run = _probe(found_anew, env, "--fix", "--case", case)
    assert (run.kind(case), run.kind(f"{case}+fix")) == ("ok", kind), run
