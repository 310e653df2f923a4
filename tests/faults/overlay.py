"""Makes a module of this directory's overlays be the installed package of its name, before it changes parts of it."""

import importlib.machinery
import pathlib
import sys
import types


def become_installed(module: types.ModuleType) -> None:
    """Runs the installed package of the module's name in the module. The module's directory is passed over."""
    overlay = str(pathlib.Path(str(module.__file__)).resolve().parents[1])
    elsewhere = [path for path in sys.path if path != overlay]
    spec = importlib.machinery.PathFinder.find_spec(module.__name__, elsewhere)
    assert spec is not None
    assert spec.loader is not None
    module.__file__, module.__path__ = spec.origin, list(spec.submodule_search_locations or ())
    spec.loader.exec_module(module)
