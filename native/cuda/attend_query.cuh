// attend_query.cuh - the queries of a block as fragments of matrix products, turned for the part that they meet.
//
// Queries go to the tensor cores in two pieces, so that nothing of note is lost of them: against int8 and int4 as 16-bit
// integers of their largest, high and low byte; against 16-bit floats as a float of that type and what it leaves. A
// product's 16 rows are the high pieces of eight queries and the low pieces of the same eight.
#ifndef CTX_ATTEND_QUERY_CUH
#define CTX_ATTEND_QUERY_CUH

#include "attend.cuh"

static const u32 COLUMNS = 8, WARPS = 8, SCALES = 2;

// What a block's shared memory holds; queries are columns. ints of a part's order: bytes; floats: 16-bit items.
template <u32 D, u32 TILES> struct AttendRoom {
    static constexpr u32 groups = D / 32, columns = COLUMNS * TILES;
    static constexpr u32 keys = D == 64 ? 32 : 16; // rows of a warp's step
    AttendRun run;                             // the present one; this and the next: they would take many registers
    AttendItem item;                           // runs that are left
    u32 share, head, first;                    // of the block; first: of its columns
    u32 fresh;                                 // 1: the fragments are of another run's form
    Quad fragments[TILES * D / 16][WARP];
    float factor[columns];          // to scores; of 16-bit floats: of the high piece
    float sum[groups][columns];     // of the integers, by int4 group
    i32 bounds[columns][2];         // rows of this run that the query sees
    float scales[WARPS][SCALES * groups * keys]; // int8: factors of K, of V; int4: halves [K, V][group][step, low][row]
};

__device__ __forceinline__ bool quantised(u32 format) { return format == ROWS_INT8 || format == ROWS_INT4; }

// Largest integer of a query: its low byte may round up to a high one more.
static const float LARGEST = 32639.0f;

// Which of a part's forms the fragments in shared memory are of.
__device__ __forceinline__ bool same_queries(const AttendRun &a, const AttendRun &b) {
    return a.k.format == b.k.format && a.cosine == b.cosine && a.sine == b.sine && a.angles == b.angles &&
           a.interleaved == b.interleaved;
}

// Byte of component d of query g, its high piece; the low one lies 4 bytes behind. The orders follow from how a thread
// loads rows: 16 bytes at a time, all of which go to the products of one key.
__device__ __forceinline__ u32 fragment_of(u32 format, u32 dim, u32 d, u32 g) {
    u32 step, part, half, at;
    if (format == ROWS_INT8) {
        step = d / 64 * 2 + d % 16 / 8, part = d % 64 / 16, half = d % 8 / 4, at = d % 4;
    } else if (format == ROWS_INT4) {
        const u32 word = d % 16 / 4;
        part = dim == 64 ? word / 2 + word % 2 * 2 : word;
        step = d / 32, half = d % 32 / 16, at = d % 4;
    } else {
        step = d / 32 * 2 + d % 8 / 4, part = d % 32 / 8, half = d % 4 / 2, at = d % 2 * 2;
    }
    return 16 * (WARP * step + 4 * g + part) + 8 * half + at;
}

// Bytes of fragments of eight queries.
__device__ __forceinline__ u32 fragment_bytes(u32 format, u32 dim) {
    return (quantised(format) ? dim / 32 : dim / 16) * WARP * 16;
}

// All threads of the block: the next run, once nobody needs the last any more.
template <u32 D, u32 TILES> __device__ __forceinline__ void take_run(AttendRoom<D, TILES> &room, const AttendRun *runs) {
    const AttendRun *const run = runs + room.item.run;
    if (threadIdx.x == 0) room.fresh = !same_queries(room.run, *run);
    __syncthreads();
    if (threadIdx.x < sizeof(AttendRun) / 4) ((u32 *)&room.run)[threadIdx.x] = ((const u32 *)run)[threadIdx.x];
    __syncthreads();
}

// The block's queries of the head's q [count][D]; columns behind the last are zeros.
template <u32 D, u32 TILES, bool INTEGERS>
__device__ __forceinline__ void ask(AttendRoom<D, TILES> &room, const u8 *q, u32 type, u32 count, float scale) {
    const AttendRun &run = room.run;
    const u32 format = run.k.format, lane = lane_number();
    const u8 *const rows = q + (u64)room.head * count * D * item_bytes(type);
    for (u32 column = warp_in_block(); column < room.columns; column += WARPS) {
        const bool real = room.first + column < count;
        const u8 *const row = rows + (u64)(room.first + column) * D * item_bytes(type);
        float most = 0, *const x = room.scales[warp_in_block()];
        bool finite = true;
        __syncwarp();
#pragma unroll
        for (u32 d = lane; d < D; d += WARP) {
            const u32 item = !real ? 0 : type == FP32 ? ((const u32 *)row)[d] : ((const u16 *)row)[d];
            x[d] = bits_float(widen(item, type));
        }
        __syncwarp();
        for (u32 i = lane; i < run.angles; i += WARP) {
            float &one = x[run.interleaved ? 2 * i : i], &two = x[run.interleaved ? 2 * i + 1 : i + run.angles];
            rotate(one, two, ((const float *)run.cosine)[i], ((const float *)run.sine)[i]);
        }
        __syncwarp();
#pragma unroll
        for (u32 d = lane; d < D; d += WARP) {
            finite &= fabsf(x[d]) <= 3.402823466e38f;
            most = fmaxf(most, fabsf(x[d]));
        }
#pragma unroll
        for (u32 bits = 1; bits < WARP; bits *= 2) most = fmaxf(most, __shfl_xor_sync(EVERYONE, most, bits));
        finite = __all_sync(EVERYONE, finite);
        const float up = finite && most > 1e-30f ? 1 / most : 0; // else zeros
        u8 *const own = (u8 *)room.fragments + column / COLUMNS * fragment_bytes(format, D);
#pragma unroll 1
        for (u32 d = lane; d < D; d += WARP) {
            u8 *const at = own + fragment_of(format, D, d, column % COLUMNS);
            const float part = finite ? x[d] * up : 0;
            if constexpr (INTEGERS) {
                const i32 all = __float2int_rn(part * LARGEST);
                i32 sum = all;
                at[0] = (u8)((all + 128) >> 8), at[4] = (u8)all;
#pragma unroll
                for (u32 bits = 1; bits < WARP; bits *= 2) sum += __shfl_xor_sync(EVERYONE, sum, bits);
                if (lane == 0) room.sum[d / WARP][column] = (float)sum;
            } else if (format == ROWS_FP16) {
                const u32 high = pack_halves(part, 0);
                *(u16 *)at = (u16)high, *(u16 *)(at + 4) = (u16)pack_halves((part - of_half(high & 0xffff)) * 2048, 0);
            } else {
                const u32 high = pack_bfloats(part, 0);
                *(u16 *)at = (u16)high, *(u16 *)(at + 4) = (u16)pack_bfloats((part - bits_float(high << 16)) * 256, 0);
            }
        }
        if (lane == 0) room.factor[column] = !finite ? bits_float(0x7fc00000) : INTEGERS ? most / LARGEST * scale : most * scale;
    }
}

// Which rows of the run each query sees; one thread a column.
template <u32 D, u32 TILES>
__device__ __forceinline__ void bound(AttendRoom<D, TILES> &room, u32 queries) {
    const AttendRun &run = room.run;
    if (threadIdx.x >= room.columns) return;
    i32 low = run.first, high = run.last;
    if (run.seen) {
        const i32 *const own = (const i32 *)run.seen + 2 * ((room.first + threadIdx.x) % queries);
        low = own[0] > low ? own[0] : low, high = own[1] < high ? own[1] : high;
    }
    room.bounds[threadIdx.x][0] = low, room.bounds[threadIdx.x][1] = high;
}

// All threads of the block, after take_run: all that they must know of their queries to go through the run.
template <u32 D, u32 TILES, bool INTEGERS>
__device__ __forceinline__ void meet(AttendRoom<D, TILES> &room, const u8 *q, u32 type, u32 count, u32 queries, float scale) {
    if (room.fresh) ask<D, TILES, INTEGERS>(room, q, type, count, scale);
    bound(room, queries);
    if (threadIdx.x == 0) room.item.run++, room.item.runs--;
    __syncthreads();
}

// Rows outside of the run are those at its edge: read, and weighed with 0.
__device__ __forceinline__ u32 within(i32 row, i32 first, i32 last) { return row < first ? first : row < last ? row : last - 1; }

// Bit i: nobody sees row tile + i.
__device__ __forceinline__ u32 hidden_of(const AttendRun &run, i32 tile, u32 keys) {
    if (!run.hidden) return 0;
    const u32 bits = ((const u32 *)run.hidden)[tile / 32] >> tile % 32;
    return keys == 16 ? bits & 0xffff : bits;
}

#endif
