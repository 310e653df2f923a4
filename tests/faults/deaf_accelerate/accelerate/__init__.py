"""The installed accelerate, whose Accelerator ignores everything that it is told of FSDP."""

import os
import sys

from faults.overlay import become_installed

become_installed(sys.modules[__name__])

_init = Accelerator.__init__  # noqa: F821, the installed package's
_DEFAULTS = {
    "FSDP_VERSION": "1",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_USE_ORIG_PARAMS": "true",
}


def _ignores_its_configuration(self, *arguments, **options):
    os.environ.update(_DEFAULTS)
    _init(self, *arguments, **options)


Accelerator.__init__ = _ignores_its_configuration  # noqa: F821
