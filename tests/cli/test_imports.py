"""Tests that what must work without torch does not import it."""

from __future__ import annotations

import sys

import pytest
from program import run
from support.places import TESTS

import fsdp_doctor

_CONFIG = TESTS / "check" / "configs" / "verl_grpo.yaml"
_PROGRAMS = {
    "the package, until what needs it is asked for": "import fsdp_doctor",
    **{
        f"list {' '.join(options)}": (
            f"import sys; sys.argv[1:] = {['list', *options]}; sys.stdout = open('/dev/null', 'w'); "
            "from fsdp_doctor.cli.app import app; app(standalone_mode=False); sys.stdout = sys.__stdout__"
        )
        for options in (["--full", "--json"], ["--methods"], ["--axes"])
    },
    "explain": "import fsdp_doctor.cli; from fsdp_doctor.explain import explain, text",
    "repro": (
        "from fsdp_doctor.repro import find_expected, render_script; "
        "from fsdp_doctor.matrix.selection import Selection, select; "
        "case = select(Selection(case_ids=('fsdp2/policy/staged/state_dict',)))[0]; "
        "render_script(case, find_expected(case))"
    ),
    "check": (
        "from fsdp_doctor.check import check, presentation; "
        f"presentation.render_text(check([{str(_CONFIG)!r}])); presentation.render_json(check([{str(_CONFIG)!r}]))"
    ),
}


@pytest.mark.parametrize("program", _PROGRAMS.values(), ids=_PROGRAMS)
def test_torch_and_frameworks_are_not_imported_by(program: str) -> None:
    said = "import sys; print(sorted({'torch', 'transformers', 'accelerate', 'verl'} & set(sys.modules)))"
    done = run(sys.executable, "-c", f"{program}; {said}")
    assert (done.code, done.stdout.strip()) == (0, "[]"), done.stderr


def test_completion_lists_every_public_name_without_torch() -> None:
    code = "import sys, fsdp_doctor; print({*fsdp_doctor.__all__} - {*dir(fsdp_doctor)}, 'torch' in sys.modules)"
    done = run(sys.executable, "-c", code)
    assert (done.code, done.stdout.strip()) == (0, "set() False"), done.stderr


def test_a_misspelt_name_is_an_error_that_suggests_the_right_one() -> None:
    code = "import sys, fsdp_doctor; assert 'difflib' not in sys.modules; fsdp_doctor.full_tensor"
    done = run(sys.executable, "-c", code)
    error = "AttributeError: module 'fsdp_doctor' has no attribute 'full_tensor' (did you mean full_tensors?)"
    assert done.stderr.strip().splitlines()[-1] == error
    for name, ending in (
        ("save_optimiser_state", "(did you mean save_optimizer_state?)"),
        ("xyz", "'xyz'"),
        ("__x__", "'__x__'"),
    ):
        with pytest.raises(AttributeError) as raised:
            getattr(fsdp_doctor, name)
        assert str(raised.value).endswith(ending)


def test_a_fingerprint_of_a_file_imports_no_sharding_of_torch() -> None:
    code = (
        "import sys; from fsdp_doctor.weights.fingerprints import FingerprintError, fingerprint_checkpoint; "
        "print(sorted({'torch.distributed.tensor', 'torch.distributed.fsdp', 'sympy'} & set(sys.modules)))"
    )
    done = run(sys.executable, "-c", code)
    assert (done.code, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_package_has_what_needs_torch_too() -> None:
    done = run(sys.executable, "-c", "import sys, fsdp_doctor; fsdp_doctor.examine; assert 'torch' in sys.modules")
    assert done.code == 0, done.stderr
