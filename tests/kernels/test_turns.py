"""What kernels do before their turn, read from their PTX: each waits, and until then reads weights at most.

The assembler moves loads of what is said to be constant (``ld.global.nc``) to before the wait: so that is weights and
tables alone.
"""

import re
from collections.abc import Iterator

import pytest

from kdtree_nb.kernels.nvrtc import compile_ptx, find_nvrtc
from kdtree_nb.kernels.source import read_source
from tests.kernels.test_resources import VARIANTS

WEIGHTS = {
    "dense_mma": {"weight"},
    "w4a16_mma": {"codes", "scales"},
    "rms_norm": {"weight"},
    "add_norm": {"weight"},
    "mla_inputs": {"weight"},
}
"""Parameters that a kernel reads before its turn."""
CONSTANT = {
    *("weight", "weights", "codes", "scales", "qweight", "bias", "key_norm", "query_norm"),
    *("table", "parent_table", "child_table", "cosines", "sines"),
}
"""Parameters that no kernel of a round writes."""
ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)^\}", re.DOTALL | re.MULTILINE)
ANYWHERE = re.compile(r"(?:@!?%p\d+ )?(?:ld|st|atom|red)\.(?!.*\b(?:param|shared|local|const)\b)")
"""An access whose address space the compiler has not found out."""
ADDRESS = re.compile(r"\[(%rd\d+)[+\-\d]*\]")
CASES = [pytest.param(file, d, id=f"{file}-{'-'.join(d.values())}") for file, every in VARIANTS.items() for d in every]


def accesses(body: str, kernel: str) -> Iterator[tuple[bool, str, set[int]]]:
    """Instructions that touch global memory: whether before the wait, which, and what parameters make the address."""
    early = True
    made_of: dict[str, set[int]] = {}
    for line in body.splitlines():
        words = line.split("//")[0].strip()
        if "griddepcontrol.wait" in words:
            early = False
        elif parameter := re.match(
            rf"ld\.param\.[bu]64 (%rd\d+), \[{kernel}_param_(\d+)\]", re.sub(r"\s+", " ", words)
        ):
            made_of[parameter[1]] = {int(parameter[2])}
        elif re.search(r"(ld|st|atom|red|cp\.async|prefetch)\b.*\bglobal\b", words) or re.match(ANYWHERE, words):
            yield early, words, set().union(*(made_of.get(register, set()) for register in ADDRESS.findall(words)))
        elif len(registers := re.findall(r"%rd\d+", words)) > 1:
            of = set().union(*(made_of.get(register, set()) for register in registers[1:]))
            made_of[registers[0]] = made_of.get(registers[0], set()) | of
    assert not early, f"{kernel} never waits for its turn"


@pytest.mark.skipif(find_nvrtc() is None, reason="no NVRTC here: pip install 'kdtree_nb[test]'")
@pytest.mark.parametrize(("file", "defines"), CASES)
def test_before_its_turn_a_kernel_reads_weights_at_most(file: str, defines: dict[str, str]) -> None:
    source = read_source(file)
    found = ENTRY.findall(compile_ptx(source, "compute_90a", defines))
    assert {kernel for kernel, _ in found} == set(source.kernels)
    for kernel, body in found:
        names = [parameter.name for parameter in source.kernels[kernel]]
        found_there = list(accesses(body, kernel))
        early = [(words, of) for before, words, of in found_there if before]
        assert {names[i] for _, of in early for i in of} == WEIGHTS.get(kernel, set())
        assert all(of and re.search(r"\b(ld|cp\.async)\b", words) for words, of in early), early
        constant = [(words, of) for _, words, of in found_there if "global.nc" in words]
        assert all(of for _, of in constant), constant
        assert {names[i] for _, of in constant for i in of} <= CONSTANT
