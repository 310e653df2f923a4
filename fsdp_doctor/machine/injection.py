"""Executes files of this program in the processes of a user's job, which is started unchanged."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

# Has the ``sitecustomize`` that Python imports when it starts.
INJECTED = pathlib.Path(__file__).with_name("injected")


def make_variables(after_import: Mapping[str, pathlib.Path]) -> dict[str, str]:
    """Returns the environment variables with which a job's processes execute files after imports.

    after_import: by the name of a module, the file whose ``start(module name)`` is called once the module has been
    executed; it has the standard library and what the job has imported. Files that this process was told to execute
    are kept. A process that gets no PYTHONPATH executes none: ``python -I``, ``srun --export=NONE``, and Ray workers
    or containers that are given one of their own.
    """
    files = json.loads(os.environ.get("FSDP_DOCTOR_AFTER_IMPORT", "{}"))
    files |= {module: str(file) for module, file in after_import.items()}
    return {
        "FSDP_DOCTOR_AFTER_IMPORT": json.dumps(files),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH")])),
    }
