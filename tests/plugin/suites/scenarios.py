"""Tests marked fsdp that a run of pytest under test runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_doctor import full_tensors, load_full_tensors, promises


@pytest.mark.fsdp(strategy="fsdp2,fsdp1", offload=["none", "policy"], staging="all")
def test_ours(fsdp_case: Any) -> None:
    assert (fsdp_case.world_size, fsdp_case.mesh.size()) == (2, 2)
    with torch.no_grad():
        fsdp_case.check(full_tensors(fsdp_case.model), unstage=True)


@pytest.mark.fsdp(strategy="fsdp2", offload="param")
@promises(device="cpu", ranks="rank0", dtype="compute")
def test_on_rank_0s_cpu(fsdp_case: Any) -> None:
    weights = {name: weight.bfloat16().cpu() for name, weight in full_tensors(fsdp_case.model)}
    fsdp_case.check(weights if fsdp_case.rank == 0 else {})


@pytest.mark.fsdp(strategy="fsdp2")
def test_wrong_on_rank_1(fsdp_case: Any) -> None:
    weights = dict(full_tensors(fsdp_case.model))
    if fsdp_case.rank == 1:
        weights["model.norm.weight"][3] += 1
    fsdp_case.check(weights)


@pytest.mark.fsdp(strategy="fsdp2")
def test_breaks_training(fsdp_case: Any) -> None:
    weights = dict(full_tensors(fsdp_case.model))
    with torch.no_grad():
        next(fsdp_case.model.parameters()).zero_()
    fsdp_case.check(weights)


_KEPT: dict[str, torch.Tensor] = {}


def _extract_once(model: Any) -> dict[str, torch.Tensor]:
    if not _KEPT:
        _KEPT.update(full_tensors(model))
    return _KEPT


@pytest.mark.fsdp(strategy="fsdp2,fsdp1", offload=["none", "param", "policy"])
def test_extracts_after_a_step(fsdp_case: Any) -> None:
    before = dict(full_tensors(fsdp_case.model))
    fsdp_case.train_step()
    weights = dict(full_tensors(fsdp_case.model))
    assert not torch.equal(weights["model.norm.weight"], before["model.norm.weight"])
    fsdp_case.check(weights)


@pytest.mark.fsdp(strategy="fsdp2")
def test_gives_the_weights_of_before_the_step(fsdp_case: Any) -> None:
    weights = {name: weight.clone() for name, weight in full_tensors(fsdp_case.model)}
    fsdp_case.train_step()
    fsdp_case.check(weights)


@pytest.mark.fsdp(strategy="fsdp2,fsdp1", offload=["none", "policy"])
def test_gives_a_function(fsdp_case: Any) -> None:
    fsdp_case.check(full_tensors)


@pytest.mark.fsdp(strategy="fsdp2")
def test_gives_a_function_that_keeps_its_weights(fsdp_case: Any) -> None:
    fsdp_case.check(_extract_once)


@pytest.mark.fsdp(strategy="fsdp2", offload="policy", staging="staged")
def test_half_moved_does_not_train(fsdp_case: Any) -> None:
    fsdp_case.check(full_tensors(fsdp_case.model))


@pytest.mark.fsdp(strategy="all", offload="policy")
@promises(direction="in")
def test_loads(fsdp_case: Any) -> None:
    fsdp_case.check(load_full_tensors(fsdp_case.model, fsdp_case.state))


@pytest.mark.fsdp(strategy="fsdp2", offload="none")
@promises(direction="in")
def test_loads_nothing(fsdp_case: Any) -> None:
    fsdp_case.check()


@pytest.mark.fsdp(strategy="fsdp2")
def test_checks_twice(fsdp_case: Any) -> None:
    weights = dict(full_tensors(fsdp_case.model))
    fsdp_case.check(weights)
    fsdp_case.check(weights)


@pytest.mark.fsdp(sharding="hsdp")
def test_needs_four_ranks(fsdp_case: Any) -> None: ...


@pytest.mark.fsdp(pinning="unpinned", offload="none")
def test_contradicts_itself(fsdp_case: Any) -> None: ...


@pytest.mark.fsdp(offlod="policy")
def test_has_an_unknown_axis(fsdp_case: Any) -> None: ...


@pytest.mark.fsdp(offload="polcy")
def test_has_an_unknown_value(fsdp_case: Any) -> None: ...


@pytest.mark.fsdp(checkpoint="other-run")
@promises(direction="in")
def test_has_a_value_of_the_probe_alone(fsdp_case: Any) -> None: ...


@pytest.mark.fsdp(offload="policy")
def test_has_no_fixture() -> None: ...


@pytest.mark.fsdp("policy")
def test_has_a_value_without_its_axis(fsdp_case: Any) -> None: ...


_MODELS: list[Any] = []


@pytest.mark.parametrize("number", range(3))
@pytest.mark.fsdp(strategy="fsdp2", offload="none")
def test_has_the_same_model(fsdp_case: Any, number: int) -> None:
    _MODELS.append(fsdp_case.model)
    fsdp_case.check(full_tensors(fsdp_case.model))
    assert [model is _MODELS[0] for model in _MODELS] == [True] * (number + 1)
