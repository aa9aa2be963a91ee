// attend_codes.cuh - int8 and int4 rows of K and V from memory into a warp's registers, and through the tensor cores.
//
// A warp's step is a tile of 16 or 32 keys. Thread (g, t) = (lane / 4, lane % 4) loads for a product of eight keys what it
// gives to it: of key g a quarter of the row's bytes, t by t in 16s; of values, for keys 2t, 2t + 1, 2t + 8 and 2t + 9, the
// D / 8 neighbouring components from D / 8 * g on. So no byte passes through shared memory or another thread (but for
// int4 keys, whose groups must be apart). Scores come out where weights must go in: query g, keys 2t and 2t + 1. Sums of
// values are [component][query]: tile j of them holds components 2j and 2j + 1 of each thread's own, queries 2t, 2t + 1.
#ifndef CTX_ATTEND_CODES_CUH
#define CTX_ATTEND_CODES_CUH

#include "attend_query.cuh"

// Where a warp is, and what it has asked for: codes of a tile of K and of V, its scales.
template <u32 D, u32 TILES> struct AttendWalk {
    static constexpr u32 keys = AttendRoom<D, TILES>::keys, held = keys * D / 128, listed = D == 256 ? 8 : 4;
    const u8 *k, *v;           // this thread's bytes of row 0
    u32 k_codes[held], v_codes[held];
    u32 scales[2 * listed];
};

template <u32 D, u32 TILES>
__device__ __forceinline__ void aim(AttendWalk<D, TILES> &walk, const AttendRun &run, u32 head) {
    const u32 g = lane_number() / 4, t = lane_number() % 4;
    const u32 k_format = run.k.format, v_format = run.v.format;
    walk.k = (const u8 *)run.k.data + head * run.k.head + t * (k_format == ROWS_INT4 && D == 64 ? 8 : 16);
    const u32 own = v_format == ROWS_INT8 ? D / 8 * g : D == 64 ? g / 4 * 16 + g % 2 * 8 : D == 128 ? g / 2 * 16 : g * 16;
    walk.v = (const u8 *)run.v.data + head * run.v.head + own;
}

template <u32 WORDS> __device__ __forceinline__ void take(u32 *to, const u8 *at) {
    if (WORDS == 2) {
        const Pair two = load_pair(at);
        to[0] = two.at[0], to[1] = two.at[1];
    } else {
#pragma unroll
        for (u32 w = 0; w < WORDS; w += 4) {
            const Quad four = load_quad(at + 4 * w);
#pragma unroll
            for (u32 i = 0; i < 4; i++) to[w + i] = four.at[i];
        }
    }
}

template <u32 D, u32 TILES>
__device__ __forceinline__ void ask_keys(AttendWalk<D, TILES> &walk, const AttendRun &run, i32 tile) {
    const i32 g = lane_number() / 4;
#pragma unroll
    for (u32 i = 0; i < walk.keys / 8; i++) {
        const u8 *const row = walk.k + (u64)within(tile + 8 * i + g, run.first, run.last) * run.k.row;
        if (run.k.format == ROWS_INT8) {
#pragma unroll
            for (u32 p = 0; p < D / 64; p++) take<4>(walk.k_codes + (i * D / 64 + p) * 4, row + 64 * p);
        } else if constexpr (D == 64) {
            take<2>(walk.k_codes + 2 * i, row);
        } else {
#pragma unroll
            for (u32 p = 0; p < D / 128; p++) take<4>(walk.k_codes + (i * D / 128 + p) * 4, row + 64 * p);
        }
    }
}

template <u32 D, u32 TILES>
__device__ __forceinline__ void ask_values(AttendWalk<D, TILES> &walk, const AttendRun &run, i32 tile) {
    const i32 t = lane_number() % 4;
#pragma unroll
    for (u32 n = 0; n < walk.keys / 4; n++) {
        const u8 *const row = walk.v + (u64)within(tile + n / 4 * 16 + n % 4 / 2 * 8 + 2 * t + n % 2, run.first, run.last) * run.v.row;
        if (run.v.format == ROWS_INT8)
            take<D / 32>(walk.v_codes + n * D / 32, row);
        else
            take<(D == 64 ? 2 : 4)>(walk.v_codes + n * D / 32, row);
    }
}

// A lane asks for scales of one row: lane % keys; of int4 for half of the groups where two lanes have the same.
template <u32 D, u32 TILES>
__device__ __forceinline__ void ask_scales(u32 *to, const AttendWalk<D, TILES> &walk, const AttendPlane &plane, u32 head, u32 row) {
    if (plane.format == ROWS_INT8) {
        to[0] = float_bits(((const float *)plane.scales)[head * plane.scale_head + row]);
    } else {
        const u32 half = lane_number() / walk.keys * walk.listed / 2;
        const u8 *const own = (const u8 *)plane.scales + head * plane.scale_head + row;
#pragma unroll
        for (u32 i = 0; i < walk.listed; i++) to[i] = own[(half + i / 2) * plane.scale_group + i % 2 * plane.scale_low];
    }
}

template <u32 D, u32 TILES>
__device__ __forceinline__ void ask_scales(AttendWalk<D, TILES> &walk, const AttendRun &run, u32 head, i32 tile) {
    const u32 row = within(tile + lane_number() % walk.keys, run.first, run.last);
    ask_scales(walk.scales, walk, run.k, head, row);
    ask_scales(walk.scales + walk.listed, walk, run.v, head, row);
}

// What was asked for, to the warp's shared memory; scales of hidden rows are 0, for they may be anything.
template <u32 D, u32 TILES>
__device__ __forceinline__ void put_scales(const u32 *from, const AttendWalk<D, TILES> &walk, u32 format, float by, u32 none, float *to) {
    const u32 keys = AttendWalk<D, TILES>::keys, row = lane_number() % keys;
    const bool hidden = none >> row & 1;
    if (format == ROWS_INT8) {
        to[row] = hidden ? 0 : bits_float(from[0]) * by;
    } else {
        const u32 half = lane_number() / keys * walk.listed / 2;
#pragma unroll
        for (u32 i = 0; i < walk.listed; i++) {
            // Exact as halves, which have 11 bits: a step has 4, a low 7 more.
            const u32 step = from[i - i % 2] << 7;
            const u32 one = i % 2 ? half_of((i32)(from[i] << 24) * 0x1p-27f * of_half(step)) : step;
            ((u16 *)to)[((half + i / 2) * 2 + i % 2) * keys + row] = hidden ? 0 : (u16)one;
        }
    }
}

// Groups of int4 keys lie in a thread each (heads of 64: half a group): word i of a thread becomes one of group i.
template <u32 D, u32 TILES> __device__ __forceinline__ void part_groups(AttendWalk<D, TILES> &walk) {
    const u32 t = lane_number() % 4;
#pragma unroll
    for (u32 i = 0; i < walk.held / 2; i += D == 64 ? 2 : 4) {
        u32 *const own = walk.k_codes + i;
#pragma unroll
        for (u32 span = D == 64 ? 1 : 2; span; span /= 2) {
            // Words w and w + span change places between threads whose numbers differ by as much.
            const u32 far = D == 64 ? 2 : span;
            const bool upper = t & far;
#pragma unroll
            for (u32 k = 0; k < (D == 64 ? 1 : 2); k++) {
                const u32 w = D == 64 ? 0 : span == 2 ? k : 2 * k;
                const u32 got = __shfl_xor_sync(EVERYONE, upper ? own[w] : own[w + span], far);
                if (upper)
                    own[w] = got;
                else
                    own[w + span] = got;
            }
        }
    }
}

// Two halves of neighbours in a row of scales.
__device__ __forceinline__ u32 two_halves(const float *scales, u32 at) { return *(const u32 *)((const u16 *)scales + at); }

// s[query tile][eight keys][key 2t, 2t + 1], query g: scores, in what the factors are in.
template <u32 D, u32 TILES>
__device__ __forceinline__ void score(float (&s)[TILES][AttendWalk<D, TILES>::keys / 8][2], AttendWalk<D, TILES> &walk,
                                      const AttendRoom<D, TILES> &room, const float *scales) {
    const u32 keys = AttendWalk<D, TILES>::keys, lane = lane_number(), g = lane / 4, t = lane % 4, format = room.run.k.format;
    if (format == ROWS_INT8) {
#pragma unroll
        for (u32 c = 0; c < TILES; c++) {
            u32 sums[keys / 8][4] = {};
#pragma unroll
            for (u32 step = 0; step < D / 32; step++) {
                const Quad q = room.fragments[c * D / 32 + step][lane];
#pragma unroll
                for (u32 i = 0; i < keys / 8; i++)
                    multiply_add(sums[i], q.at, walk.k_codes[i * D / 16 + 2 * step], walk.k_codes[i * D / 16 + 2 * step + 1]);
            }
            const float factor = room.factor[COLUMNS * c + g];
#pragma unroll
            for (u32 i = 0; i < keys / 8; i++)
#pragma unroll
                for (u32 e = 0; e < 2; e++)
                    s[c][i][e] = __int2float_rn((i32)(sums[i][e] * 256 + sums[i][2 + e])) * (factor * scales[8 * i + 2 * t + e]);
        }
    } else {
        part_groups(walk);
#pragma unroll
        for (u32 c = 0; c < TILES; c++) {
#pragma unroll
            for (u32 i = 0; i < keys / 8; i++) s[c][i][0] = s[c][i][1] = 0;
        }
#pragma unroll
        for (u32 group = 0; group < D / 32; group++)
#pragma unroll
            for (u32 i = 0; i < keys / 8; i++) {
                const u32 both = walk.k_codes[i * D / 32 + group], at = 2 * group * keys + 8 * i + 2 * t;
                const u32 steps = two_halves(scales, at), lows = two_halves(scales, at + keys);
#pragma unroll
                for (u32 c = 0; c < TILES; c++) {
                    u32 sums[4] = {};
                    multiply_add(sums, room.fragments[c * D / 32 + group][lane].at, both & 0x0f0f0f0f, both >> 4 & 0x0f0f0f0f);
                    const float sum = room.sum[group][COLUMNS * c + g];
#pragma unroll
                    for (u32 e = 0; e < 2; e++)
                        s[c][i][e] += __int2float_rn((i32)(sums[e] * 256 + sums[2 + e])) * of_half(steps >> 16 * e & 0xffff) +
                                      of_half(lows >> 16 * e & 0xffff) * sum;
                }
            }
#pragma unroll
        for (u32 c = 0; c < TILES; c++)
#pragma unroll
            for (u32 i = 0; i < keys / 8; i++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) s[c][i][e] *= room.factor[COLUMNS * c + g];
    }
}

// Four bytes of each of two keys, 0..255, as halves 1024 + byte: pair i holds byte i of both.
__device__ __forceinline__ void pair_bytes(u32 (&pairs)[4], u32 a, u32 b) {
    const u32 low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
    pairs[0] = __byte_perm(low, 0x64646464, 0x4140), pairs[1] = __byte_perm(low, 0x64646464, 0x4342);
    pairs[2] = __byte_perm(high, 0x64646464, 0x4140), pairs[3] = __byte_perm(high, 0x64646464, 0x4342);
}

// Adds weights[query tile][eight keys][packed] times the rows of V.
template <u32 D, u32 TILES>
__device__ __forceinline__ void add_values(float (&sums)[TILES][D / 16][4], const float (&weights)[TILES][AttendWalk<D, TILES>::keys / 8][2],
                                           const AttendWalk<D, TILES> &walk, u32 format, const float *scales) {
    const u32 keys = AttendWalk<D, TILES>::keys, lane = lane_number(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 u = 0; u < keys / 16; u++) {
        u32 w[TILES][2];
#pragma unroll
        for (u32 c = 0; c < TILES; c++) w[c][0] = float_bits(weights[c][2 * u][0]), w[c][1] = float_bits(weights[c][2 * u + 1][0]);
        const u32 *const own = walk.v_codes + u * D / 8;
        u32 step[2] = {}, low[2] = {};
        if (format == ROWS_INT4)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 at = 2 * (g * D / 256) * keys + 16 * u + 8 * i + 2 * t;
                step[i] = two_halves(scales, at), low[i] = two_halves(scales, at + keys);
            }
#pragma unroll
        for (u32 x = 0; x < D / 32; x++) {
            u32 a[2][4]; // components 4x.. of keys 2t and 2t + 1, and of those 8 behind
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 one = own[2 * i * D / 32 + x], two = own[(2 * i + 1) * D / 32 + x];
                if (format == ROWS_INT8) {
                    pair_bytes(a[i], one ^ 0x80808080, two ^ 0x80808080);
#pragma unroll
                    for (u32 z = 0; z < 4; z++) a[i][z] = subtract_halves(a[i][z], 0x64806480); // 1152
                } else {
                    if (D == 256) one = own[2 * i * D / 32 + x % 4], two = own[(2 * i + 1) * D / 32 + x % 4];
                    const u32 nibble = 4 * (D == 64 ? g % 4 / 2 : D == 128 ? g % 2 : x / 4);
                    pair_bytes(a[i], one >> nibble & 0x0f0f0f0f, two >> nibble & 0x0f0f0f0f);
#pragma unroll
                    for (u32 z = 0; z < 4; z++) a[i][z] = fma_halves(subtract_halves(a[i][z], 0x64006400), step[i], low[i]);
                }
            }
#pragma unroll
            for (u32 y = 0; y < 2; y++) {
                const u32 rows[4] = {a[0][2 * y], a[0][2 * y + 1], a[1][2 * y], a[1][2 * y + 1]};
#pragma unroll
                for (u32 c = 0; c < TILES; c++) multiply_add_halves(sums[c][2 * x + y], rows, w[c][0], w[c][1]);
            }
        }
    }
}

#endif
