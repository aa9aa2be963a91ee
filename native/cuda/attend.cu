// attend.cu - attention of some queries over runs of K and V that stay quantised, split over blocks and merged.
//
// A block takes one share of the rows for one K and V head and up to eight (or 32) query rows of it: S queries times the
// query heads of the group. Its eight warps go through the rows tile by tile, each with a softmax of its own; then their
// sums are merged in shared memory. A second kernel merges the blocks'. Rows are read once from memory per 8 or 32 query
// rows; the codes of the next tile are on their way while one is computed with, so the memory is what limits.
#include "attend_codes.cuh"
#include "attend_floats.cuh"

namespace {

// Of one call. Scores are in powers of two; weights of values are multiplied by `raised`, so that halves hold them.
struct Asked {
    const u8 *q;
    u32 type, heads, rows, queries;
    float scale, cap, raised;
};

template <u32 D, u32 TILES> struct Sums {
    float of[TILES][D / 16][4]; // [component][query 2t, 2t + 1]
    float top[TILES], sum[TILES]; // of query g; sum: of this thread's keys
};

// Scores to weights of values, and what they do to the sums.
template <u32 D, u32 TILES>
__device__ __forceinline__ void weigh(float (&s)[TILES][AttendRoom<D, TILES>::keys / 8][2], Sums<D, TILES> &sums,
                                      const AttendRoom<D, TILES> &room, i32 tile, u32 hidden, const float *scales, const Asked &asked) {
    const AttendRun &run = room.run;
    const u32 keys = AttendRoom<D, TILES>::keys, lane = lane_number(), g = lane / 4, t = lane % 4;
    const bool clear = tile >= run.clear_first && tile + (i32)keys <= run.clear_last && hidden == 0;
    if (asked.cap > 0)
#pragma unroll
        for (u32 i = 0; i < TILES * keys / 4; i++) {
            float &x = s[i / (keys / 4)][i / 2 % (keys / 8)][i % 2];
            x = asked.cap * (1.442695041f - __fdividef(2.885390082f, power_of_two(x * 2.885390082f) + 1)); // tanh
        }
    if (!clear)
#pragma unroll
        for (u32 c = 0; c < TILES; c++) {
            const i32 low = room.bounds[COLUMNS * c + g][0], high = room.bounds[COLUMNS * c + g][1];
#pragma unroll
            for (u32 i = 0; i < keys / 4; i++) {
                const i32 key = 8 * (i / 2) + 2 * t + i % 2, row = tile + key;
                if (row < low || row >= high || (hidden >> key & 1)) s[c][i / 2][i % 2] = bits_float(0xff800000);
            }
        }
#pragma unroll
    for (u32 c = 0; c < TILES; c++) {
        float top = sums.top[c];
#pragma unroll
        for (u32 i = 0; i < keys / 4; i++) top = fmaxf(top, s[c][i / 2][i % 2]);
        top = fmaxf(top, __shfl_xor_sync(EVERYONE, top, 1));
        top = fmaxf(top, __shfl_xor_sync(EVERYONE, top, 2));
        if (__any_sync(EVERYONE, top > sums.top[c])) {
            const float factor = top > sums.top[c] ? power_of_two(sums.top[c] - top) : 1;
            const float even = __shfl_sync(EVERYONE, factor, 8 * t), odd = __shfl_sync(EVERYONE, factor, 8 * t + 4);
            sums.top[c] = top, sums.sum[c] *= factor;
#pragma unroll
            for (u32 j = 0; j < D / 16; j++) {
                sums.of[c][j][0] *= even, sums.of[c][j][1] *= odd;
                sums.of[c][j][2] *= even, sums.of[c][j][3] *= odd;
            }
        }
        const float base = top == bits_float(0xff800000) ? 0 : top;
#pragma unroll
        for (u32 i = 0; i < keys / 4; i++) {
            float &x = s[c][i / 2][i % 2];
            x = power_of_two(x - base);
            sums.sum[c] += x;
            x *= run.v.format == ROWS_INT8 ? scales[8 * (i / 2) + 2 * t + i % 2] : asked.raised;
        }
#pragma unroll
        for (u32 i = 0; i < keys / 8; i++) pack_weights(s[c][i], run.v.format);
    }
}

// One block. shared: AttendRoom, later the sums of eight warps: float [8][D / 16][32][4], and [8][columns][2] behind both.
template <u32 D, u32 TILES>
__device__ __forceinline__ void attend(const Asked &asked, const AttendRun *runs, const AttendItem *items, u32 shares, float *o, float *lse) {
    typedef AttendRoom<D, TILES> Room;
    const u32 keys = Room::keys, groups = Room::groups, columns = Room::columns;
    CTX_SHARED(memory);
    Room &room = *(Room *)memory;
    const u32 warp = warp_in_block(), lane = lane_number();
    if (threadIdx.x == 0) {
        const u32 sets = (asked.rows + columns - 1) / columns;
        room.share = blockIdx.x / (asked.heads * sets), room.head = blockIdx.x / sets % asked.heads;
        room.first = blockIdx.x % sets * columns, room.item = items[room.share];
        room.run.k.format = 0; // there was none before
    }
    __syncthreads();
    float *const k_scales = room.scales[warp], *const v_scales = k_scales + groups * keys;
    Sums<D, TILES> sums;
#pragma unroll
    for (u32 c = 0; c < TILES; c++) {
        sums.top[c] = bits_float(0xff800000), sums.sum[c] = 0;
#pragma unroll
        for (u32 j = 0; j < D / 4; j++) sums.of[c][j / 4][j % 4] = 0;
    }
    const i32 stride = WARPS * keys; // of the tiles of all runs, every eighth is this warp's
    i32 ahead = warp * keys;         // from the first tile of a run to the warp's own
    const AttendRun &run = room.run;
    float s[TILES][keys / 8][2];
    while (room.item.runs && quantised(runs[room.item.run].k.format)) {
        take_run(room, runs);
        i32 tile = run.first / (i32)keys * (i32)keys + ahead;
        AttendWalk<D, TILES> walk;
        if (tile < run.last) {
            aim(walk, run, room.head);
            ask_keys(walk, run, tile);
            ask_scales(walk, run, room.head, tile);
            ask_values(walk, run, tile);
        }
        meet<D, TILES, true>(room, asked.q, asked.type, asked.rows, asked.queries, asked.scale);
        for (; tile < run.last; tile += stride) {
            const bool more = tile + stride < run.last;
            const u32 hidden = hidden_of(run, tile, keys);
            put_scales(walk.scales, walk, run.k.format, 1, hidden, k_scales);
            put_scales(walk.scales + walk.listed, walk, run.v.format, asked.raised, hidden, v_scales);
            __syncwarp();
            score<D, TILES>(s, walk, room, k_scales);
            if (more) ask_keys(walk, run, tile + stride);
            weigh<D, TILES>(s, sums, room, tile, hidden, v_scales, asked);
            add_values<D, TILES>(sums.of, s, walk, run.v.format, v_scales);
            if (more) {
                ask_scales(walk, run, room.head, tile + stride);
                ask_values(walk, run, tile + stride);
            }
            __syncwarp();
        }
        ahead = tile - (run.last + (i32)keys - 1) / (i32)keys * (i32)keys;
    }
    while (room.item.runs) {
        take_run(room, runs);
        i32 tile = run.first / (i32)keys * (i32)keys + ahead;
        meet<D, TILES, false>(room, asked.q, asked.type, asked.rows, asked.queries, asked.scale);
        for (; tile < run.last; tile += stride) {
            const u32 hidden = hidden_of(run, tile, keys);
            if (run.k.format == ROWS_FP16)
                score_floats<D, TILES, true>(s, room, tile);
            else
                score_floats<D, TILES, false>(s, room, tile);
            weigh<D, TILES>(s, sums, room, tile, hidden, v_scales, asked);
            if (run.v.format == ROWS_FP16)
                add_floats<D, TILES, true>(sums.of, s, run, room.head, tile, hidden);
            else
                add_floats<D, TILES, false>(sums.of, s, run, room.head, tile, hidden);
        }
        ahead = tile - (run.last + (i32)keys - 1) / (i32)keys * (i32)keys;
    }

    // Eight softmaxes to one.
    const u32 share = room.share, head = room.head, first = room.first;
    float(*const all)[D / 16][WARP][4] = (float(*)[D / 16][WARP][4])memory;
    const u32 behind = sizeof(Room) > sizeof(float) * WARPS * D * COLUMNS ? sizeof(Room) : sizeof(float) * WARPS * D * COLUMNS;
    float(*const ends)[columns][2] = (float(*)[columns][2])(memory + behind);
#pragma unroll
    for (u32 c = 0; c < TILES; c++) {
        float sum = sums.sum[c];
        sum += __shfl_xor_sync(EVERYONE, sum, 1), sum += __shfl_xor_sync(EVERYONE, sum, 2);
        if (lane % 4 == 0) ends[warp][COLUMNS * c + lane / 4][0] = sums.top[c], ends[warp][COLUMNS * c + lane / 4][1] = sum;
    }
    __syncthreads();
#pragma unroll
    for (u32 c = 0; c < TILES; c++) {
        float factor[2];
        float top[2], sum[2];
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const u32 column = COLUMNS * c + lane % 4 * 2 + e;
            top[e] = bits_float(0xff800000), sum[e] = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) top[e] = fmaxf(top[e], ends[w][column][0]);
            const float base = top[e] == bits_float(0xff800000) ? 0 : top[e];
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) sum[e] += ends[w][column][1] * power_of_two(ends[w][column][0] - base);
            factor[e] = power_of_two(ends[warp][column][0] - base);
        }
#pragma unroll
        for (u32 j = 0; j < D / 16; j++)
            *(Floats *)all[warp][j][lane] = {{sums.of[c][j][0] * factor[0], sums.of[c][j][1] * factor[1],
                                              sums.of[c][j][2] * factor[0], sums.of[c][j][3] * factor[1]}};
        __syncthreads();
#pragma unroll
        for (u32 j = warp; j < D / 16; j += WARPS) {
            float four[4] = {};
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                const Floats part = *(const Floats *)all[w][j][lane];
#pragma unroll
                for (u32 i = 0; i < 4; i++) four[i] += part.at[i];
            }
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                const u32 row = first + COLUMNS * c + lane % 4 * 2 + e;
                if (row >= asked.rows) continue;
                const u64 place = ((u64)head * asked.rows + row) * shares + share;
                const float by = sum[e] == 0 ? 0 : 1 / (sum[e] * asked.raised);
                float *const to = o + place * D + D / 8 * (lane / 4) + 2 * j;
                to[0] = four[e] * by, to[1] = four[2 + e] * by;
                if (j == 0 && lane < 4) lse[place] = (top[e] + log2f(sum[e])) * (shares == 1 ? 0.693147181f : 1);
            }
        }
        __syncthreads();
    }
}

} // namespace

#define ATTEND_ARGUMENTS                                                                                               \
    const u8 *q, u32 type, u32 heads, u32 rows, u32 queries, float scale, float cap, float raised, const AttendRun *runs, \
        const AttendItem *items, u32 shares, float *o, float *lse
#define ATTEND(D, TILES) attend<D, TILES>({q, type, heads, rows, queries, scale, cap, raised}, runs, items, shares, o, lse)

// q: float, half or bfloat [heads][rows][D], rows = query heads of a group * queries. One block a share, K and V head and
// set of rows, in this order. o: float [heads][rows][shares][D], lse: [heads][rows][shares], a base-2 logarithm; if there
// is one share, natural, and all is done. scale: of scores, to powers of two (or to what cap limits); raised: a power of two
// that lets halves hold weights times any of V's int8 scales.
extern "C" __global__ void __launch_bounds__(256, 2) ctx_attend_64(ATTEND_ARGUMENTS) { ATTEND(64, 1); }
extern "C" __global__ void __launch_bounds__(256, 2) ctx_attend_128(ATTEND_ARGUMENTS) { ATTEND(128, 1); }
extern "C" __global__ void __launch_bounds__(256, 1) ctx_attend_256(ATTEND_ARGUMENTS) { ATTEND(256, 1); }
extern "C" __global__ void __launch_bounds__(256, 1) ctx_attend_64_wide(ATTEND_ARGUMENTS) { ATTEND(64, 4); }
extern "C" __global__ void __launch_bounds__(256, 1) ctx_attend_128_wide(ATTEND_ARGUMENTS) { ATTEND(128, 4); }

// Shares of a row to one: a block of 256 threads a row. shared: 4 KiB.
extern "C" __global__ void ctx_attend_merge(const float *o, const float *lse, u32 shares, u32 dim, float *merged, float *merged_lse) {
    CTX_SHARED(memory);
    float *const parts = (float *)memory;
    const u64 row = blockIdx.x;
    const float *const ends = lse + row * shares;
    const u32 quads = dim / 4, at = threadIdx.x % quads, own = threadIdx.x / quads, sets = blockDim.x / quads;
    float top = bits_float(0xff800000), sum = 0;
    for (u32 i = lane_number(); i < shares; i += WARP) top = fmaxf(top, ends[i]);
#pragma unroll
    for (u32 bits = 1; bits < WARP; bits *= 2) top = fmaxf(top, __shfl_xor_sync(EVERYONE, top, bits));
    const float base = top == bits_float(0xff800000) ? 0 : top;
    for (u32 i = lane_number(); i < shares; i += WARP) sum += power_of_two(ends[i] - base);
#pragma unroll
    for (u32 bits = 1; bits < WARP; bits *= 2) sum += __shfl_xor_sync(EVERYONE, sum, bits);
    Floats total = {};
#pragma unroll 4
    for (u32 i = own; i < shares; i += sets) {
        const Floats part = *(const Floats *)(o + (row * shares + i) * dim + 4 * at);
        const float weight = power_of_two(ends[i] - base);
#pragma unroll
        for (u32 k = 0; k < 4; k++) total.at[k] += part.at[k] * weight;
    }
    *(Floats *)(parts + 4 * threadIdx.x) = total;
    __syncthreads();
    if (threadIdx.x >= dim) return;
    float all = 0;
    for (u32 i = 0; i < sets; i++) all += parts[i * dim + threadIdx.x];
    merged[row * dim + threadIdx.x] = sum == 0 ? 0 : all / sum;
    if (threadIdx.x == 0) merged_lse[row] = (base + log2f(sum)) * 0.693147181f;
}
