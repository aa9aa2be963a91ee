// numbers.cuh - element types of an engine's memory, converted as ../core/scalar.h does: nearest even, NaN kept.
#ifndef CTX_NUMBERS_CUH
#define CTX_NUMBERS_CUH

#include "device.cuh"

enum Type : u32 { FP32 = 0, FP16 = 1, BF16 = 2 };

__device__ __forceinline__ u32 item_bytes(u32 type) { return type == FP32 ? 4 : 2; }

// Values travel as fp32 bits.
__device__ __forceinline__ u32 widen(u32 item, u32 type) {
    if (type == FP32) return item;
    if (type == BF16) return item << 16;
    const u32 magnitude = item & 0x7fff;
    if (magnitude > 0x7c00) return (item & 0x8000) << 16 | magnitude << 13 | 0x7fc00000;
    return float_bits(of_half(item));
}

__device__ __forceinline__ u32 narrow(u32 bits, u32 type) {
    if (type == FP32) return bits;
    const u32 magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    const bool nan = magnitude > 0x7f800000;
    if (type == BF16) return nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return nan ? sign | 0x7e00 | (magnitude >> 13 & 0x3ff) : half_of(bits_float(bits));
}

// What arithmetic gave: any NaN is the positive quiet one, for machines differ in them.
__device__ __forceinline__ u32 canonical(float x) { return x == x ? float_bits(x) : 0x7fc00000; }

// Items of memory at any byte, and four at once in aligned memory.
__device__ __forceinline__ u32 load_item(const u8 *at, u32 type) { return type == FP32 ? load32(at) : load16(at); }

__device__ __forceinline__ void store_item(u8 *at, u32 item, u32 type) {
    if (type == FP32)
        *(u32 *)at = item;
    else
        *(u16 *)at = (u16)item;
}

__device__ __forceinline__ void load_four(const u8 *at, u32 type, u32 (&bits)[4]) {
    if (type == FP32) {
        const Quad all = *(const Quad *)at;
#pragma unroll
        for (u32 i = 0; i < 4; i++) bits[i] = all.at[i];
    } else {
        const Pair all = *(const Pair *)at;
#pragma unroll
        for (u32 i = 0; i < 4; i++) bits[i] = widen(all.at[i / 2] >> 16 * (i % 2) & 0xffff, type);
    }
}

__device__ __forceinline__ void store_four(u8 *at, u32 type, const u32 (&bits)[4]) {
    if (type == FP32) {
        *(Quad *)at = {{bits[0], bits[1], bits[2], bits[3]}};
    } else {
        u32 item[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) item[i] = narrow(bits[i], type);
        *(Pair *)at = {{item[0] | item[1] << 16, item[2] | item[3] << 16}};
    }
}

// One pair of a rotary embedding.
__device__ __forceinline__ void rotate(float &x1, float &x2, float cos, float sin) {
    const float one = __fsub_rn(__fmul_rn(x1, cos), __fmul_rn(x2, sin));
    x2 = __fadd_rn(__fmul_rn(x2, cos), __fmul_rn(x1, sin));
    x1 = one;
}

#endif
