"""SASS text: instructions fall into the profiler's pipes, and loops are found wherever the compiler put their blocks."""

from __future__ import annotations

import pytest

from flashsim.validate import sass

#: An outer loop (0x10 to 0xf0) around an inner one (0x30 to 0xa0), whose optional block (0x50, 0x60) comes before the code that
#: jumps back to it, as compilers lay out a guarded load. The encodings that follow each line in a real dump are left out.
NESTED = """
        code for sm_80
                Function : demo
        /*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x0000000000000000 */
                                                               /* 0x0000000000000000 */
        /*0010*/                   LDG.E.128 R4, [R2.64] ;     /* 0x0000000000000000 */
        /*0020*/                   BRA 0x70 ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0040*/                   BRA 0x70 ;
        /*0050*/               @P1 LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0060*/                   BRA 0x90 ;
        /*0070*/                   MUFU.EX2 R8, R8 ;
        /*0080*/              @!P0 BRA 0x50 ;
        /*0090*/                   STL.64 [R1], R8 ;
        /*00a0*/               @P2 BRA 0x30 ;
        /*00b0*/                   STL [R1+0x8], R8 ;
        /*00c0*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00d0*/                   FFMA R8, R8, R9, R10 ;
        /*00e0*/                   IMAD.MOV.U32 R9, RZ, RZ, R8 ;
        /*00f0*/                   BRA P3, 0x10 ;
        /*0100*/                   EXIT ;
        /*0110*/                   BRA 0x110;
"""

#: The other disassembler's form: labels for addresses, no encodings.
LABELLED = """
        .section        .text.demo,"ax",@progbits
.text.demo:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R0 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("FFMA.FTZ", "fma"),
        ("IMAD.MOV.U32", "fma"),
        ("VIADD", "fma"),
        ("F2FP.BF16.F32.PACK_AB", "alu"),
        ("FMNMX", "alu"),
        ("MUFU.EX2", "xu"),
        ("F2F.F64.F32", "xu"),
        ("HGMMA.64x128x16.F32.BF16", "tensor"),
        ("LDSM.16.M88.4", "lsu"),
        ("SHFL.BFLY", "lsu"),
        ("LDGDEPBAR", "lsu"),
        ("BAR.SYNC", "other"),
        ("UIADD3", "other"),
    ],
)
def test_an_opcode_runs_where_the_profiler_counts_it(opcode: str, pipe: str) -> None:
    assert sass.Instruction(address=0, opcode=opcode).pipe == pipe


def test_every_line_with_an_instruction_is_read_once() -> None:
    code = sass.parse(NESTED)
    assert [i.address for i in code] == list(range(0, 0x120, 0x10))
    assert code[5].predicate == "P1"
    assert code[8].target == 0x50
    assert sum(sass.count(code).values()) == len(code) == 18


def test_an_inner_loop_keeps_its_instructions_and_its_optional_block() -> None:
    outer, inner = sass.loops(sass.parse(NESTED))
    assert (outer.header, outer.depth) == (0x10, 1)
    assert (inner.header, inner.depth) == (0x70, 2)
    assert inner.counts == {"fma": 0, "alu": 0, "xu": 1, "tensor": 1, "lsu": 2, "other": 4}
    assert outer.counts == {"fma": 2, "alu": 0, "xu": 0, "tensor": 0, "lsu": 2, "other": 3}
    assert [i.opcode.split(".")[0] for i in inner.skippable] == ["LDGSTS", "BRA"]


def test_a_backward_branch_into_the_middle_is_no_loop() -> None:
    """0x80 jumps back to 0x50, which it does not pass every time: only two loops are found."""
    assert [loop.header for loop in sass.loops(sass.parse(NESTED))] == [0x10, 0x70]


def test_one_trip_takes_the_branches_that_are_named() -> None:
    code = sass.parse(NESTED)
    assert [hex(i.address) for i in sass.trip(code, 0x70, taken=[0xA0])] == ["0x70", "0x80", "0x90", "0xa0", "0x30", "0x40"]
    assert sass.count(sass.trip(code, 0x70, taken=[0x80, 0xA0]))["lsu"] == 2
    with pytest.raises(ValueError, match=r"^the way from 0x70 does not return to it; name the branches to take, got \[\]$"):
        sass.trip(sass.parse(NESTED.replace("BRA P3, 0x10", "NOP")), 0x70)


def test_spills_are_counted_by_width() -> None:
    outer, inner = sass.loops(sass.parse(NESTED))
    assert (inner.spill_bytes, outer.spill_bytes) == (2 * 32 * 4, 32 * 4)


def test_labels_do_as_well_as_addresses() -> None:
    (loop,) = sass.loops(sass.parse(LABELLED))
    assert loop.header == 0x10
    assert sass.opcodes(loop.instructions) == {"FADD": 1, "BRA": 1}


def test_a_dump_falls_into_its_kernels() -> None:
    text = NESTED + LABELLED.replace(".text.demo", ".text.other")
    assert list(sass.kernels(text)) == ["demo", "other"]
    assert len(sass.parse(sass.kernels(text)["other"])) == 4


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(ValueError, match=r"^no SASS instruction in the text; expected lines such as "):
        sass.parse("nothing here")
    with pytest.raises(ValueError, match=r"^address 0x0 follows 0x110: pass one kernel at a time, see kernels\(\)$"):
        sass.parse(NESTED + LABELLED)
    with pytest.raises(ValueError, match=r"^BRA goes to \.L_x_1, which the text lacks: pass the whole kernel$"):
        sass.parse(LABELLED.replace(".L_x_1:", ""))


STARTED = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
                                                                             /* 0x000fe20000000800 */
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;              /* 0x0000820000047ab9 */
                                                                             /* 0x000fe40000000a00 */
        /*0020*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;         /* 0x00000018000079c8 */
                                                                             /* 0x000fe20000000800 */
        /*0030*/                   ULDC UR6, c[0x0][0x230] ;                 /* 0x00008c0000067ab9 */
                                                                             /* 0x000fca0000000800 */
        /*0040*/                   ULDC UR7, c[0x0][0x240] ;                 /* 0x00008c0000067ab9 */
                                                                             /* 0x000fca0000000800 */
        /*0050*/                   UTMALDG.4D [UR8], [UR12] ;                /* 0x00000000080075b4 */
                                                                             /* 0x0001e20008011000 */
"""


def test_what_runs_before_the_first_load_has_its_stalls_and_the_lines_of_arguments_that_it_reads_first() -> None:
    assert sass.start(STARTED, before="USETMAXREG") == {"instructions": 2, "stall_cycles": 3, "argument_lines": 2}
    then = sass.start(STARTED, after="USETMAXREG", before="UTMALDG")
    assert then == {"instructions": 3, "stall_cycles": 11, "argument_lines": 1}  # 0x230 lies in a line that is read already
    with pytest.raises(ValueError, match="the kernel has no LDGDEPBAR; give an opcode that it has"):
        sass.start(STARTED, before="LDGDEPBAR")
