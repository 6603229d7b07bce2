"""Count what one compiled kernel (SASS text) issues in each of its loops, by the profiler's pipes.

Reads what ``cuobjdump -sass`` and ``nvdisasm -c`` print (CUDA Binary Utilities manual), one kernel at a time. Counts are static
warp instructions per warp and trip: a predicated instruction issues whether or not its lanes do anything, so it counts as one; a
block that a branch skips counts too, and :attr:`Loop.skippable` says how much that is. Loops are natural loops: a branch whose
target dominates it closes one, wherever the compiler laid the blocks out (A. Aho et al., "Compilers", section 9.6).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PIPES = ("fma", "alu", "xu", "tensor", "lsu", "other")

WARP_REGISTER_BYTES = 128  # what a warp's STL writes per 32-bit register: 32 lanes x 4 B

#: The pipe that executes an opcode (its part before the first dot), as Nsight Compute's ``smsp__inst_executed_pipe_*`` counts
#: them (Nsight Compute manual, "Pipelines"; checked against the counters of fa2_pytorch.toml). Opcodes not listed are "other":
#: branches, barriers, the uniform datapath, constant and special-register reads, no-ops.
OPCODES: Mapping[str, str] = {
    name: pipe
    for pipe, names in {
        "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I IMAD IMUL VIADD HFMA2 HADD2 HMUL2 IDP",
        "alu": "FMNMX F2FP IADD3 IADD LOP3 LOP ISETP FSETP SEL FSEL PRMT SHF LEA MOV MOV32I IABS IMNMX VIMNMX FMNMX3 SGXT BMSK"
        " PLOP3 P2R R2P CSEL ISCADD ISCADD32I SHL SHR XMAD VABSDIFF I2FP F2IP HMNMX2 HSET2 HSETP2 IADD32I LOP32I VOTE R2UR",
        "xu": "MUFU F2F F2I I2F I2I FRND POPC FLO BREV FCHK",
        "tensor": "HMMA IMMA BMMA DMMA HGMMA QGMMA IGMMA BGMMA QMMA UTCHMMA UTCQMMA UTCIMMA",
        "lsu": "LDS STS LDSM STSM LDG STG LDL STL LD ST LDGSTS SHFL RED REDG REDS ATOM ATOMG ATOMS LDGDEPBAR MATCH",
    }.items()
    for name in names.split()
}

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(!?U?P[T\d]+)\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_[\w$.]*):")
_TARGET = re.compile(r"`\((\.L_[\w$.]*)\)|\b(0x[0-9a-f]+)\s*$")
_FUNCTION = re.compile(r"^[ \t]*(?:Function\s*:\s*|\.section\s+\.text\.)([\w$.]+)", re.MULTILINE)

#: Opcodes that leave the straight line; CALL comes back, so it flows on.
_BRANCHES = ("BRA", "JMP")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")
_ALWAYS = (None, "PT", "UPT")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One SASS line: byte ``address`` in the kernel, dotted ``opcode``, ``operands`` as printed, branch ``target`` (bytes)."""

    address: int
    opcode: str
    operands: str = ""
    predicate: str | None = None
    target: int | None = None

    @property
    def pipe(self) -> str:
        return OPCODES.get(self.opcode.split(".")[0], "other")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop: ``header`` (bytes), ``depth`` (1 is outermost), its own ``instructions`` in address order without those of inner
    loops, and of those the ``skippable`` ones, which not every trip executes."""

    header: int
    depth: int
    instructions: tuple[Instruction, ...]
    skippable: tuple[Instruction, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Warp instructions per warp and trip, by pipe."""
        return count(self.instructions)

    @property
    def spill_bytes(self) -> int:
        """Bytes of local memory that a warp writes per trip."""
        return spill_bytes(self.instructions)


def kernels(text: str) -> dict[str, str]:
    """The text of each kernel of a dump by its mangled name."""
    starts = list(_FUNCTION.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {match[1]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)}


def parse(text: str) -> tuple[Instruction, ...]:
    """The instructions of one kernel in address order.

    Raises ``ValueError`` where the text has none, has two kernels (addresses start again) or branches to a label it lacks.
    """
    raw: list[tuple[int, str | None, str, str]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if match := _LABEL.match(line):
            waiting.append(match[1])
        elif match := _LINE.match(line):
            address = int(match[1], 16)
            if raw and address <= raw[-1][0]:
                raise ValueError(f"address {address:#x} follows {raw[-1][0]:#x}: pass one kernel at a time, see kernels()")
            raw.append((address, match[2], match[3], match[4].strip()))
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
    if not raw:
        raise ValueError("no SASS instruction in the text; expected lines such as '/*0010*/ FFMA R1, R2, R3, R4 ;'")
    return tuple(
        Instruction(address=address, opcode=opcode, operands=operands, predicate=p, target=_target(opcode, operands, labels))
        for address, p, opcode, operands in raw
    )


def _target(opcode: str, operands: str, labels: Mapping[str, int]) -> int | None:
    match = _TARGET.search(operands) if opcode.split(".")[0] in _BRANCHES else None
    if match is None:
        return None
    if match[2]:
        return int(match[2], 16)
    if match[1] not in labels:
        raise ValueError(f"{opcode} goes to {match[1]}, which the text lacks: pass the whole kernel")
    return labels[match[1]]


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Warp instructions by pipe, every pipe of ``PIPES`` present."""
    found = Counter(i.pipe for i in instructions)
    return {pipe: found[pipe] for pipe in PIPES}


def opcodes(instructions: Iterable[Instruction], *, dotted: bool = False) -> dict[str, int]:
    """Warp instructions by opcode, the most frequent first; ``dotted`` keeps the modifiers."""
    return dict(Counter(i.opcode if dotted else i.opcode.split(".")[0] for i in instructions).most_common())


def spill_bytes(instructions: Iterable[Instruction]) -> int:
    """Bytes of local memory that a warp writes: STL writes one register a lane, STL.64 two, STL.128 four."""
    stores = (i.opcode.split(".")[-1] for i in instructions if i.opcode.split(".")[0] == "STL")
    return sum(WARP_REGISTER_BYTES * {"64": 2, "128": 4}.get(width, 1) for width in stores)


_WORDS = re.compile(r";\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/")
_ARGUMENT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
ARGUMENT_LINE_BYTES = 64


def start(text: str, *, before: str, after: str = "") -> dict[str, int]:
    """What the binary runs, in the order of addresses, up to the first opcode ``before``, from the first opcode ``after`` on: the
    warp's ``instructions``, their ``stall_cycles`` (bits 41 to 44 of an instruction's second word) and the ``argument_lines`` of
    c[0x0] that none before has read. ``text``: of one kernel, with its encoding, as ``cuobjdump -sass`` prints it.

    Raises ValueError where the kernel has no such opcode.
    """
    read: set[int] = set()
    counts, counting = {"instructions": 0, "stall_cycles": 0, "argument_lines": 0}, not after
    stalls = [int(word, 16) >> 41 & 0xF for word in _WORDS.findall(text)]
    for instruction, stall in zip(parse(text), stalls, strict=True):
        counting = counting or instruction.opcode.startswith(after)
        if counting and instruction.opcode.startswith(before):
            return counts
        lines = {int(at, 16) // ARGUMENT_LINE_BYTES for at in _ARGUMENT.findall(instruction.operands)} - read
        read |= lines
        if counting:
            counts["instructions"] += 1
            counts["stall_cycles"] += stall
            counts["argument_lines"] += len(lines)
    raise ValueError(f"the kernel has no {before}{' after ' + after if after else ''}; give an opcode that it has")


def loops(instructions: Sequence[Instruction]) -> tuple[Loop, ...]:
    """The loops of a kernel by address of their headers; a branch to itself after the kernel's end is none."""
    blocks = _blocks(instructions)
    after = _successors(blocks)
    entry = instructions[0].address
    dominators = _dominators(after, entry)
    bodies: dict[int, set[int]] = {}
    exits: dict[int, list[int]] = {}
    for block in dominators:
        for target in after[block]:
            if target in dominators[block]:
                bodies.setdefault(target, {target}).update(_body(after, target, block))
                exits.setdefault(target, []).append(block)
    found = []
    for header, body in sorted(bodies.items()):
        inner: set[int] = set().union(*(other for h, other in bodies.items() if h != header and other < body))
        every = set.intersection(*(dominators[tail] for tail in exits[header]))
        own = sorted(body - inner)
        found.append(
            Loop(
                header=header,
                depth=sum(body <= other for other in bodies.values()),
                instructions=tuple(i for block in own for i in blocks[block]),
                skippable=tuple(i for block in own if block not in every for i in blocks[block]),
            )
        )
    return tuple(found)


def trip(instructions: Sequence[Instruction], header: int, taken: Iterable[int] = ()) -> tuple[Instruction, ...]:
    """What one trip of the loop at ``header`` executes when, of its conditional branches, those at the addresses ``taken`` go to
    their targets and the others fall through. Raises ``ValueError`` where that way does not come back to the header."""
    place = {i.address: n for n, i in enumerate(instructions)}
    chosen, passed, at = set(taken), list[Instruction](), place[header]
    while at < len(instructions) and len(passed) <= len(instructions):
        instruction = instructions[at]
        passed.append(instruction)
        if instruction.target == header:
            return tuple(passed)
        goes = instruction.target is not None and (instruction.address in chosen or not _conditional(instruction))
        at = place[instruction.target] if goes and instruction.target in place else at + 1
    raise ValueError(f"the way from {header:#x} does not return to it; name the branches to take, got {sorted(chosen)}")


def _blocks(instructions: Sequence[Instruction]) -> dict[int, tuple[Instruction, ...]]:
    """Basic blocks by the address of their first instruction."""
    leaders = {instructions[0].address} | {i.target for i in instructions if i.target is not None}
    leaders |= {b.address for a, b in zip(instructions, instructions[1:], strict=False) if _leaves(a)}
    blocks: dict[int, list[Instruction]] = {}
    current: list[Instruction] = []
    for instruction in instructions:
        if instruction.address in leaders:
            current = blocks.setdefault(instruction.address, [])
        current.append(instruction)
    return {leader: tuple(body) for leader, body in blocks.items()}


def _conditional(instruction: Instruction) -> bool:
    """A branch that may fall through: it has a predicate before it, or one among its operands (BRA P2, 0x100)."""
    return instruction.predicate not in _ALWAYS or ("P" in instruction.operands.split(",")[0] and "," in instruction.operands)


def _leaves(instruction: Instruction) -> bool:
    return instruction.target is not None or instruction.opcode.split(".")[0] in _ENDS


def _successors(blocks: Mapping[int, tuple[Instruction, ...]]) -> dict[int, list[int]]:
    leaders = sorted(blocks)
    following = dict(zip(leaders, leaders[1:], strict=False))
    after: dict[int, list[int]] = {}
    for leader in leaders:
        last = blocks[leader][-1]
        falls = not _leaves(last) or _conditional(last)
        targets = [last.target] if last.target in blocks and last.target is not None else []
        after[leader] = targets + ([following[leader]] if falls and leader in following else [])
    return after


def _dominators(after: Mapping[int, list[int]], entry: int) -> dict[int, set[int]]:
    """The blocks that every way from the entry to a block passes, itself included; blocks that nothing reaches are left out."""
    seen, stack = {entry}, [entry]
    while stack:
        fresh = set(after[stack.pop()]) - seen
        seen |= fresh
        stack.extend(fresh)
    before = {block: [b for b in seen if block in after[b]] for block in seen}
    dominators = {block: set(seen) for block in seen} | {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block in sorted(seen - {entry}):
            known = set.intersection(*(dominators[b] for b in before[block])) | {block}
            changed |= known != dominators[block]
            dominators[block] = known
    return dominators


def _body(after: Mapping[int, list[int]], header: int, tail: int) -> set[int]:
    """The blocks that reach ``tail`` without passing ``header``."""
    body, stack = {header}, [tail]
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack.extend(b for b, targets in after.items() if block in targets)
    return body
