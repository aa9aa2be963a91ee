// klt_decode.cu - coded planes straight into an engine's cache pages, one warp a cell of 64 tokens.
//
// The warp decodes its symbols into shared memory as numbers of two 8-bit digits, multiplies them by the basis on the
// tensor cores (it has two digits too; the 32-bit sums are exact), adds the mean, rotates keys and stores. A cell that is
// corrupt writes nothing. Blocks stay: each warp takes the next cell when it is done with one.
#include "klt.cuh"

namespace {

// A warp's own shared memory. A number is 256 * high + low, both signed: bytes [64 tokens][stride] of low digits, then as
// many of high ones, which are there only for tiles whose bit in `wide` is set.
struct Room {
    u16 *ring;
    i64 *place; // in bytes of the plane's memory; -1: nothing is written
    float *factor;
    u8 *low;
    u32 stride, tiles, wide;

    __device__ u8 *high() const { return low + CELL * stride; }

    // All threads: high digits of a tile, all 0.
    __device__ void clear(u32 tile) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            *(Quad *)(high() + (lane_number() + WARP * (i % 2)) * stride + TILE * tile + 16 * (i / 2)) = Quad{};
    }
};

// How far a part of a cell is read, and where its escaped values and low bits lie.
struct Part {
    RansReader reader;
    const u32 *coding;
    const u8 *low, *listed;
    u32 escapes, components, based, tokens;
    u32 escaped;
    bool bad;

    // All threads: the number that a symbol stands for, but for what a base adds. value: the symbol, less 15.
    __device__ __forceinline__ i32 number(i32 value, bool on, u32 of, u32 token) {
        const u32 shift = of >> 8 & 255;
        const bool escape = on && value == ESCAPE - CENTRE;
        const u32 now = __ballot_sync(EVERYONE, escape);
        if (escape) {
            const u32 rank = escaped + __popc(now & lanes_below());
            value = rank < escapes ? (i16)load16(listed + 2 * rank) : 0;
        } else if (on && shift) {
            const u32 row = (tokens + 7) / 8;
            const u8 *const bits = low + row * (of >> 16) + token / 8;
            u32 rest = 0;
#pragma unroll 1
            for (u32 k = 0; k < shift; k++) rest |= (bits[row * k] >> token % 8 & 1u) << k;
            value = value * (1 << shift) + (i32)rest - (1 << (shift - 1));
        }
        escaped += __popc(now);
        return value;
    }

    __device__ __forceinline__ void check(i32 value) { bad |= value > LIMIT || value < -LIMIT; }
};

__device__ __forceinline__ i32 symbol_in(u32 slot) { return (i32)(slot << 8) >> 24; }

// Four components of 64 tokens at a time, of a part without a base. Few fours have an escape or low bits: what these
// need is apart from what all do.
__device__ __forceinline__ void read_fours(Part &part, const RansTable *tables, Room &room) {
    const u32 lane = lane_number();
    const Quad *const codings = (const Quad *)part.coding;
    Quad now = codings[0];
    for (u32 four = 0; four < part.components / 4; four++) {
        // Asked for before these steps, which do not wait for it; there is one more behind the last.
        const Quad next = codings[four + 1 < part.components / 4 ? four + 1 : 0];
        u32 low[2] = {};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 slots[2];
            part.reader.step<true>(tables[now.at[j] & 255], CELL, slots);
#pragma unroll
            for (u32 h = 0; h < 2; h++)
                low[h] = __byte_perm(low[h], slots[h], j == 0 ? 0x3216 : j == 1 ? 0x3260 : j == 2 ? 0x3610 : 0x6210);
        }
        // 16 is an escape; all others are below, or negative.
        const u32 escapes = ((low[0] & ~(low[0] >> 3)) | (low[1] & ~(low[1] >> 3))) & 0x10101010;
        const u32 shifts = (now.at[0] | now.at[1] | now.at[2] | now.at[3]) & 0xff00;
        if (__any_sync(EVERYONE, (escapes | shifts) != 0)) {
            u32 high[2] = {};
#pragma unroll
            for (u32 j = 0; j < 4; j++)
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    const i32 value = part.number((i32)(low[h] << (24 - 8 * j)) >> 24, true, now.at[j], lane + WARP * h);
                    part.check(value);
                    low[h] = (low[h] & ~(255u << 8 * j)) | (value & 255) << 8 * j;
                    high[h] |= ((value + 128) >> 8 & 255) << 8 * j;
                }
            if (__any_sync(EVERYONE, (high[0] | high[1]) != 0)) {
                const u32 tile = four / 8;
                if (!(room.wide >> tile & 1)) room.clear(tile);
                room.wide |= 1u << tile;
                __syncwarp();
#pragma unroll
                for (u32 h = 0; h < 2; h++) *(u32 *)(room.high() + (lane + WARP * h) * room.stride + 4 * four) = high[h];
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) *(u32 *)(room.low + (lane + WARP * h) * room.stride + 4 * four) = low[h];
        now = next;
    }
}

// Components from `first` on, of any number of tokens (64 if there is one before `first`).
__device__ void read_rest(Part &part, const RansTable *tables, Room &room, u32 first) {
    const u32 lane = lane_number(), tokens = part.tokens, total = part.components * tokens;
    const u32 down = CELL / tokens, along = CELL % tokens;
    for (u32 tile = first / TILE; tile < room.tiles; tile++)
        if (!(room.wide >> tile & 1)) room.clear(tile);
    __syncwarp();
    // Component and token of the step's first symbol and of this thread's two.
    u32 head = first, head_token = 0, c[2] = {first + lane / tokens, first + (lane + WARP) / tokens};
    u32 t[2] = {lane % tokens, (lane + WARP) % tokens}, wide = 0;
    u32 now = first < part.components ? part.coding[first] & 255 : 0;
    for (u32 i = first * tokens; i < total; i += CELL) {
        const u32 active = total - i < CELL ? total - i : CELL;
        // The next step's table is asked for before this step, which does not wait for it.
        head += down, head_token += along;
        if (head_token >= tokens) head++, head_token -= tokens;
        const u32 next = part.coding[head < part.components ? head : 0] & 255;
        u32 slots[2];
        part.reader.step<false>(tables[now], active, slots);
        now = next;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const bool on = lane + WARP * h < active, own = c[h] < part.based;
            const u32 at = t[h] * room.stride + c[h];
            i32 value = symbol_in(slots[h]);
            const bool escape = value == ESCAPE - CENTRE;
            value = part.number(value, on, on && !own ? part.coding[c[h]] : 0, t[h]);
            if (on && own && !escape) {
                const i32 coarse = (i8)room.low[at] + 256 * (i8)room.high()[at], change = value + CENTRE - 1;
                part.bad |= change > 1;
                value = 3 * coarse + (coarse < 0 ? -change : change);
            }
            if (on) {
                part.check(value);
                const u32 high = (u32)(value + 128) >> 8 & 255;
                room.low[at] = (u8)value, room.high()[at] = (u8)high;
                if (high) wide |= 1u << c[h] / TILE;
            }
            c[h] += down, t[h] += along;
            if (t[h] >= tokens) c[h]++, t[h] -= tokens;
        }
    }
    for (u32 tile = first / TILE; tile < room.tiles; tile++)
        room.wide |= __any_sync(EVERYONE, wide >> tile & 1) ? 1u << tile : 0;
}

// One part of a cell into `room`. Codes: of this thread's lanes.
__device__ __forceinline__ bool read_part(Part &part, const u8 *body, u32 bytes, const RansTable *tables, Room &room, u32 (&codes)[2]) {
    codes[0] = codes[1] = 0x8000;
    if (part.components == 0) return bytes == 0 && part.escapes == 0;
    if (!part.reader.begin(body, bytes, room.ring)) return false;
    part.low = body + bytes, part.listed = part.low + (part.tokens + 7) / 8 * (part.coding[part.components] >> 16);
    part.escaped = 0, part.bad = false;
    const u32 fours = part.tokens == CELL && part.based == 0 ? part.components / 4 : 0;
    if (fours) read_fours(part, tables, room);
    if (4 * fours < part.components) read_rest(part, tables, room, 4 * fours);
    const u32 lane = lane_number();
    codes[0] = part.reader.x[0] & 0xffff, codes[1] = part.reader.x[1] & 0xffff;
    // Lanes without a token, and those of a refinement, carry nothing.
    part.bad |= ((lane >= part.tokens || part.based) && codes[0]) || ((lane + WARP >= part.tokens || part.based) && codes[1]);
    return part.reader.end() && part.escaped == part.escapes && !__any_sync(EVERYONE, part.bad);
}

// Totals of 64 tokens and 32 channels; [16 tokens][8 channels][of a thread].
typedef u32 Totals[4][4][4];

// Adds one digit of the numbers times one of the basis, over the tiles of `which`.
__device__ __forceinline__ void multiply(Totals &sums, const u8 *digits, u32 stride, const u8 *basis, u32 which) {
    for (u32 left = which; left; left &= left - 1) {
        const u32 tile = __popc((left & -left) - 1);
        u32 a[4][4];
#pragma unroll
        for (u32 m = 0; m < 4; m++) load_rows(a[m], digits + 16 * m * stride + TILE * tile, stride);
#pragma unroll
        for (u32 p = 0; p < 2; p++) {
            const Quad b = load_quad(basis + (4 * tile + p) * sizeof(Quad) * WARP);
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                multiply_add(sums[m][2 * p], a[m], b.at[0], b.at[1]);
                multiply_add(sums[m][2 * p + 1], a[m], b.at[2], b.at[3]);
            }
        }
    }
}

__device__ __forceinline__ void raise(Totals &sums, u32 bits) {
#pragma unroll
    for (u32 i = 0; i < 64; i++) sums[i / 16][i / 4 % 4][i % 4] <<= bits;
}

// Eight values of one token into memory, four at each place.
__device__ __forceinline__ void put(const float (&x)[4][2], u32 type, bool interleaved, u8 *one, u8 *two) {
    const float sum = ((x[0][0] + x[0][1]) + (x[1][0] + x[1][1])) + ((x[2][0] + x[2][1]) + (x[3][0] + x[3][1]));
    if (type != FP32 && sum == sum) { // none is NaN
        Pair pairs[2];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float a = interleaved ? x[i][0] : x[i % 2 * 2][i / 2], b = interleaved ? x[i][1] : x[i % 2 * 2 + 1][i / 2];
            pairs[i / 2].at[i % 2] = type == FP16 ? pack_halves(a, b) : pack_bfloats(a, b);
        }
        *(Pair *)one = pairs[0], *(Pair *)two = pairs[1];
    } else {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 bits[4];
#pragma unroll
            for (u32 n = 0; n < 4; n++) bits[n] = canonical(interleaved ? x[2 * e + n / 2][n % 2] : x[n][e]);
            store_four(e ? two : one, type, bits);
        }
    }
}

__device__ __forceinline__ void spread(float (&to)[4][2], const float *of, const Run &run, bool interleaved) {
    const Floats one = *(const Floats *)(of + run.channel[0]), two = *(const Floats *)(of + run.channel[1]);
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        to[n][0] = interleaved ? (n < 2 ? one : two).at[2 * (n % 2)] : one.at[n];
        to[n][1] = interleaved ? (n < 2 ? one : two).at[2 * (n % 2) + 1] : two.at[n];
    }
}

__device__ __forceinline__ void reconstruct(const KltCell &cell, const KltGroup &group, const KltPlane &plane, const u8 *book, const Room &room) {
    const Run *const runs = (const Run *)(book + group.runs);
    const u32 size = item_bytes(plane.type), all = (u32)((1ull << group.tiles) - 1), wide = room.wide, fine = ~group.coarse;
    const u32 first = lane_number() / 4, type = plane.type, angles = plane.angles;
    const bool interleaved = plane.interleaved;
    const u8 *basis = book + group.basis + sizeof(Quad) * lane_number();
    const u32 digit = 2 * sizeof(Quad) * WARP; // from low digits to high ones
    for (u32 block = 0; block < group.blocks; block++, basis += 2 * digit * group.tiles) {
        Totals sums = {};
        __syncwarp(); // threads without channels are ahead, and a matrix product needs all
        if (wide) {
            multiply(sums, room.high(), room.stride, basis + digit, wide);
            raise(sums, 6);
            multiply(sums, room.high(), room.stride, basis, wide & fine);
            raise(sums, 2);
        }
        multiply(sums, room.low, room.stride, basis + digit, all);
        raise(sums, 6);
        multiply(sums, room.low, room.stride, basis, all & fine);
        const Run run = runs[4 * block + lane_number() % 4];
        if (run.head == NONE) continue;
        float mean[4][2], gain[4][2];
        spread(mean, (const float *)(book + group.mean), run, interleaved);
        spread(gain, (const float *)(book + group.gain), run, interleaved);
        const i64 head = run.head * plane.head_stride;
        u8 *const one = (u8 *)plane.memory + (head + run.dim[0]) * size;
        const u32 apart = (u32)(run.dim[1] - run.dim[0]) * size;
        const u32 turn = (cell.first + first) * angles + run.angle;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 m = i / 2, r = 2 * (i % 2), t = first + 8 * i;
            const i64 place = room.place[t];
            if (place < 0) continue;
            const float factor = room.factor[t];
            float x[4][2];
#pragma unroll
            for (u32 n = 0; n < 4; n++)
#pragma unroll
                for (u32 e = 0; e < 2; e++)
                    x[n][e] = __fadd_rn(__fmul_rn(__fmul_rn(factor, gain[n][e]), __int2float_rn((i32)sums[m][n][r + e])), mean[n][e]);
            if (run.angle != NONE) {
                const u64 at = 4 * (u64)(turn + 8 * i * angles);
                const Quad cosine = load_quad((const u8 *)plane.cosine + at), sine = load_quad((const u8 *)plane.sine + at);
#pragma unroll
                for (u32 n = 0; n < 4; n++) rotate(x[n][0], x[n][1], bits_float(cosine.at[n]), bits_float(sine.at[n]));
            }
            put(x, type, interleaved, one + place, one + place + apart);
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

// One cell: how it ended.
__device__ __forceinline__ Status decode(const u8 *data, const KltCell &cell, const KltPlane *planes, const KltGroup *groups, const u8 *book,
                         const RansTable *tables, Room &room) {
    const u32 lane = lane_number();
    const KltGroup &group = groups[cell.group], &base = groups[cell.base];
    const KltPlane &plane = planes[cell.plane];
    room.tiles = group.tiles, room.stride = TILE * group.tiles + 16, room.wide = 0;
    u32 codes[2] = {0x8000, 0x8000};
    bool good = true;
    for (u32 p = 0; good && p <= cell.refined; p++) {
        Part part;
        part.coding = (const u32 *)(book + (p ? group.refining : base.coding)), part.tokens = cell.tokens;
        part.components = p ? group.components : base.components, part.based = p ? base.components : 0;
        part.escapes = p ? cell.more_escapes : cell.escapes;
        u32 found[2];
        good = read_part(part, data + (p ? cell.more : cell.data), p ? cell.more_bytes : cell.bytes, tables, room, found);
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
        room.place[t] = t < cell.tokens && !raw ? place * item_bytes(plane.type) : -1;
        room.factor[t] = good ? __fmul_rn(scale_of((i32)codes[h], (const float *)book), group.step) : 0;
    }
    __syncwarp();
    good = __all_sync(EVERYONE, good), paged = __all_sync(EVERYONE, paged);
    if (!good || !paged) return good ? BAD_PAGE : CORRUPT;
    reconstruct(cell, group, plane, book, room);
    if (cell.raw) {
        const u32 bits = ((const u32 *)(book + base.coding))[base.components] >> 16, row = (cell.tokens + 7) / 8;
        copy_raw(cell, group, plane, book, data + cell.data + cell.bytes + row * bits + 2 * cell.escapes);
    }
    return OK;
}

} // namespace

// book: powers float [32] at its start. shared: known * 1024 bytes of tables, then `own` bytes a warp: 1280 and twice 64
// rows of 32 * tiles + 16 bytes of the group with most tiles. taken: counts cells that warps have asked for, of all
// launches; `before` of those before this one.
extern "C" __global__ void __launch_bounds__(512, 1) ctx_klt_decode(const u8 *data, const KltCell *cells, u32 count, const KltPlane *planes,
                                          const KltGroup *groups, const u8 *book, const RansTable *tables, u32 known,
                                          u32 own, u32 *status, u32 *taken, u32 before) {
    CTX_SHARED(memory);
    copy_words(memory, tables, known * (u32)sizeof(RansTable));
    __syncthreads();
    u8 *const mine = memory + known * sizeof(RansTable) + warp_in_block() * own;
    Room room = {(u16 *)mine, (i64 *)(mine + 512), (float *)(mine + 1024), mine + 1280, 0, 0, 0};
    for (;;) {
        u32 number = 0;
        if (lane_number() == 0) number = atomicAdd(taken, 1u) - before;
        number = __shfl_sync(EVERYONE, number, 0);
        if (number >= count) return;
        const Status how = decode(data, cells[number], planes, groups, book, (const RansTable *)memory, room);
        if (lane_number() == 0) status[number] = how;
        __syncwarp();
    }
}
