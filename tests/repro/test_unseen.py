"""What a script cannot see is refused before one is written."""

from __future__ import annotations

import pytest
from support.reports import report, result

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.repro import expected, reported


def test_values_of_the_optimizers_state_are_for_the_doctor_alone_to_see() -> None:
    case_id = "fsdp1-orig/optimizer/unstaged/size1/nonblocking/get_optimizer_state_dict"
    (case,) = select(Selection(case_ids=(case_id,)))
    with pytest.raises(UsageError, match="the optimizer's state has other values, the doctor alone can see"):
        expected(case)


def test_where_the_optimizers_state_lies_is_for_a_script_too() -> None:
    (case,) = select(Selection(case_ids=("fsdp1-orig/optimizer/unstaged/size1/get_optimizer_state_dict",)))
    assert expected(case).kind == "misplaced"


@pytest.mark.parametrize(
    ("case_id", "reason"),
    [
        (
            "fsdp2/none/unstaged/state_dict",
            "the extraction changed 3 of 90 parts of the training state: lm_head.weight",
        ),
        (
            "fsdp2/none/unstaged/fresh/load_state_dict.sharded",
            "the next training step ends otherwise than that of a run which had this state from the start: lm_head",
        ),
        (
            "fsdp2/none/unstaged/fresh/load_state_dict.sharded",
            "requires_grad is False where it was True: lm_head.weight",
        ),
    ],
)
def test_a_verdict_on_what_a_script_does_not_compare_is_refused(case_id: str, reason: str) -> None:
    (case,) = select(Selection(case_ids=(case_id,)))
    with pytest.raises(UsageError, match=f"that {reason.partition(':')[0]}, the doctor alone can see"):
        reported(case, report(result(case, "poisoned", reason)))
