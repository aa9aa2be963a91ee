// klt_decode.cu - coded planes straight into an engine's cache pages, one warp a cell of 64 tokens.
//
// The warp decodes its symbols into shared memory as 16-bit numbers, multiplies them by the basis on the tensor cores
// (numbers and basis split into 8-bit digits; the 32-bit sums are exact), adds the mean, rotates keys and stores. A cell
// that is corrupt writes nothing.
#include "klt.cuh"

namespace {

// A warp's own shared memory; numbers are [64 tokens][stride], value + 128: its high byte is then a signed digit of 256
// and its low one, top bit flipped, a signed digit of 1.
struct Room {
    u16 *ring;
    i64 *place;
    float *factor;
    u16 *numbers;
    u32 stride;
};

struct Part {
    const u8 *body;
    const u32 *coding;
    u32 bytes, escapes, components, based;
};

// One part of a cell into `room`; sets bits of `wide` for tiles with numbers beyond a byte. Codes: of this thread's lanes.
__device__ bool read_part(const Part &part, u32 tokens, const RansTable *tables, Room &room, u32 &wide, u32 (&codes)[2]) {
    RansReader reader;
    codes[0] = codes[1] = 0x8000;
    if (part.components == 0) return part.bytes == 0 && part.escapes == 0;
    if (!reader.begin(part.body, part.bytes, room.ring)) return false;
    const u32 lane = lane_number(), total = part.components * tokens, row = (tokens + 7) / 8;
    const u8 *const low = part.body + part.bytes;
    const u8 *const listed = low + row * (part.coding[part.components] >> 16);
    const u32 down = CELL / tokens, along = CELL % tokens;
    // Component and token of the step's first symbol and of this thread's two.
    u32 head = 0, head_token = 0, c[2] = {lane / tokens, (lane + WARP) / tokens};
    u32 t[2] = {lane % tokens, (lane + WARP) % tokens}, escaped = 0;
    u32 now = part.coding[0] & 255;
    bool bad = false;
    for (u32 i = 0; i < total; i += CELL) {
        const u32 active = total - i < CELL ? total - i : CELL;
        // The next step's table is asked for before this step, which does not wait for it.
        head += down, head_token += along;
        if (head_token >= tokens) head++, head_token -= tokens;
        const u32 next = part.coding[head < part.components ? head : 0] & 255;
        u32 symbols[2];
        reader.step(tables[now], active, symbols);
        now = next;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const bool on = lane + WARP * h < active, escape = on && symbols[h] == (u32)ESCAPE;
            const u32 escapes = __ballot_sync(EVERYONE, escape);
            if (on) {
                u16 *const number = room.numbers + t[h] * room.stride + c[h];
                const u32 coding = part.coding[c[h]], shift = coding >> 8 & 255;
                i32 value = (i32)symbols[h] - CENTRE;
                if (escape) {
                    const u32 rank = escaped + __popc(escapes & lanes_below());
                    value = rank < part.escapes ? (i16)load16(listed + 2 * rank) : 0;
                } else if (c[h] < part.based) {
                    const i32 coarse = (i16)(u16)(*number - 128), change = value + CENTRE - 1;
                    bad |= change > 1;
                    value = 3 * coarse + (coarse < 0 ? -change : change);
                } else if (shift) {
                    const u8 *bits = low + row * (coding >> 16) + t[h] / 8;
                    u32 rest = 0;
                    for (u32 k = 0; k < shift; k++) rest |= (bits[row * k] >> t[h] % 8 & 1u) << k;
                    value = value * (1 << shift) + (i32)rest - (1 << (shift - 1));
                }
                bad |= value > LIMIT || value < -LIMIT;
                *number = (u16)(value + 128);
                if ((u32)(value + 128) > 255) wide |= 1u << c[h] / TILE;
            }
            escaped += __popc(escapes);
            c[h] += down, t[h] += along;
            if (t[h] >= tokens) c[h]++, t[h] -= tokens;
        }
    }
    codes[0] = reader.x[0] & 0xffff, codes[1] = reader.x[1] & 0xffff;
    // Lanes without a token, and those of a refinement, carry nothing.
    bad |= ((lane >= tokens || part.based) && codes[0]) || ((lane + WARP >= tokens || part.based) && codes[1]);
    return reader.end() && escaped == part.escapes && !__any_sync(EVERYONE, bad);
}

// Sums of 32 tokens with a block of 32 channels over one tile of components.
__device__ __forceinline__ void multiply(u32 (&low)[2][4][4], u32 (&high)[2][4][4], const u16 *numbers, u32 stride,
                                         const Quad *basis, bool fine, bool upper) {
    const u32 group = lane_number() / 4, part = lane_number() % 4;
    u32 a[2][4];
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u16 *const four = numbers + (16 * m + group + 8 * (i % 2)) * stride + 4 * part + 16 * (i / 2);
            const Pair both = *(const Pair *)four;
            a[m][i] = upper ? __byte_perm(both.at[0], both.at[1], 0x7531)
                            : __byte_perm(both.at[0], both.at[1], 0x6420) ^ 0x80808080;
        }
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        const Quad b = basis[WARP * n + lane_number()];
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            multiply_add(high[m][n], a[m], b.at[2], b.at[3]);
            if (fine) multiply_add(low[m][n], a[m], b.at[0], b.at[1]);
        }
    }
}

// Eight channels of one token: sums to values, and into memory.
__device__ __forceinline__ void put(const u32 (&sums)[4][2], const KltPlane &plane, const Run &run, float factor, i64 place,
                                    u32 token, const float *mean, const float *gain) {
    float x[4][2];
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const u32 channel = plane.interleaved ? run.channel[n / 2] + 2 * (n % 2) + e : run.channel[e] + n;
            x[n][e] = __fadd_rn(__fmul_rn(__fmul_rn(factor, gain[channel]), __int2float_rn((i32)sums[n][e])), mean[channel]);
        }
    if (run.angle != NONE) {
        const u64 at = (u64)token * plane.angles + run.angle;
        const Floats cosine = *(const Floats *)((const float *)plane.cosine + at);
        const Floats sine = *(const Floats *)((const float *)plane.sine + at);
#pragma unroll
        for (u32 n = 0; n < 4; n++) rotate(x[n][0], x[n][1], cosine.at[n], sine.at[n]);
    }
    u8 *const row = (u8 *)plane.memory + (place + run.head * plane.head_stride) * item_bytes(plane.type);
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        u32 bits[4];
#pragma unroll
        for (u32 n = 0; n < 4; n++) bits[n] = canonical(plane.interleaved ? x[2 * e + n / 2][n % 2] : x[n][e]);
        store_four(row + run.dim[e] * item_bytes(plane.type), plane.type, bits);
    }
}

__device__ void reconstruct(const KltCell &cell, const KltGroup &group, const KltPlane &plane, const u8 *book,
                            const Room &room, u32 wide) {
    const Quad *const basis = (const Quad *)(book + group.basis);
    const Run *const runs = (const Run *)(book + group.runs);
    const float *const mean = (const float *)(book + group.mean), *const gain = (const float *)(book + group.gain);
    for (u32 block = 0; block < group.blocks; block++) {
        const Run run = runs[4 * block + lane_number() % 4];
        for (u32 from = 0; from < cell.tokens; from += 32) {
            const u16 *const numbers = room.numbers + from * room.stride;
            const Quad *const own = basis + (u64)block * group.tiles * 4 * WARP;
            u32 low[2][4][4] = {}, high[2][4][4] = {};
            __syncwarp(); // threads without channels are ahead, and a matrix product needs all
            for (u32 left = wide; left; left &= left - 1) {
                const u32 tile = __popc((left & -left) - 1);
                multiply(low, high, numbers + TILE * tile, room.stride, own + 4 * WARP * tile, !(group.coarse >> tile & 1), true);
            }
#pragma unroll
            for (u32 i = 0; i < 32; i++) low[i / 16][i / 4 % 4][i % 4] <<= 8, high[i / 16][i / 4 % 4][i % 4] <<= 8;
            for (u32 tile = 0; tile < group.tiles; tile++)
                multiply(low, high, numbers + TILE * tile, room.stride, own + 4 * WARP * tile, !(group.coarse >> tile & 1), false);
            if (run.head == NONE) continue;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 m = i / 2, r = 2 * (i % 2), t = from + 16 * m + lane_number() / 4 + 4 * r;
                u32 sums[4][2];
#pragma unroll
                for (u32 n = 0; n < 4; n++)
#pragma unroll
                    for (u32 e = 0; e < 2; e++) sums[n][e] = low[m][n][r + e] + (high[m][n][r + e] << 6);
                if (room.place[t] >= 0) put(sums, plane, run, room.factor[t], room.place[t], cell.first + t, mean, gain);
            }
        }
    }
}

// Tokens that stand raw at the end of the cell, as the engine that wrote them kept them.
__device__ void copy_raw(const KltCell &cell, const KltGroup &group, const KltPlane &plane, const u8 *book, const u8 *rows) {
    const Run *const runs = (const Run *)(book + group.runs);
    const u32 from = item_bytes(plane.raw_type), to = item_bytes(plane.type);
    for (u32 t = 0; t < cell.tokens; t++) {
        if (!(cell.raw >> t & 1)) continue;
        const i64 place = place_of(plane, cell.first + t);
        for (u32 i = lane_number(); i < 8 * group.blocks * 4; i += WARP) {
            const Run run = runs[i / 8];
            if (run.head == NONE) continue;
            const bool second = i / 4 % 2;
            const u32 channel = (second ? run.channel[1] : run.channel[0]) + i % 4;
            const u32 item = load_item(rows + (u64)channel * from, plane.raw_type);
            const i64 dim = (second ? run.dim[1] : run.dim[0]) + i % 4;
            store_item((u8 *)plane.memory + (place + run.head * plane.head_stride + dim) * to,
                       plane.raw_type == plane.type ? item : narrow(widen(item, plane.raw_type), plane.type), plane.type);
        }
        rows += group.channels * from;
    }
}

} // namespace

// book: powers float [32] at its start. shared: known * 384 bytes of tables, then `own` bytes a warp: 1280 and 64 rows of
// (32 * tiles + 16) 16-bit numbers of the group with most tiles.
extern "C" __global__ void __launch_bounds__(256, 1) ctx_klt_decode(const u8 *data, const KltCell *cells, u32 count, const KltPlane *planes,
                                          const KltGroup *groups, const u8 *book, const RansTable *tables, u32 known,
                                          u32 own, u32 *status) {
    CTX_SHARED(memory);
    copy_words(memory, tables, known * (u32)sizeof(RansTable));
    __syncthreads();
    const u32 number = blockIdx.x * (blockDim.x / WARP) + warp_in_block(), lane = lane_number();
    if (number >= count) return;
    const KltCell &cell = cells[number];
    const KltGroup &group = groups[cell.group], &base = groups[cell.base];
    const KltPlane &plane = planes[cell.plane];
    u8 *const mine = memory + known * sizeof(RansTable) + warp_in_block() * own;
    Room room = {(u16 *)mine, (i64 *)(mine + 512), (float *)(mine + 1024), (u16 *)(mine + 1280), TILE * group.tiles + 16};
    for (u32 i = lane; i < CELL * room.stride / 2; i += WARP) ((u32 *)room.numbers)[i] = 0x00800080;
    __syncwarp();

    const RansTable *const at = (const RansTable *)memory;
    u32 wide = 0, codes[2] = {0x8000, 0x8000};
    bool good = true;
    for (u32 p = 0; good && p <= cell.refined; p++) {
        const Part part = p ? Part{data + cell.more, (const u32 *)(book + group.refining), cell.more_bytes,
                                   cell.more_escapes, group.components, base.components}
                            : Part{data + cell.data, (const u32 *)(book + base.coding), cell.bytes, cell.escapes,
                                   base.components, 0};
        u32 found[2];
        good = read_part(part, cell.tokens, at, room, wide, found);
        __syncwarp();
        if (p == 0) codes[0] = found[0], codes[1] = found[1];
    }
    bool paged = true;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 t = lane + WARP * h;
        const bool raw = cell.raw >> t & 1;
        const i64 place = t < cell.tokens ? place_of(plane, cell.first + t) : 0;
        good = good && (t >= cell.tokens || (raw ? codes[h] == 0x8000 : codes[h] >= 0x7800 && codes[h] <= 0x8800));
        paged = paged && place >= 0;
        room.place[t] = t < cell.tokens && !raw ? place : -1;
        room.factor[t] = good ? __fmul_rn(scale_of((i32)codes[h], (const float *)book), group.step) : 0;
    }
    __syncwarp();
    good = __all_sync(EVERYONE, good), paged = __all_sync(EVERYONE, paged);
    if (lane == 0) status[number] = !good ? CORRUPT : paged ? OK : BAD_PAGE;
    if (!good || !paged) return;
    u32 tiles = 0;
    for (u32 tile = 0; tile < group.tiles; tile++) tiles |= __any_sync(EVERYONE, wide >> tile & 1) ? 1u << tile : 0;
    reconstruct(cell, group, plane, book, room, tiles);
    if (cell.raw) {
        const u32 bits = ((const u32 *)(book + base.coding))[base.components] >> 16, row = (cell.tokens + 7) / 8;
        copy_raw(cell, group, plane, book, data + cell.data + cell.bytes + row * bits + 2 * cell.escapes);
    }
}
