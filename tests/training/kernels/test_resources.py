"""What kernels need of a GPU, as the compiler reports it: no kernel spills registers to memory."""

import re

import pytest

from common.errors import KernelError
from tests.conftest import ROOT
from tests.training.kernels.conftest import built
from training.kernels.build import log_of, nvcc
from training.kernels.resources import read_log


@pytest.mark.slow
def test_all_sources_compile_for_three_architectures_and_no_kernel_spills() -> None:
    try:
        compiler = nvcc()
    except KernelError as error:
        pytest.skip(str(error))
    log = log_of(built(compiler))
    text = log.read_text()
    assert re.findall(r"[1-9]\d* bytes spill", text) == [] and "warning" not in text
    compiled = {name: set(re.findall(rf"function '(\w+)' for '{name}'", text)) for name in ("sm_75", "sm_80", "sm_90")}
    assert len(compiled["sm_75"]) > 50 and compiled["sm_75"] == compiled["sm_80"] == compiled["sm_90"]
    documented = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert [row.kernel for row in read_log(log) if f"`{row.kernel}`" not in documented] == []
