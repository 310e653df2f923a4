"""Writes the script of a framework's case, from a template next to the adapter that makes the framework's own calls."""

from __future__ import annotations

import pathlib
import re

import jinja2

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.repro.expectation import Expectation
from fsdp_doctor.repro.script import describe_exit, tell_outcome

# The last statement of a script before the case begins.
_SET_UP = "\nRANK, device = "
_ROOM = pathlib.Path(__file__).parent


def render_framework_script(
    case: FrameworkCase, expectation: Expectation, file_name: str = "repro.py", *, as_test: bool = False
) -> str:
    """Renders a script that runs ``case`` on two GPUs, and shows its failure.

    Raises UsageError for an adapter without a template.

    as_test: whether the script ends with 1 if the case fails, and with 0 if it does not. The script of a case without a
        known failure always ends in this way.
    """
    if case.is_fixed:
        raise UsageError(
            f"case {case.id!r}: a script has only the framework; write the script of {case.plain_method}, and run "
            f"it with `fsdp-doctor fix -- torchrun {file_name}`"
        )
    scenario, template = case.scenario, locate_adapter(case.scenario.framework).template
    if not template.is_file():
        raise UsageError(f"no script can be written for case {case.id!r}: its adapter has no template {template}")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _ROOM]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    as_test = as_test or expectation.kind in ("ok", "refused")
    packages = dict.fromkeys(("torch", *scenario.matrix.distributions))
    text: str = environment.get_template(template.name).render(
        case=case,
        method=case.method,
        kind=case.definition.kind,
        contract=case.definition.contract,
        values=scenario.values,
        model=scenario.values["model"],
        expected=expectation,
        file_name=file_name,
        version=__version__,
        versions=", ".join(f"{name} {expectation.versions.get(name, 'any')}" for name in packages),
        describe_exit=describe_exit(as_test=as_test),
        seed='int(sys.argv[1] == "load")' if case.definition.kind == "resume" else "0",
    )
    head, mark, code = re.sub(r"\n{3,}", "\n\n", re.sub(r"\n[ ]+(?=\n)", "", text)).rstrip().partition(_SET_UP)
    line, _, code = code.partition("\n")
    script = f"{head}{mark}{line}\n\n{tell_outcome(code.strip(), as_test=as_test)}\n"
    return script if as_test else script.replace("\nimport os", "\nimport os, traceback", 1)
