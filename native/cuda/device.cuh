// device.cuh - types and the few instructions that CUDA C++ has no operator for; the shim brings its own for g++.
#ifndef CTX_DEVICE_CUH
#define CTX_DEVICE_CUH

#ifdef CTX_SHIM
#include "shim/shim.h"
#define CTX_SHARED(name) unsigned char *const name = shim::shared_memory()
#else
#define CTX_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed short i16;
typedef int i32;
typedef long long i64;

// How a stream or cell ended; the same numbers as enum ctx_rans_status in ../rans.h, and more.
enum Status : u32 { OK = 0, CORRUPT = 1, BAD_SYMBOL = 2, BAD_TABLE = 3, BAD_PAGE = 4 };

static const u32 WARP = 32, EVERYONE = 0xffffffffu;

struct alignas(16) Quad { u32 at[4]; };
struct alignas(16) Floats { float at[4]; };

__device__ __forceinline__ u32 lane_number() { return threadIdx.x % WARP; }
__device__ __forceinline__ u32 warp_in_block() { return threadIdx.x / WARP; }
__device__ __forceinline__ u32 lanes_below() { return (1u << lane_number()) - 1u; }

// Streams begin at any byte.
__device__ __forceinline__ u32 load16(const u8 *at) { return at[0] | (u32)at[1] << 8; }
__device__ __forceinline__ u32 load32(const u8 *at) { return load16(at) | load16(at + 2) << 16; }

#ifndef CTX_SHIM
__device__ __forceinline__ u32 float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(u32 x) { return __uint_as_float(x); }

// Nearest even, subnormals kept; not for NaN.
__device__ __forceinline__ u32 half_of(float x) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}

__device__ __forceinline__ float of_half(u32 half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)half));
    return x;
}

// d += a b on the tensor cores: a [16 tokens][32 components] and b [32][8 channels] of int8, sums of 32 bits that wrap.
__device__ __forceinline__ void multiply_add(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#endif
