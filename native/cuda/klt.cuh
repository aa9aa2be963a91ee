// klt.cuh - what a launch over coded planes is told: cells, planes in the engine's memory, and the card's transforms.
//
// The host lays these structures out (ctxreuse/cuda/layout.py has the same fields) and has checked every length. A
// group's arrays lie in one buffer, the book; their places are bytes from its start, multiples of 16.
#ifndef CTX_KLT_CUH
#define CTX_KLT_CUH

#include "numbers.cuh"
#include "rans.cuh"

static const u32 CELL = 64, TILE = 32, NONE = 0xffff;
static const i32 CENTRE = 15, ESCAPE = 31, LIMIT = 32000;

// Four threads of a warp's quarter take eight channels each of a block of 32: two runs of four, rotary partners side by
// side, so that a rotation needs no other thread and a store is four items. head is NONE behind the last channel.
struct alignas(16) Run {
    u16 channel[2]; // first of each run, in the group
    u16 dim[2];     // the same, in the head
    u16 head;       // of the plane
    u16 angle;      // first of four angles, or NONE
    u16 spare[2];
};

// One channel group at one level.
struct KltGroup {
    u64 basis;    // Quad [blocks][tiles][low, high][2][32]: digits of 64 as fragments of a matrix product
    u64 runs;     // Run [blocks][4]
    u64 mean;     // float [channels]
    u64 gain;     // float [channels]
    u64 coding;   // u32 [components + 1]: table | shift << 8 | shifts of all components before << 16
    u64 refining; // the same, of a refinement's symbols
    u64 forward;  // float [channels][32 * tiles]; if `unit`, Quad [4 * tiles][channels / 32][32]: digits as fragments
    u64 quanta;   // float [32 * tiles]: what sums are multiplied by
    u32 channels, components, tiles, blocks;
    u32 coarse; // bit i: all low digits of tile i are 0
    u32 based;  // components that the base of a refinement codes
    u32 nested; // 1: base of a nested pair, quantised with a third of the step
    float step;
    double energy; // 2^(-2 log_rms) / channels
    float unit;    // 0, or vectors are rounded after this: sums are of whole numbers
    u16 shifts, more_shifts; // low bits of a token; of a refinement
};

// K or V of some tokens in paged memory: token t is slot (row + t) of the page table. Strides count elements.
struct KltPlane {
    u64 memory; // address; 16-byte aligned, as are the strides for four elements
    u64 pages;  // address of i32 [entries]
    u64 cosine, sine; // addresses of float [tokens][angles]
    i64 page_stride, head_stride, token_stride;
    u32 page_tokens, entries, limit; // page numbers are below limit
    u32 row;
    u32 angles, interleaved;
    u32 type, raw_type;
};

struct KltCell {
    u64 data, raw;     // where its body lies; bit t: token t stands raw
    u64 more;          // where its refinement's body lies
    u32 bytes, escapes; // of the rANS stream, and escaped values
    u32 more_bytes, more_escapes;
    u32 plane, group, base; // base: the group as the base level codes it, or the same
    u32 first, tokens;      // in the plane
    u32 refined;
};

// 2^((code - 0x8000) / 32), the same bits everywhere: powers holds 2^(i / 32). Codes lie in 0x8000 +- 2048.
__device__ __forceinline__ float scale_of(i32 code, const float *powers) {
    const i32 power = code - 0x8000;
    return __fmul_rn(powers[power & 31], bits_float((u32)((power >> 5) + 127) << 23));
}

// Where token t lies, in elements; -1 if the page table has no page for it.
__device__ __forceinline__ i64 place_of(const KltPlane &plane, u32 t) {
    const u32 slot = plane.row + t, entry = slot / plane.page_tokens;
    if (entry >= plane.entries) return -1;
    const i32 page = ((const i32 *)plane.pages)[entry];
    if (page < 0 || (u32)page >= plane.limit) return -1;
    return page * plane.page_stride + (i64)(slot % plane.page_tokens) * plane.token_stride;
}

#endif
