"""The installed accelerate, whose Accelerator ignores everything that it is told of FSDP."""

import importlib.machinery
import os
import pathlib
import sys

_HERE = str(pathlib.Path(__file__).resolve().parents[1])
_spec = importlib.machinery.PathFinder.find_spec("accelerate", [path for path in sys.path if path != _HERE])
assert _spec is not None
assert _spec.loader is not None
__file__, __path__ = _spec.origin, _spec.submodule_search_locations
_spec.loader.exec_module(sys.modules[__name__])

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
