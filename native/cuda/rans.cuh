// rans.cuh - the entropy coder of ../rans/rans.h, one warp a stream: thread t holds the states of lanes t and t + 32.
//
// A ballot says who reads or writes a word in a step, and the count of those below says where: lanes ascend. Tables lie
// in shared memory; a decoder finds all of a slot in one word, for each step waits for the one before.
#ifndef CTX_RANS_CUH
#define CTX_RANS_CUH

#include "device.cuh"

struct RansTable {
    u32 slot[256]; // frequency | slot - start << 8 | symbol - 15 in eight bits << 16 | symbol << 24
};

struct RansCode {
    u32 span[32]; // frequency | start << 8; 0 for a symbol without frequency
    u32 reciprocal[32]; // (2^32 - 1) / frequency
};

static const u32 RING = 256, AHEAD = 64; // words in shared memory, and words that a step may read

// Copy 32-bit words with all threads of the block; the caller syncs.
__device__ __forceinline__ void copy_words(void *to, const void *from, u32 bytes) {
    for (u32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((u32 *)to)[i] = ((const u32 *)from)[i];
}

// A warp's place in a stream. Words pass through a ring of the warp's own, loaded a refill ahead, so that no step waits
// for memory. Positions overwritten lie more than two steps back: nobody still reads them.
struct RansReader {
    u32 x[2];
    const u8 *words;
    u32 count, at, loaded;
    Pair next; // aligned fours that hold this thread's two words after those that are loaded
    u16 *ring;

    __device__ __forceinline__ void ask() {
        const u32 w = loaded + 2 * lane_number();
        if (w < count) next = load_around(words + 2 * (u64)w, w + 1 < count ? 3 : 1);
    }

    __device__ __forceinline__ void refill() {
        *(u32 *)(ring + (loaded + 2 * lane_number()) % RING) = four_of(next, words);
        loaded += AHEAD;
        ask();
        __syncwarp();
    }

    // False if the bytes cannot be a stream: then nothing was read that is not there.
    __device__ bool begin(const u8 *data, u32 bytes, u16 *own) {
        if (bytes < 256 || bytes % 2) return false;
        x[0] = load32(data + 4 * lane_number());
        x[1] = load32(data + 4 * lane_number() + 128);
        words = data + 256, count = (bytes - 256) / 2, at = 0, loaded = 0, ring = own;
        if (__any_sync(EVERYONE, x[0] < 0x10000 || x[1] < 0x10000)) return false;
        next = {};
        ask();
        refill();
        return true;
    }

    // One step, of `active` lanes, or ALL: what the table says of their slots. Words beyond the last may be any: end() tells.
    template <bool ALL> __device__ __forceinline__ void step(const RansTable &table, u32 active, u32 (&found)[2]) {
        if (loaded - at < AHEAD) refill();
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const bool on = ALL || lane_number() + WARP * h < active;
            const u32 of = table.slot[x[h] & 255];
            const u32 after = (of & 255) * (x[h] >> 8) + (of >> 8 & 255);
            const bool low = on && after < 0x10000;
            const u32 readers = __ballot_sync(EVERYONE, low);
            const u32 word = ring[(at + __popc(readers & lanes_below())) % RING];
            if (on) x[h] = low ? after << 16 | word : after;
            at += __popc(readers);
            found[h] = of;
        }
    }

    __device__ bool end() const {
        return __all_sync(EVERYONE, x[0] >> 16 == 1 && x[1] >> 16 == 1) && at == count;
    }
};

// Writes a stream downwards, so that it ends where its room ends; room: 2-byte words, 128 + n / 2 suffice (../rans/rans.h).
struct RansWriter {
    u32 x[2];
    u16 *room;
    u32 at;
    bool bad;

    __device__ void begin(u16 *of, u32 words, u32 seed_low, u32 seed_high) {
        room = of, at = words, bad = false;
        x[0] = 0x10000 + seed_low, x[1] = 0x10000 + seed_high;
    }

    __device__ __forceinline__ void step(const RansCode &code, u32 active, const u32 (&symbols)[2]) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 h = 1 - i; // lanes downwards
            const bool on = lane_number() + WARP * h < active;
            const u32 s = symbols[h] & 31, span = code.span[s], f = span & 255;
            const bool known = f != 0 && symbols[h] < 32;
            bad |= on && !known;
            const bool full = on && known && x[h] >> 24 >= f;
            const u32 writers = __ballot_sync(EVERYONE, full);
            at -= __popc(writers);
            if (full) {
                room[at + __popc(writers & lanes_below())] = (u16)x[h];
                x[h] >>= 16;
            }
            if (on && known) {
                // The product is the quotient or one less.
                u32 quotient = __umulhi(x[h], code.reciprocal[s]), rest = x[h] - quotient * f;
                if (rest >= f) quotient++, rest -= f;
                x[h] = (quotient << 8) + rest + (span >> 8);
            }
        }
    }

    // Puts the states before the words; returns where the stream begins, in words of the room.
    __device__ u32 end() {
        at -= 128;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u16 *const state = room + at + 2 * (lane_number() + WARP * h);
            state[0] = (u16)x[h], state[1] = (u16)(x[h] >> 16);
        }
        bad = __any_sync(EVERYONE, bad);
        return at;
    }
};

#endif
