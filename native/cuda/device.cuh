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
typedef signed char i8;
typedef signed short i16;
typedef int i32;
typedef long long i64;

// How a stream or cell ended; the same numbers as enum ctx_rans_status in ../rans/rans.h, and more.
enum Status : u32 { OK = 0, CORRUPT = 1, BAD_SYMBOL = 2, BAD_TABLE = 3, BAD_PAGE = 4 };

static const u32 WARP = 32, EVERYONE = 0xffffffffu;

struct alignas(8) Pair { u32 at[2]; };
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

// The same where a, b or both are unsigned.
#define CTX_MULTIPLY_ADD(name, A, B)                                                                                    \
    __device__ __forceinline__ void name(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {                             \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." #A "." #B ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
    }
CTX_MULTIPLY_ADD(multiply_add_us, u8, s8)
CTX_MULTIPLY_ADD(multiply_add_su, s8, u8)
CTX_MULTIPLY_ADD(multiply_add_uu, u8, u8)

// The same of halves, or of bfloats: a [16][16], b [16][8], sums in fp32.
__device__ __forceinline__ void multiply_add_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add_bfloats(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers of 16 bits in a register, the first in its low half.
__device__ __forceinline__ u32 pack_halves(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 pack_bfloats(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 subtract_halves(u32 a, u32 b) {
    u32 both;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 both;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
    return both;
}

// 2^x to 2 units in the last place; below 2^-126: 0.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Aligned bytes that nobody writes while the kernel runs; asked for here, not where they are needed.
__device__ __forceinline__ Quad load_quad(const u8 *at) {
    Quad q;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q.at[0]), "=r"(q.at[1]), "=r"(q.at[2]), "=r"(q.at[3])
                 : "l"(at));
    return q;
}

__device__ __forceinline__ Pair load_pair(const u8 *at) {
    Pair p;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(p.at[0]), "=r"(p.at[1]) : "l"(at));
    return p;
}

// The aligned fours of the first and the last of some bytes, of four at most, and from these the bytes.
__device__ __forceinline__ Pair load_around(const u8 *at, u32 last) {
    Pair p;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(p.at[0]) : "l"((u64)at & ~3ull));
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(p.at[1]) : "l"((u64)(at + last) & ~3ull));
    return p;
}
__device__ __forceinline__ u32 four_of(const Pair &around, const u8 *at) {
    return __funnelshift_r(around.at[0], around.at[1], 8 * ((u32)(u64)at & 3));
}

// Four bytes of 16 rows of 32, for each thread those of a matrix product's first factor. Rows are aligned to 16 bytes.
__device__ __forceinline__ void load_rows(u32 (&a)[4], const u8 *rows, u32 stride) {
    const u32 from = (u32)__cvta_generic_to_shared(rows + lane_number() % 16 * stride + lane_number() / 16 * 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}
#else
__device__ __forceinline__ Pair load_around(const u8 *at, u32 last) { return {{last == 3 ? load32(at) : load16(at), 0}}; }
__device__ __forceinline__ u32 four_of(const Pair &around, const u8 *) { return around.at[0]; }
__device__ __forceinline__ void load_rows(u32 (&a)[4], const u8 *rows, u32 stride) {
    const u8 *const own = rows + lane_number() / 4 * stride + lane_number() % 4 * 4;
    for (u32 i = 0; i < 4; i++) a[i] = *(const u32 *)(own + i % 2 * 8 * stride + i / 2 * 16);
}
__device__ __forceinline__ Pair load_pair(const u8 *at) { return *(const Pair *)at; }
__device__ __forceinline__ Quad load_quad(const u8 *at) { return *(const Quad *)at; }
#endif

#endif
