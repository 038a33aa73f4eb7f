"""Tests of the GPU update kernels without a GPU: their results equal the host kernels', bit for bit.

Triton compiles them to PTX for four GPU generations, which is translated to C++ and run on the CPU. The
machine code that Triton's assembler makes of the PTX is checked too.
"""

import ctypes
import itertools
from collections import Counter

import pytest
import torch
from ebbtide.runtime.kernels.host import host_update
from ebbtide.runtime.kernels.rules import RULES

from tests.runtime.evidence import ptx_to_cpp
from tests.runtime.evidence.kernels_ptx import ARCHITECTURES, WIRES, Form, compiled, counted, library, run, sass

pytest.importorskip("triton")
STEPS = 2
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    -3e-39,
    1.17549435e-38,
    3e38,
    -3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]
NEWER = [gpu for gpu in ARCHITECTURES if gpu in (90, 100)]
RULE_OF = {
    (kind.name, kind(**settings).step(group, 1).variant): (kind, settings, group)
    for kind in RULES
    for settings, group in kind.trials
}
FORMS = [
    Form(*key, *wire, architecture) for key, wire, architecture in itertools.product(RULE_OF, WIRES, ARCHITECTURES)
] + [  # a parameter's own slice of a subgroup may begin anywhere
    Form(*key, *WIRES[0], architecture, aligned=False) for key, architecture in itertools.product(RULE_OF, NEWER)
]


def values(size, generator, dtype=torch.float32):
    """Return a tensor of random values of about 10 to the power of ``size``, with special values such as NaN
    among them.
    """
    n = len(size)
    made = torch.randn(n, generator=generator) * 10.0 ** (size + torch.randint(-2, 3, (n,), generator=generator))
    made[torch.randperm(n, generator=generator)[: 8 * len(SPECIAL)]] = torch.tensor(SPECIAL * 8)
    return made.to(dtype)


def unequal(a, b):
    """Return the number of elements of two tensors that differ in their bits. All NaNs count as equal."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return int(((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum())


def differing(function, form, n, tail, rate=0.3):
    """Return the number of elements for which a GPU kernel, translated from PTX to C++, computes other bits than
    the host kernel.
    """
    generator = torch.Generator().manual_seed(n + tail)
    kind, settings, group = RULE_OF[form.kernel, form.variant]
    rule = kind(**settings)
    # So large that rounding of the weight decay shows.
    group = {**group, "lr": rate, "weight_decay": 5 * group["weight_decay"]}
    size = torch.randint(-44, 10, (n,), generator=generator)  # similar exponents, so that sums are rounded
    size[::3] = 0
    ours = [values(size, generator) for _ in range(1 + len(rule.moments))]
    if form.kernel != "lion":  # the last tensor is a sum of squares
        ours[-1] = ours[-1].square()
    theirs = [t.clone() for t in ours]
    outs = [torch.zeros(n, dtype=form.out) for _ in range(2)]
    bad = 0
    for number in range(1, STEPS + 1):
        step, grad = rule.step(group, number), values(size, generator, form.grad)
        host_update(ours, grad, outs[0], step, 0.37, 1, tail)
        run(function, theirs, grad, outs[1], [float(x) for x in step.scalars(0.37)], tail)
        bad += sum(unequal(a, b) for a, b in zip(ours, theirs, strict=True)) + unequal(*outs)
    return bad


def is_assembled(form):
    return (form.grad, form.out) == WIRES[0] and form.aligned


@pytest.fixture(scope="module")
def kernels():
    """Compile every version of the GPU update kernels with Triton, for each tested combination of optimizer, weight
    decay, dtypes, alignment and GPU generation. Return a dict from version to Triton's output, such as PTX.
    """
    return {form: compiled(form, assembled=is_assembled(form)) for form in FORMS}


def test_ptx_has_the_host_kernels_bits(kernels, capsys):
    sources, names = {}, {}
    for form, asm in kernels.items():  # two generations of GPUs often get the same code
        text = "\n".join(ptx_to_cpp.body_of(asm["ptx"]))
        names[form] = sources.setdefault(text, form).name
    functions = [ptx_to_cpp.translate(kernels[form]["ptx"], form.name) for form in sources.values()]
    loaded = library(functions)
    bad, elements = {}, 0
    for form in sources.values():
        lengths = ((8192, 16), (1040, 1040)) if form.aligned else ((5000, 7), (999, 999))
        for n, tail in lengths:
            found = differing(getattr(loaded, form.name), form, n, tail)
            elements += n * STEPS
            if found:
                bad[form.name, n, tail] = found
    assert not bad
    with capsys.disabled():
        print(f"\nptx: {len(kernels)} forms, {len(sources)} different, {elements} elements, 0 differ")


def test_ptx_keeps_the_sign_of_zero_at_rate_zero(kernels):
    forms = [form for form in FORMS if is_assembled(form)]
    functions = [ptx_to_cpp.translate(kernels[form]["ptx"], form.name) for form in forms]
    loaded = library(functions)
    for form in forms:
        assert not differing(getattr(loaded, form.name), form, 8192, 16, rate=0.0), form.name


def test_ptx_is_all_ieee_and_asks_for_no_more(kernels):
    for form, asm in kernels.items():
        assert not [op for op in ptx_to_cpp.opcodes(asm["ptx"]) if "approx" in op or "ftz" in op]
        assert f".target sm_{form.architecture}" in asm["ptx"]


def test_ptx_that_computes_otherwise_shows(kernels, capsys):
    forms = [Form(*key, *WIRES[0], gpu) for key, gpu in itertools.product(RULE_OF, NEWER)]
    mutants = {form: mutable(ptx_to_cpp.opcodes(kernels[form]["ptx"])) for form in forms}
    loaded = library(
        [ptx_to_cpp.translate(kernels[form]["ptx"], form.name, places) for form, places in mutants.items()]
    )
    which, hidden = ctypes.c_int.in_dll(loaded, "mutant"), []
    for form, places in mutants.items():
        for place, op in places.items():
            which.value = place
            if not differing(getattr(loaded, form.name), form, 16384, 8192):
                hidden.append((form.kernel, op.removesuffix("x2")))
    # Only the sign of Lion's first average counts, and no rounding changes it. So two sums, two of the products, and
    # the choice between them have no effect.
    alike = {("lion", op): 2 * 4 for op in ("fma.rn.f32", "selp.f32", "mul.rn.f32")}
    assert not Counter(hidden) - Counter(alike)
    with capsys.disabled():
        count = sum(map(len, mutants.values()))
        print(f"\nptx: {count} mutants, {len(hidden)} that are alike (Lion's sign), 0 hidden")


def mutable(opcodes):
    """Choose the instructions of an update kernel's PTX code that the test replaces by wrong ones, one at a time."""
    # Return a dict from the position of each chosen instruction in the code to its opcode. A GPU thread updates eight
    # elements, so the compiler writes each instruction eight times, or four times if one instruction handles two
    # elements.
    places = {op: [i for i, o in enumerate(opcodes) if o == op] for op in ptx_to_cpp.MUTATED}
    return {i: op for op, found in places.items() for i in found[:: 4 if op.count("x2") else 8]}


def test_ptx_is_assembled_without_another_fusion(kernels):
    # If the assembler fused a product and a sum into one instruction, the counts would be too small, and the kernel
    # would round differently. Divisions and square roots become several instructions. Their multiplications and
    # additions have an opcode suffix, and are not counted.
    bad = []
    for form, asm in kernels.items():
        if not is_assembled(form):
            continue
        ops = ptx_to_cpp.opcodes(asm["ptx"])
        listing = sass(asm["cubin"])
        wanted = [
            ops.count("mul.rn.f32") + 2 * ops.count("mul.rn.f32x2"),
            sum(ops.count(f"{op}.rn.f32") for op in ("add", "sub")) + 2 * ops.count("add.rn.f32x2"),
        ]
        single = counted(listing, r"\bFMUL\b(?!\.)", r"\bFADD\b(?!\.)")
        double = counted(listing, r"\bFMUL2\b", r"\bFADD2\b")
        found = [one + 2 * two for one, two in zip(single, double, strict=True)]
        if found != wanted:
            bad.append((form.name, wanted, found))
    assert not bad
