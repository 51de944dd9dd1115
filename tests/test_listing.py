"""Counting the hot loop of a listing, on listings short enough to count by hand."""

from __future__ import annotations

from kvhal.kernels.listing import LoopCount, amd_loop, amd_names, nvidia_loop, nvidia_names

# An item's loop (from .LBB0_1) around two loops over tiles: the second masks. The one over .LBB0_5 has no products.
AMD = """\
\t.text
attend_kernel:                          ; @attend_kernel
; %bb.0:
\ts_load_dwordx4 s[0:3], s[4:5], 0x0
\tv_mov_b32_e32 v0, 0
.LBB0_1:                                ; =>This Loop Header: Depth=1
\tv_exp_f32_e32 v1, v1
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\ts_waitcnt vmcnt(0)
\tds_write_b128 v9, v[0:3]
\tv_mfma_i32_16x16x32_i8 a[0:3], v[0:1], v[2:3], a[0:3]
\tv_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
\tv_mfma_f32_16x16x16_f16 a[4:7], v[0:1], v[2:3], a[4:7]
\tv_exp_f32_e32 v1, v1
\tv_pk_mul_f32 v[0:1], v[0:1], v[2:3] op_sel_hi:[1,0]
\tv_mul_lo_u32 v1, v2, v3
\ts_add_i32 s0, s0, 1
\ts_cmp_lt_i32 s0, s1
\ts_cbranch_scc1 .LBB0_2
; %bb.3:
.LBB0_4:                                ;   Parent Loop BB0_1 Depth=1
\tv_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\ts_cbranch_execz .LBB0_6
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\tv_cndmask_b32_e32 v0, v1, v2, vcc
\ts_cbranch_vccnz .LBB0_4
.LBB0_5:
\tv_add_u32_e32 v0, v0, v1
\ts_cbranch_vccnz .LBB0_5
.LBB0_6:
\tglobal_store_dwordx4 v[0:1], v[2:5], off
\ts_cbranch_scc0 .LBB0_1
\ts_endpgm
"""

NVIDIA = """\
.text.attend_kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/                   LDSM.16.M88.4 R4, [R1] ;
        /*0030*/                   IMMA.16816.S8.S8 R4, R4.ROW, R8.COL, R4 ;
        /*0040*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0050*/                   MUFU.EX2 R4, R4 ;
        /*0060*/              @!P0 FADD R4, R4, R5 ;
        /*0070*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/              @!UP0 UMOV UR4, URZ ;
        /*0090*/               @P1 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
"""


def test_the_hot_loop_is_the_shortest_innermost_one_with_products() -> None:
    assert amd_loop(AMD) == LoopCount(vector=3, slow=2, matrix=2, matrix8=1, memory=1, shared=1, scalar=2, other=2)


def test_slow_ones_are_counted_once() -> None:
    assert amd_loop(AMD).instructions == 12


def test_every_instruction_has_a_name() -> None:
    names = amd_names(AMD)
    assert len(names) == 32
    assert names[0] == "s_load_dwordx4"
    assert len(nvidia_names(NVIDIA)) == 11


def test_sass_is_counted_alike() -> None:
    assert nvidia_loop(NVIDIA) == LoopCount(
        vector=2, slow=1, matrix=1, matrix8=1, memory=1, shared=1, scalar=2, other=1
    )


SKIPS = """\
.L_x_0:
        /*0010*/                   IMMA.16816.S8.S8 R4, R4.ROW, R8.COL, R4 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   FMUL R4, R4, R5 ;
        /*0040*/                   FMUL R4, R4, R5 ;
        /*0050*/                   MUFU.EX2 R4, R4 ;
.L_x_2:
        /*0060*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0070*/               @P2 BRA `(.L_x_3) ;
        /*0080*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
.L_x_3:
        /*0090*/               @P1 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
"""


def test_what_a_turn_may_skip_is_not_counted_unless_it_holds_products() -> None:
    assert nvidia_loop(SKIPS) == LoopCount(matrix=2, matrix8=1, other=3)


def test_no_loop_without_products() -> None:
    plain = AMD.replace("v_mfma_i32", "v_add_i32").replace("v_mfma_f32", "v_add_f32")
    assert amd_loop(plain) == LoopCount()
    assert amd_loop("") == LoopCount()
