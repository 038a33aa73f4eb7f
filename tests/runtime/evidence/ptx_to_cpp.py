"""Translation of ebbtide's GPU update kernels from PTX to C++ that runs on a CPU, by the PTX ISA.

Triton's element-wise kernels are straight lines: no branches, some predicated loads and stores, and
barriers around shared memory. An unknown instruction raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Container

HEAD = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
static inline float f(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline u32 b(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
static inline u64 two(u32 low, u32 high) { return low | (u64)high << 32; }
static inline u32 lo(u64 x) { return (u32)x; }
static inline u32 hi(u64 x) { return (u32)(x >> 32); }
static inline u32 fma1(u32 x, u32 y, u32 z) { return b(__builtin_fmaf(f(x), f(y), f(z))); }
static inline u32 mul1(u32 x, u32 y) { return b(f(x) * f(y)); }
static inline u32 add1(u32 x, u32 y) { return b(f(x) + f(y)); }
static inline u32 sub1(u32 x, u32 y) { return b(f(x) - f(y)); }
static inline u32 half(u16 h) { _Float16 x; memcpy(&x, &h, 2); return b((float)x); }
static inline u16 to_half(u32 x) {
  if (f(x) != f(x)) return 0x7fff;
  _Float16 rounded = (_Float16)f(x); u16 h; memcpy(&h, &rounded, 2); return h;
}
// To the nearest, ties to even; any NaN is 0x7fff.
static inline u16 to_bf16(u32 x) {
  if (f(x) != f(x)) return 0x7fff;
  u32 rest = x & 0xffff, high = x >> 16;
  return (u16)(high + (rest > 0x8000 || (rest == 0x8000 && (high & 1))));
}
// What a mutant does instead: two roundings, reciprocals, bits cut off.
extern "C" { int mutant = -1; }  // which instruction
static inline u32 cut(double x) {
  float y = (float)x; return b(std::fabs(y) > std::fabs(x) ? std::nextafter(y, 0.0f) : y);
}
static inline u32 mul1_wrong(u32 x, u32 y) { return cut((double)f(x) * f(y)); }
static inline u32 add1_wrong(u32 x, u32 y) { return cut((double)f(x) + f(y)); }
static inline u32 fma1_wrong(u32 x, u32 y, u32 z) {
  volatile float product = f(x) * f(y); return b(product + f(z));
}
"""

_SIMPLE = {  # instruction -> C++ expression of its operands
    "mul.wide.u32": "(u64)(u32){1} * (u64)(u32){2}",
    "mul.wide.s32": "(u64)((int64_t)(int32_t){1} * (int64_t)(int32_t){2})",
    "cvt.s64.s32": "(u64)(int64_t)(int32_t){1}",
    "mov.pred": "({1}) != 0",
    "cvt.u64.u32": "(u64)(u32){1}",
    "neg.s32": "0u - {1}",
    "neg.f32": "{1} ^ 0x80000000u",
    "setp.lt.s64": "(int64_t){1} < (int64_t){2}",
    "setp.lt.s32": "(int32_t){1} < (int32_t){2}",
    "selp.f32": "{3} ? {1} : {2}",
    "selp.b32": "{3} ? {1} : {2}",
    "fma.rn.f32": "fma1({1}, {2}, {3})",
    "mul.rn.f32": "mul1({1}, {2})",
    "add.rn.f32": "add1({1}, {2})",
    "sub.rn.f32": "sub1({1}, {2})",
    "div.rn.f32": "b(f({1}) / f({2}))",
    "sqrt.rn.f32": "b(std::sqrt(f({1})))",
    "fma.rn.f32x2": "two(fma1(lo({1}), lo({2}), lo({3})), fma1(hi({1}), hi({2}), hi({3})))",
    "mul.rn.f32x2": "two(mul1(lo({1}), lo({2})), mul1(hi({1}), hi({2})))",
    "add.rn.f32x2": "two(add1(lo({1}), lo({2})), add1(hi({1}), hi({2})))",
    "cvt.f32.bf16": "(u32){1} << 16",
    "cvt.f32.f16": "half({1})",
    "cvt.rn.bf16.f32": "to_bf16({1})",
    "cvt.rn.f16.f32": "to_half({1})",
    "cvt.rn.bf16x2.f32": "(u32)to_bf16({1}) << 16 | to_bf16({2})",
    "cvt.rn.f16x2.f32": "(u32)to_half({1}) << 16 | to_half({2})",
    **{
        f"{op}.{t}": f"{{1}} {sign} {{2}}"
        for op, sign in (("and", "&"), ("or", "|"), ("xor", "^"), ("shl", "<<"), ("add", "+"))
        for t in ("b32", "b64", "s32", "s64")
    },
}
MUTATED = {  # instruction -> what an inexact device would compute instead
    "fma.rn.f32": "fma1_wrong({1}, {2}, {3})",
    "mul.rn.f32": "mul1_wrong({1}, {2})",
    "add.rn.f32": "add1_wrong({1}, {2})",
    "div.rn.f32": "mul1({1}, b(1.0f / f({2})))",
    "sqrt.rn.f32": "mul1({1}, b(1.0f / std::sqrt(f({1}))))",
    "selp.f32": "{3} ? {2} : {1}",
    "cvt.rn.bf16x2.f32": "(u32)to_bf16({1}) << 16 | (u16)({2} >> 16)",
    "fma.rn.f32x2": "two(fma1_wrong(lo({1}), lo({2}), lo({3})), fma1_wrong(hi({1}), hi({2}), hi({3})))",
    "mul.rn.f32x2": "two(mul1_wrong(lo({1}), lo({2})), mul1_wrong(hi({1}), hi({2})))",
    "add.rn.f32x2": "two(add1_wrong(lo({1}), lo({2})), add1_wrong(hi({1}), hi({2})))",
}
_BITS = {"b16": 16, "u16": 16, "b32": 32, "u32": 32, "f32": 32, "b64": 64, "u64": 64}
_LINE = re.compile(r"(?:@(!?)%p(\d+)\s+)?([a-z][\w.:]*)\s*(.*?);")


class UnknownInstructionError(ValueError):
    """An error for a PTX instruction that the translation from PTX to C++ does not know."""


def body_of(ptx: str) -> list[str]:
    """Return the list of instructions of a PTX kernel, without comments, declarations and labels."""
    body = ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :]
    lines = (line.split("//")[0].strip() for line in body[: body.index("\n}")].splitlines())
    return [line for line in lines if line and not line.startswith((".", "$", "ret"))]


def opcodes(ptx: str) -> list[str]:
    """Return a list of the opcodes of all instructions of a PTX kernel, in order."""
    return [_parse(line)[2] for line in body_of(ptx)]


def translate(ptx: str, name: str, mutants: Container[int] = ()) -> str:
    """Return a C++ function ``name(void** parameters, blocks)`` that runs a PTX kernel block by block.

    Args:
        mutants: Positions of instructions that can be made wrong, as `MUTATED` says. The compiled code has a global
            variable ``mutant``. The instruction at the position in this variable runs in its wrong version.
    """
    counts = dict(re.findall(r"\.reg \.\w+\s+%(rs|rd|r|p|f)<(\d+)>", ptx))
    kinds = {"rs": "u16", "r": "u32", "rd": "u64", "p": "bool", "f": "u32"}
    registers = " ".join(f"{t} {r}[{counts.get(r, 1)}];" for r, t in kinds.items())
    segments: list[list[str]] = [[]]
    for place, line in enumerate(body_of(ptx)):
        unless, predicate, op, operands = _parse(line)
        if op == "bar.sync":
            segments.append([])
            continue
        code = _instruction(op, operands)
        if place in mutants:
            to, *values = map(_value, operands)
            code = f"if (mutant == {place}) {to} = {MUTATED[op].format(to, *values)}; else {code}"
        if predicate is not None:
            code = f"if ({unless}T.p[{predicate}]) {{ {code} }}"
        segments[-1].append(code)
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    arguments = f"R_{name}& T, u32 tid, u32 cta, void** P, char* S"
    parts = [f"struct R_{name} {{ {registers} }};"]
    calls = []
    for i, segment in enumerate(segments):
        parts.append(f"static void {name}_{i}({arguments}) {{\n" + "\n".join(segment) + "\n}")
        calls.append(f"for (u32 t = 0; t < {threads}; ++t) {name}_{i}(T[t], t, c, P, S);")
    parts.append(
        f'extern "C" void {name}(void** P, u32 blocks) {{ static R_{name} T[{threads}]; '
        f"static char S[65536]; for (u32 c = 0; c < blocks; ++c) {{ {' '.join(calls)} }} }}"
    )
    return "\n".join(parts)


def _parse(line: str) -> tuple[str, str | None, str, list[str]]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise UnknownInstructionError(line)
    unless, predicate, op, rest = found.groups()
    return unless or "", predicate, op, _operands(rest)


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^{]*\})", text)]


def _value(operand: str) -> str:
    special = {"%tid.x": "tid", "%ctaid.x": "cta", "global_smem": "0u"}
    if operand in special:
        return special[operand]
    if found := re.fullmatch(r"%(rs|rd|r|p|f)(\d+)", operand):
        return f"T.{found[1]}[{found[2]}]"
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        return f"0x{operand[2:]}u"
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", operand):
        return f"({operand}ll)"
    raise UnknownInstructionError(operand)


def _instruction(op: str, operands: list[str]) -> str:
    if op in _SIMPLE:
        values = [_value(o) for o in operands]
        return f"{values[0]} = {_SIMPLE[op].format(*values)};"
    kind, *rest = op.split(".")
    if kind == "mov":
        return _move(operands, _BITS[rest[-1]])
    if op.startswith("ld.param"):
        signed = "(u64)(int64_t)*(int32_t*)"
        read = signed if rest[-1] == "s32" else f"*(u{_BITS[rest[-1]]}*)"
        return f"{_value(operands[0])} = {read}P[{operands[1].rsplit('_', 1)[1][:-1]}];"
    if kind in ("ld", "st"):
        return _access(kind, rest, operands)
    raise UnknownInstructionError(op)


def _move(operands: list[str], bits: int) -> str:
    to, source = operands
    half = bits // 2
    if to.startswith("{"):
        low, high = (_value(o) for o in _operands(to[1:-1]))
        of = _value(source)
        return f"{low} = (u{half})({of}); {high} = (u{half})({of} >> {half});"
    if source.startswith("{"):
        low, high = (_value(o) for o in _operands(source[1:-1]))
        return f"{_value(to)} = (u{bits}){low} | (u{bits}){high} << {half};"
    return f"{_value(to)} = (u{bits}){_value(source)};"


def _access(kind: str, words: list[str], operands: list[str]) -> str:
    registers, address = operands if kind == "ld" else reversed(operands)
    found = re.fullmatch(r"\[\s*(%\w+|global_smem)\s*(?:\+\s*(\d+))?\s*\]", address)
    if found is None or words[0] not in ("global", "shared"):
        raise UnknownInstructionError(f"{kind}.{'.'.join(words)} {address}")
    base = _value(found[1]) if words[0] == "global" else f"S + {_value(found[1])}"
    pointer = f"u{_BITS[words[-1]]}* q = (u{_BITS[words[-1]]}*)({base} + {found[2] or 0});"
    values = [_value(o) for o in _operands(registers.strip("{}"))]
    moved = (f"{v} = q[{i}];" if kind == "ld" else f"q[{i}] = {v};" for i, v in enumerate(values))
    return f"{{ {pointer} {' '.join(moved)} }}"
