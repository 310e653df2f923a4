"""Made-up merged reports, for tests of the page that shows them."""

import dataclasses

from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.versions.merging import merge
from fsdp_doctor.verdict.classification import MEANING
from support import reports

HOSTILE = '</script><script>document.title = "run"</script><img src=x onerror="document.title=1"> & "quoted" <b>'
# The message of an entry, for one device.
MESSAGE = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
    '"{device}".  This is no longer allowed; the devices must match.'
)
KNOWN = "fsdp2-pinned-policy-half-moved"
KNOWN_CASE = "fsdp2/policy/staged/state_dict"
HOSTILE_CASE = "fsdp2/policy/staged/unshard"
CASES = select(Selection())
FRAMEWORK_CASES = select(Selection(frameworks=("accelerate",)))[:5]


def report_of(torch, results, **fields):
    environment = {"python": "3.12.1", "torch": torch, "packages": {"torch": torch, "transformers": "5.0.0"}}
    defaults = {"environment": environment, "device": "emulated", "rerun_options": "--device emulated --nproc 2"}
    return reports.report(*results, **{**defaults, **fields})


def merged_versions(*versions, **fields):
    """Merges one report of the default matrix with a few failures for each version."""
    return merge({f"torch-{version}.json": report_of(version, results_of(version), **fields) for version in versions})


def merged_devices():
    """Merges reports of two devices, with a verdict of every kind, and a case that the report of CUDA lacks."""
    cuda = report_of("2.11.0", results_of("2.11.0")[1:], device="cuda", rerun_options="--nproc 2")
    old = report_of("2.12.0", results_of("2.12.0")[:40], num_selected=99, complete=False, ended="stopped by SIGINT")
    of_accelerate = [reports.result(case, "ok", "") for case in FRAMEWORK_CASES]
    new = report_of("2.13.0", [*every_kind(), *results_of("2.13.0")[len(MEANING) :], *of_accelerate])
    return merge({"cuda.json": cuda, "old.json": old, "new.json": new})


def every_kind():
    kinds = zip(CASES, MEANING, strict=False)
    return [reports.result(case, kind, f"reason of {kind}" if kind != "ok" else "") for case, kind in kinds]


def results_of(version):
    results = [reports.result(case, "ok", "") for case in CASES]
    return [_failing(result, version) for result in results]


def _failing(result, version):
    if result.id == KNOWN_CASE:
        message = MESSAGE.format(device="emulated:0")
        return reports.result(result.case, "crash", message, traceback=reports.TRACEBACK)
    if result.id == HOSTILE_CASE:
        return dataclasses.replace(result, verdict=dataclasses.replace(result.verdict, kind="crash", reason=HOSTILE))
    if hash_of(result.id, version) % 10 == 0:
        reason = f"ValueError: torch {version} does not like {result.id}"
        return dataclasses.replace(result, verdict=dataclasses.replace(result.verdict, kind="crash", reason=reason))
    return result


def hash_of(*words):
    """Returns a hash that is the same in every process."""
    return sum(ord(letter) * at for at, letter in enumerate("".join(words), start=1))
