"""A tensor whose storage is gone is refused by every operation; none reads memory that is another's."""

from __future__ import annotations

import sys

import pytest
from program import run
from support.emulation import needs_emulation

FREED: dict[str, str] = {
    "add": "x + 1",
    "sum": "x.sum()",
    "clone": "x.clone()",
    "cpu": "x.cpu()",
    "item": "x[0].item()",
    "tolist": "x.tolist()",
    "print": "repr(x)",
    "cast": "x.to(torch.bfloat16)",
    "matmul": "x.view(2, 4) @ x.view(4, 2)",
    "cat": "torch.cat([x, x])",
    "index": "x[torch.tensor([1])]",
    "foreach": "torch._foreach_add([x], 1)",
    "attention": "functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 4)] * 3)",
    "histc": "torch.histc(x)",
    "a view that was made before": "view + 1",
    "contiguous of a transposed view": "transposed.contiguous()",
    "a copy to another tensor": "y.copy_(x)",
    "a copy to the host": "host.copy_(x)",
    "a late copy to the host": "pinned.copy_(x, non_blocking=True)",
    "a copy to another device": "x.to('emulated:1')",
    "a foreach copy to another": "torch._foreach_copy_([y], [x])",
    "a write by a kernel": "x.zero_()",
    "a write by a copy within the device": "x.copy_(y)",
    "a write by a copy from the host": "x.copy_(host)",
    "a write by a late copy from the host": "x.copy_(pinned, non_blocking=True); torch.emulated.synchronize()",
    "a write by a foreach copy": "torch._foreach_copy_([x], [y])",
    "a write by a view's copy": "transposed.copy_(y.view(4, 2))",
    "a write by out=": "torch.add(y, 1, out=view)",
    "a write by split_with_sizes_copy": "torch.split_with_sizes_copy(y, [8], out=[x])",
}


# Each statement in a process of its own, forked from one that has imported torch.
_FREE = """
import os, sys, torch, fsdp_doctor.emulated
from torch.nn import functional
x, y = (torch.ones(8, device="emulated") for _ in range(2))
host, pinned = torch.ones(8), torch.ones(8).pin_memory()
view, transposed = x[:], x.view(2, 4).t()
x.untyped_storage().resize_(0)
for statement in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(statement)
            os._exit(1)
        except RuntimeError:
            os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print({0: "raised", 1: "nothing was raised"}.get(end, f"died with {end}"), flush=True)
"""


@pytest.fixture(scope="module")
def ends_of_freed() -> dict[str, str]:
    needs_emulation()
    done = run(sys.executable, "-W", "ignore", "-c", _FREE, *FREED.values())
    assert done.code == 0, done.stderr
    return dict(zip(FREED, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", FREED)
def test_touching_a_tensor_whose_storage_is_gone_raises(name: str, ends_of_freed: dict[str, str]) -> None:
    assert ends_of_freed[name] == "raised"
