// rans.cu - rANS streams by themselves: decode, encode, count. A block holds some warps, each with a stream of its own.
#include "rans.cuh"

// One stream; places are bytes, symbols or steps into the launch's arrays. decode: `bytes` at `data`. encode: room of
// 256 + n bytes and up to the next 4, at `data`, a multiple of 4; the stream lies at its end and `bytes` says how long.
struct RansStream {
    u64 data, symbols, steps;
    u32 bytes, n;
};

// shared: tables * 1024 + 512 bytes a warp. A table's number that is none ends its stream: nothing is written after.
extern "C" __global__ void ctx_rans_decode(const u8 *data, const RansStream *streams, u32 count, const RansTable *tables,
                                           u32 known, const u16 *steps, u8 *symbols, u16 *seeds, u32 *status) {
    CTX_SHARED(memory);
    RansTable *const own = (RansTable *)memory;
    copy_words(own, tables, known * (u32)sizeof(RansTable));
    __syncthreads();
    const u32 number = blockIdx.x * (blockDim.x / WARP) + warp_in_block(), lane = lane_number();
    if (number >= count) return;
    const RansStream stream = streams[number];
    u16 *const ring = (u16 *)(memory + known * sizeof(RansTable)) + RING * warp_in_block();
    const u16 *const table = steps + stream.steps;
    u8 *const out = symbols + stream.symbols;
    RansReader reader;
    u32 how = reader.begin(data + stream.data, stream.bytes, ring) ? OK : CORRUPT;
    u32 now = how == OK && stream.n ? table[0] : 0;
    for (u32 i = 0; how == OK && i < stream.n; i += 64) {
        const u32 active = stream.n - i < 64 ? stream.n - i : 64;
        if (now >= known) {
            how = BAD_TABLE;
            break;
        }
        // The next step's table is asked for before this step, which does not wait for it.
        const u32 next = active < stream.n - i ? table[i / 64 + 1] : 0;
        u32 s[2];
        if (active == 64)
            reader.step<true>(own[now], active, s);
        else
            reader.step<false>(own[now], active, s);
        now = next;
        if (lane < active) out[i + lane] = (u8)(s[0] >> 24);
        if (lane + WARP < active) out[i + lane + WARP] = (u8)(s[1] >> 24);
    }
    if (how == OK) {
        seeds[64 * (u64)number + lane] = (u16)reader.x[0];
        seeds[64 * (u64)number + lane + WARP] = (u16)reader.x[1];
        if (!reader.end()) how = CORRUPT;
    }
    if (lane == 0) status[number] = how;
}

// shared: tables * 256 bytes.
extern "C" __global__ void ctx_rans_encode(u8 *data, RansStream *streams, u32 count, const RansCode *codes, u32 known,
                                           const u16 *steps, const u8 *symbols, const u16 *seeds, u32 *status) {
    CTX_SHARED(memory);
    RansCode *const own = (RansCode *)memory;
    copy_words(own, codes, known * (u32)sizeof(RansCode));
    __syncthreads();
    const u32 number = blockIdx.x * (blockDim.x / WARP) + warp_in_block(), lane = lane_number();
    if (number >= count) return;
    const RansStream stream = streams[number];
    const u16 *const table = steps + stream.steps;
    const u8 *const of = symbols + stream.symbols;
    const u32 words = (256 + stream.n + 3) / 4 * 2;
    RansWriter writer;
    writer.begin((u16 *)(data + stream.data), words, seeds[64 * (u64)number + lane], seeds[64 * (u64)number + lane + WARP]);
    u32 how = OK;
    u32 step = stream.n / 64 + (stream.n % 64 != 0), now = 0, s[2] = {0, 0};
    if (step) now = table[step - 1];
#pragma unroll
    for (u32 h = 0; h < 2; h++)
        if (step && 64 * (step - 1) + WARP * h + lane < stream.n) s[h] = of[64 * (step - 1) + WARP * h + lane];
    while (step-- > 0) {
        const u32 active = stream.n - 64 * step < 64 ? stream.n - 64 * step : 64;
        if (now >= known) {
            how = BAD_TABLE;
            break;
        }
        // What the next step needs is asked for before this one, which does not wait for it.
        u32 next = 0, ahead[2] = {};
        if (step) next = table[step - 1], ahead[0] = of[64 * step - 64 + lane], ahead[1] = of[64 * step - 32 + lane];
        writer.step(own[now], active, s);
        now = next, s[0] = ahead[0], s[1] = ahead[1];
    }
    const u32 first = writer.end();
    if (lane == 0) {
        streams[number].bytes = 2 * (words - first);
        status[number] = how == OK && writer.bad ? BAD_SYMBOL : how;
    }
}

// Adds to counts[tables][32]; thread s counts symbol s: five ballots give the bits of 32 symbols to every thread, and no
// two threads ever add to the same number. Each warp takes a run of steps. bad gets the OR of what was wrong.
extern "C" __global__ void ctx_rans_count(const u8 *symbols, u64 n, const u16 *steps, u32 known, u32 each, u32 *counts,
                                          u32 *bad) {
    const u64 warp = (u64)blockIdx.x * (blockDim.x / WARP) + warp_in_block(), all = n / 64 + (n % 64 != 0);
    const u64 first = warp * each, last = first + each < all ? first + each : all;
    const u32 lane = lane_number();
    u32 held = 0, table = 0, wrong = 0;
    for (u64 step = first; step < last; step++) {
        const u32 here = steps[step];
        if (here >= known) {
            wrong |= 1u << BAD_TABLE;
            continue;
        }
        if (here != table) {
            if (held) atomicAdd(&counts[32 * (u64)table + lane], held);
            held = 0, table = here;
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u64 i = 64 * step + WARP * h + lane;
            const u32 s = i < n ? symbols[i] : 0;
            u32 mine = __ballot_sync(EVERYONE, i < n);
            wrong |= s > 31 ? 1u << BAD_SYMBOL : 0;
#pragma unroll
            for (u32 bit = 0; bit < 5; bit++) {
                const u32 set = __ballot_sync(EVERYONE, s >> bit & 1);
                mine &= lane >> bit & 1 ? set : ~set;
            }
            held += __popc(mine);
        }
    }
    if (held) atomicAdd(&counts[32 * (u64)table + lane], held);
    if (wrong) atomicOr(bad, wrong);
}
