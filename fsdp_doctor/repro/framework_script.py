"""The script of a framework's case: a template next to the adapter has the framework's own calls."""

from __future__ import annotations

import pathlib
import re

import jinja2

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.repro.expectation import Expectation

_ROOM = pathlib.Path(__file__).parent


def render_framework_script(case: FrameworkCase, expectation: Expectation, file_name: str = "repro.py") -> str:
    """Renders a script that runs ``case`` on two GPUs, and ends with 0 if everything is right.

    Raises UsageError for an adapter without a template.
    """
    if case.is_fixed:
        raise UsageError(
            f"case {case.id!r}: a script has the framework alone; write that of {case.plain_method}, and run it by "
            f"`fsdp-doctor fix -- torchrun {file_name}`"
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
        seed='int(sys.argv[1] == "load")' if case.definition.kind == "resume" else "0",
    )
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\n[ ]+(?=\n)", "", text)).rstrip() + "\n"
