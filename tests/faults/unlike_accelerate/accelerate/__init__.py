"""The installed accelerate, whose Accelerator does in some of its methods what no framework should do."""

import os
import pathlib
import subprocess
import sys

from faults.overlay import become_installed

become_installed(sys.modules[__name__])

_prepare, _save_state = Accelerator.prepare, Accelerator.save_state  # noqa: F821, the installed package's


def _imports_what_is_not_installed(self, *arguments, **options):
    if self.state.fsdp_plugin.fsdp_version == 1:
        import a_package_of_fsdp1  # noqa: F401
    return _prepare(self, *arguments, **options)


def _exits(self, *arguments, **options):
    sys.exit(7)


def _prints_without_end(*arguments, **options):
    while True:
        print("merging", "." * 200)


def _leaves_a_process_and_writes_home(self, *arguments, **options):
    _save_state(self, *arguments, **options)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    path = pathlib.Path(os.path.expanduser("~")) / "written_by_accelerate"
    path.write_text(repr({name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "https_proxy", "HF_HOME")}))
    print(f"HOME WAS {path.parent}", file=sys.stderr)


del Accelerator.get_state_dict  # noqa: F821
Accelerator.prepare = _imports_what_is_not_installed  # noqa: F821
Accelerator.save_model = _exits  # noqa: F821
Accelerator.save_state = _leaves_a_process_and_writes_home  # noqa: F821
utils.merge_fsdp_weights = _prints_without_end  # noqa: F821
