"""What a script cannot see is refused before one is written."""

from __future__ import annotations

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.repro import expected


def test_values_of_the_optimizers_state_are_for_the_doctor_alone_to_see() -> None:
    case_id = "fsdp1-orig/optimizer/unstaged/size1/nonblocking/get_optimizer_state_dict"
    (case,) = select(Selection(case_ids=(case_id,)))
    with pytest.raises(UsageError, match="the optimizer's state has other values, the doctor alone can see"):
        expected(case)


def test_where_the_optimizers_state_lies_is_for_a_script_too() -> None:
    (case,) = select(Selection(case_ids=("fsdp1-orig/optimizer/unstaged/size1/get_optimizer_state_dict",)))
    assert expected(case).kind == "misplaced"
