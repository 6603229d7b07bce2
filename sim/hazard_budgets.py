"""What a CTA may ask for at most: shared memory, registers and the pool that setmaxnreg trades them in, barriers, TMEM."""

from __future__ import annotations

from collections.abc import Iterator

from ..model.gpu import GPU
from ..model.program import Program
from ..model.tiling import occupancy
from .hazard_findings import Finding

# The PTX ISA's limits: bar.sync, tcgen05.alloc, setmaxnreg.
NAMED_BARRIERS = 16
TMEM_COLUMNS = 512
REGISTER_STEP, FEWEST_REGISTERS, MOST_REGISTERS = 8, 24, 256
WARPGROUP = 4


def budgets(program: Program, gpu: GPU) -> Iterator[Finding]:
    """Findings of kind "budget": one a budget that is exceeded, with its arithmetic."""
    try:
        occupancy(gpu, program)
    except ValueError as error:
        yield _over(program, str(error))
    spill = _overlays(program)
    room = int(gpu.sm.smem_per_cta_bytes)
    if spill and program.smem_bytes + spill > room >= program.smem_bytes:
        yield _over(
            program, f"{program.name} needs {program.smem_bytes + spill} B of shared memory, {spill} B of them for tiles larger"
            f" than the buffer they lie in; {gpu.name} gives a CTA at most {room} B: use smaller tiles,"
            " fewer stages or a smaller head dimension",
        )  # fmt: skip
    named = [b.name for b in program.barriers if b.kind == "named"]
    if len(named) > NAMED_BARRIERS:
        yield _over(program, f"{program.name} uses {len(named)} named barriers ({', '.join(named)}); a CTA has {NAMED_BARRIERS}")
    if program.tmem_columns > TMEM_COLUMNS:
        yield _over(
            program, f"{program.name} needs {program.tmem_columns} columns of tensor memory; an SM has {TMEM_COLUMNS}:"
            " use smaller tiles or let tiles share columns",
        )  # fmt: skip
    if len(program.tiles) % program.cluster:
        yield _over(
            program, f"{program.name} runs in clusters of {program.cluster} CTAs and has {len(program.tiles)} tiles: make their"
            " number a multiple, or set no cluster",
        )  # fmt: skip
    if program.launch_registers:
        yield from _pool(program)


def _over(program: Program, sentence: str) -> Finding:
    return Finding(kind="budget", sentence=sentence, kernel=program.name)


def _overlays(program: Program) -> int:
    """Bytes by which tiles named "X.Y" are larger, together, than the buffer X that they lie in."""
    room = {b.name: b.size_bytes * b.stages for b in program.buffers if b.space == "smem" and "." not in b.name}
    taken: dict[str, int] = {}
    for b in program.buffers:
        parent = b.name.partition(".")[0]
        if "." in b.name and b.space == "smem" and parent in room:
            taken[parent] = taken.get(parent, 0) + b.size_bytes * b.stages
    return sum(max(0, size - room[parent]) for parent, size in taken.items())


def _pool(program: Program) -> Iterator[Finding]:
    """setmaxnreg moves registers within what the launch gave out: the sum after must not be more, and should not be less.

    All warps of a warpgroup trade alike: warps beside the roles' hold what the smallest role does, and where they fill a whole
    warpgroup, what the launch gave them.
    """
    for role in program.roles:
        if role.registers % REGISTER_STEP or not FEWEST_REGISTERS <= role.registers <= MOST_REGISTERS:
            yield _over(
                program, f"role {role.name} asks for {role.registers} registers a thread; setmaxnreg takes multiples of"
                f" {REGISTER_STEP} from {FEWEST_REGISTERS} to {MOST_REGISTERS}",
            )  # fmt: skip
    warps, whole = program.warps + program.idle_warps, max(0, program.idle_warps) // WARPGROUP * WARPGROUP
    given = -(-program.launch_registers // REGISTER_STEP) * REGISTER_STEP
    small = min(program.roles, key=lambda r: r.registers)
    shares = {given: whole}
    for role in program.roles:
        shares[role.registers] = shares.get(role.registers, 0) + role.warps
    shares[small.registers] += program.idle_warps - whole
    wanted = sum(registers * n for registers, n in shares.items())
    text = " + ".join(f"{registers} x {_groups(n)}" for registers, n in sorted(shares.items()) if n)
    sums = f"warpgroups take {text} = {_groups(wanted)} of {given} x {_groups(warps)} = {_groups(given * warps)}"
    if wanted > given * warps:
        yield _over(
            program, f"setmaxnreg asks for more registers than the launch gave out ({sums}), so that the last warpgroup to ask"
            " waits for ever: lower a role's registers",
        )  # fmt: skip
    most = max(role.registers for role in program.roles)
    spare = (given * warps - wanted) // shares[most] // REGISTER_STEP * REGISTER_STEP
    if most < MOST_REGISTERS and spare > 0 and not whole:
        names = " and ".join(role.name for role in program.roles if role.registers == most)
        yield _over(
            program, f"setmaxnreg leaves registers over ({sums}): give {names} {min(MOST_REGISTERS, most + spare)} a thread,"
            " so that the sums are equal",
        )  # fmt: skip


def _groups(warps: int) -> str:
    """Warps as warpgroups."""
    return f"{warps / WARPGROUP:g}"
