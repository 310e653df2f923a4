"""Makes the processes of a user's job execute files of this program. The job's command is not changed."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

# The directory of the ``sitecustomize`` module that Python imports when it starts.
INJECTED = pathlib.Path(__file__).with_name("injected")


def make_variables(after_import: Mapping[str, pathlib.Path]) -> dict[str, str]:
    """Returns the environment variables that make a job's processes execute files after imports.

    after_import: maps the name of a module to a file, whose ``start(module name)`` is called when the module has been
        executed. The file may import the standard library and modules that the job has imported.

    Files that this process itself was told to execute are kept. A process without this PYTHONPATH executes no file:
    ``python -I``, ``srun --export=NONE``, and Ray workers or containers with their own PYTHONPATH.
    """
    files = json.loads(os.environ.get("FSDP_DOCTOR_AFTER_IMPORT", "{}"))
    files |= {module: str(file) for module, file in after_import.items()}
    return {
        "FSDP_DOCTOR_AFTER_IMPORT": json.dumps(files),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH")])),
    }
