// attend_floats.cuh - rows of halves or bfloats through the tensor cores, straight from memory.
//
// The same places as of codes (attend_codes.cuh), but nothing is asked for ahead: such rows are the few behind the chunks.
#ifndef CTX_ATTEND_FLOATS_CUH
#define CTX_ATTEND_FLOATS_CUH

#include "attend_query.cuh"

// s[query tile][eight keys][key 2t, 2t + 1], query g: scores, in what the factors are in.
template <u32 D, u32 TILES, bool HALVES>
__device__ __forceinline__ void score_floats(float (&s)[TILES][AttendRoom<D, TILES>::keys / 8][2], const AttendRoom<D, TILES> &room, i32 tile) {
    const AttendRun &run = room.run;
    const u32 keys = AttendRoom<D, TILES>::keys, lane = lane_number(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 i = 0; i < keys / 8; i++) {
        float sums[TILES][4] = {};
        const u8 *const row = (const u8 *)run.k.data + room.head * run.k.head + (u64)within(tile + 8 * i + g, run.first, run.last) * run.k.row;
#pragma unroll
        for (u32 p = 0; p < D / 32; p++) {
            const Quad k = load_quad(row + 64 * p + 16 * t);
#pragma unroll
            for (u32 h = 0; h < 2; h++)
#pragma unroll
                for (u32 c = 0; c < TILES; c++) {
                    const Quad q = room.fragments[c * D / 16 + 2 * p + h][lane];
                    if constexpr (HALVES)
                        multiply_add_halves(sums[c], q.at, k.at[2 * h], k.at[2 * h + 1]);
                    else
                        multiply_add_bfloats(sums[c], q.at, k.at[2 * h], k.at[2 * h + 1]);
                }
        }
        const float low = HALVES ? 1.0f / 2048 : 1.0f / 256;
#pragma unroll
        for (u32 c = 0; c < TILES; c++)
#pragma unroll
            for (u32 e = 0; e < 2; e++) s[c][i][e] = (sums[c][e] + sums[c][2 + e] * low) * room.factor[COLUMNS * c + g];
    }
}

// Weights of two keys as V's products want them: [0] as a pair; bfloats have eight bits, so [1] is what they leave.
__device__ __forceinline__ void pack_weights(float (&w)[2], u32 format) {
    if (format == ROWS_BF16) {
        const u32 high = pack_bfloats(w[0], w[1]);
        w[1] = bits_float(pack_bfloats(w[0] - bits_float(high << 16), w[1] - bits_float(high & 0xffff0000)));
        w[0] = bits_float(high);
    } else {
        w[0] = bits_float(pack_halves(w[0], w[1]));
    }
}

// Adds weights[query tile][eight keys][packed] times the rows of V; what is in hidden rows reaches no sum.
template <u32 D, u32 TILES, bool HALVES>
__device__ __forceinline__ void add_floats(float (&sums)[TILES][D / 16][4], const float (&weights)[TILES][AttendRoom<D, TILES>::keys / 8][2],
                                           const AttendRun &run, u32 head, i32 tile, u32 hidden) {
    const u32 keys = AttendRoom<D, TILES>::keys, lane = lane_number(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 u = 0; u < keys / 16; u++) {
        const u8 *row[4];
        bool none[4];
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 key = 16 * u + n / 2 * 8 + 2 * t + n % 2;
            row[n] = (const u8 *)run.v.data + head * run.v.head + (u64)within(tile + key, run.first, run.last) * run.v.row + D / 4 * g;
            none[n] = hidden >> key & 1;
        }
#pragma unroll
        for (u32 y = 0; y < D / 64; y++) {
            Quad of[4];
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                of[n] = load_quad(row[n] + 16 * y);
                if (none[n]) of[n] = Quad{};
            }
#pragma unroll
            for (u32 z = 0; z < 4; z++) {
                const u32 rows[4] = {__byte_perm(of[0].at[z], of[1].at[z], 0x5410), __byte_perm(of[0].at[z], of[1].at[z], 0x7632),
                                     __byte_perm(of[2].at[z], of[3].at[z], 0x5410), __byte_perm(of[2].at[z], of[3].at[z], 0x7632)};
#pragma unroll
                for (u32 c = 0; c < TILES; c++) {
                    const float(&one)[2] = weights[c][2 * u], (&two)[2] = weights[c][2 * u + 1];
                    float(&sum)[4] = sums[c][4 * y + z];
                    if constexpr (HALVES) {
                        multiply_add_halves(sum, rows, float_bits(one[0]), float_bits(two[0]));
                    } else {
                        multiply_add_bfloats(sum, rows, float_bits(one[0]), float_bits(two[0]));
                        multiply_add_bfloats(sum, rows, float_bits(one[1]), float_bits(two[1]));
                    }
                }
            }
        }
    }
}

#endif
