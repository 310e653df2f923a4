"""What a configuration loads is foretold as what it extracts is."""

from __future__ import annotations

from support.checked import FSDP2, checked, flag, loads, use_of


def test_a_resume_of_verl_is_the_case_of_its_rank_files_staged_where_param_offload_stages_it() -> None:
    others = (flag("offload_policy", "false"), flag("optimizer_offload", "false"))
    asked = ("trainer.save_freq=10", FSDP2, flag("param_offload"), *others)
    result = checked("verl_grpo.yaml", *asked, version="0.9.0")
    assert loads(use_of(result, "actor")) == ["fsdp2/param/staged/fresh/rank_files.model+optimizer"]


def test_nothing_is_resumed_where_nothing_is_saved() -> None:
    result = checked("verl_grpo.yaml", "trainer.save_freq=-1", version="0.9.0")
    assert loads(use_of(result, "actor")) == []


def test_a_load_that_is_known_to_fail_is_a_finding_with_its_case() -> None:
    result = checked("accelerate_v2.yaml", version="1.10")
    case = "fsdp2/policy/unstaged/fresh/set_model_state_dict.broadcast"
    assert case in loads(use_of(result, "model"))
