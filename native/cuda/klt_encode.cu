// klt_encode.cu - an engine's cache pages to coded planes, in three launches: numbers, streams, bodies.
//
// The sums are those of the CPU: fp32, channel after channel, product and sum rounded apart. Between the launches the host
// only adds up sizes.
#include "klt.cuh"

namespace {

static const u32 CODES = 2048, MOST = 1u << 18; // scale codes from 0x8000; sum of a token's |numbers|

// The scale code of a token: 0x8000 + 32 log2 of its RMS over the usual one, rounded; half steps are doubles.
__device__ i32 code_of(float energy, double factor, const double *halves) {
    const double v = __dmul_rn((double)energy, factor);
    if (v == 0) return 0x8000;
    const u64 bits = (u64)__double_as_longlong(v);
    const double mantissa = __longlong_as_double((i64)((bits & 0xfffffffffffffull) | 1022ull << 52));
    i32 code = 0x8000 + 16 * ((i32)(bits >> 52) - 1022) - 16;
    for (u32 i = 0; i < 16; i++) code += halves[i] <= mantissa;
    return code;
}

// A value times a factor as a whole number of 16 bits; those of a token that cannot be coded are thrown away.
__device__ __forceinline__ float whole_of(float value, float factor) {
    const float scaled = __fmul_rn(value, factor);
    return rintf(scaled > -32767.0f ? (scaled < 32767.0f ? scaled : 32767.0f) : -32767.0f);
}

__device__ __forceinline__ i32 third(i32 q) { // floor((q + 1) / 3)
    const i32 up = q + 1 + 3 * 32768;
    return up / 3 - 32768;
}

// The symbol of a number, and the low bits that it leaves.
__device__ __forceinline__ u32 symbol_of(i32 q, u32 coding, const RansCode &code, u32 &low) {
    const u32 shift = coding >> 8 & 255, half = (1u << shift) >> 1;
    const i32 high = (q + (i32)half) >> shift;
    const u32 symbol = (u32)(high + CENTRE);
    const bool known = symbol < (u32)ESCAPE && code.span[symbol & 31] != 0;
    low = known ? (u32)(q + (i32)half) & ((1u << shift) - 1) : 0;
    return known ? symbol : (u32)ESCAPE;
}

// Walks a cell's symbols in steps of 64, in either direction: component and token of this thread's two, and of the first.
struct Walk {
    u32 tokens, head, c[2], t[2];

    __device__ void seek(u32 step) {
        const u32 i = CELL * step, lane = lane_number();
        head = i / tokens;
        c[0] = (i + lane) / tokens, t[0] = (i + lane) % tokens;
        c[1] = (i + lane + WARP) / tokens, t[1] = (i + lane + WARP) % tokens;
    }
};

} // namespace

// One block of 128 threads a cell. numbers: i16 [components][64] at cell.data; codes: u16 [cells][64]; cell.raw: in, tokens
// that must stand raw; out, those that do. book: 16 doubles at byte 128. shared: channels * 256 + 1024 bytes.
extern "C" __global__ void __launch_bounds__(128) ctx_klt_quantise(KltCell *cells, const KltPlane *planes,
                                                                   const KltGroup *groups, const u8 *book, i16 *numbers,
                                                                   u16 *codes, u32 *status) {
    CTX_SHARED(memory);
    KltCell &cell = cells[blockIdx.x];
    const KltGroup &group = groups[cell.group];
    const KltPlane &plane = planes[cell.plane];
    float *const inverse = (float *)memory;      // [64]
    u32 *const bad = (u32 *)(memory + 256);      // [64]
    u32 *const sizes = (u32 *)(memory + 512);    // [64]
    float *const z = (float *)(memory + 1024);   // [channels][64]
    const Run *const runs = (const Run *)(book + group.runs);
    const float *const mean = (const float *)(book + group.mean);
    const u32 tokens = cell.tokens;

    if (threadIdx.x < CELL) {
        const u32 t = threadIdx.x;
        sizes[t] = 0;
        bad[t] = t < tokens && place_of(plane, cell.first + t) < 0 ? 2 : (u32)(cell.raw >> t & 1);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 4 * group.blocks * CELL; i += blockDim.x) {
        const Run run = runs[i / CELL];
        const u32 t = i % CELL;
        if (run.head == NONE) continue;
        float x[2][4] = {};
        if (t < tokens && bad[t] != 2) {
            const u32 item = item_bytes(plane.type);
            const u8 *const row = (const u8 *)plane.memory
                                  + (place_of(plane, cell.first + t) + run.head * plane.head_stride) * item;
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                u32 bits[4];
                load_four(row + run.dim[e] * item, plane.type, bits);
#pragma unroll
                for (u32 n = 0; n < 4; n++) x[e][n] = bits_float(bits[n]);
            }
            if (run.angle != NONE) {
                const u64 at = (u64)(cell.first + t) * plane.angles + run.angle;
                const Floats cosine = *(const Floats *)((const float *)plane.cosine + at);
                const Floats sine = *(const Floats *)((const float *)plane.sine + at);
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
                    float &one = plane.interleaved ? x[n / 2][2 * (n % 2)] : x[0][n];
                    float &two = plane.interleaved ? x[n / 2][2 * (n % 2) + 1] : x[1][n];
                    rotate(one, two, cosine.at[n], sine.at[n]);
                }
            }
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                const u32 channel = run.channel[e] + n;
                z[channel * CELL + t] = t < tokens ? __fsub_rn(x[e][n], mean[channel]) : 0.0f;
            }
    }
    __syncthreads();
    if (threadIdx.x < CELL) {
        const u32 t = threadIdx.x;
        float sums[16] = {};
        const u32 ways = group.unit != 0 ? 16 : 1; // whole numbers: 16 sums, then by halves
        for (u32 c = 0; c < group.channels; c++)
            sums[c % ways] = __fadd_rn(sums[c % ways], __fmul_rn(z[c * CELL + t], z[c * CELL + t]));
        for (u32 half = ways / 2; half; half /= 2)
            for (u32 i = 0; i < half; i++) sums[i] = __fadd_rn(sums[i], sums[i + half]);
        const float energy = sums[0];
        i32 code = 0x8000;
        if (!(energy <= 3.4028234663852886e38f)) bad[t] |= 1;
        if (!bad[t]) code = code_of(energy, group.energy, (const double *)(book + 128));
        if (code < 0x8000 - (i32)CODES || code > 0x8000 + (i32)CODES) bad[t] |= 1;
        if (bad[t]) code = 0x8000;
        inverse[t] = scale_of(0x10000 - code, (const float *)book);
        codes[CELL * (u64)blockIdx.x + t] = (u16)(t < tokens ? code : 0);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < group.channels * CELL; i += blockDim.x)
        z[i] = group.unit != 0 ? whole_of(z[i], __fmul_rn(inverse[i % CELL], group.unit)) : __fmul_rn(z[i], inverse[i % CELL]);
    __syncthreads();

    // Four tokens and four components a thread.
    const u32 quad = threadIdx.x % 16, wide = TILE * group.tiles;
    const float *const forward = (const float *)(book + group.forward);
    i16 *const out = numbers + cell.data;
    for (u32 c = threadIdx.x / 16 * 4; c < group.components; c += 32) {
        float y[4][4] = {};
        i32 sums[4][4] = {};
        for (u32 d = 0; d < group.channels; d++) {
            const Floats f = *(const Floats *)(forward + (u64)d * wide + c);
            const Floats of = *(const Floats *)(z + d * CELL + 4 * quad);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 k = 0; k < 4; k++)
                    if (group.unit != 0)
                        sums[i][k] = (i32)((u32)sums[i][k] + (u32)((i32)f.at[i] * (i32)of.at[k]));
                    else
                        y[i][k] = __fadd_rn(y[i][k], __fmul_rn(f.at[i], of.at[k]));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (c + i >= group.components) break;
            u32 item[4];
            const float quantum = ((const float *)(book + group.quanta))[c + i];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const float scaled = rintf(__fmul_rn(group.unit != 0 ? (float)sums[i][k] : y[i][k], quantum));
                const bool fits = scaled >= -(float)LIMIT && scaled <= (float)LIMIT;
                const i32 q = fits ? (i32)scaled : 0;
                if (!fits) atomicOr(&bad[4 * quad + k], 1u);
                atomicAdd(&sizes[4 * quad + k], (u32)(q < 0 ? -q : q));
                item[k] = (u32)q & 0xffff;
            }
            *(Pair *)(out + (c + i) * CELL + 4 * quad) = {{item[0] | item[1] << 16, item[2] | item[3] << 16}};
        }
    }
    __syncthreads();
    if (threadIdx.x < CELL) {
        const u32 t = threadIdx.x;
        if (sizes[t] >= MOST) bad[t] |= 1;
        if (bad[t] && t < tokens) codes[CELL * (u64)blockIdx.x + t] = 0x8000;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < group.components * CELL; i += blockDim.x) {
        const bool out_of = bad[i % CELL] || i % CELL >= tokens;
        if (out_of || group.nested) out[i] = (i16)(out_of ? 0 : third(out[i]));
    }
    if (threadIdx.x == 0) {
        u64 raw = 0;
        u32 lost = 0;
        for (u32 t = 0; t < tokens; t++) raw |= (u64)(bad[t] != 0) << t, lost |= bad[t] & 2;
        cell.raw = raw;
        status[blockIdx.x] = lost ? BAD_PAGE : OK;
    }
}

// One warp a cell. rooms: words at cell.more, 128 + 32 * components of them; the stream lies at their end: cell.bytes says
// how long it is, cell.escapes how many values stand apart. shared: known * 256 bytes.
extern "C" __global__ void ctx_klt_code(KltCell *cells, u32 count, const KltGroup *groups, const u8 *book,
                                        const RansCode *codes, u32 known, const i16 *numbers, const u16 *seeds, u16 *rooms) {
    CTX_SHARED(memory);
    RansCode *const own = (RansCode *)memory;
    copy_words(own, codes, known * (u32)sizeof(RansCode));
    __syncthreads();
    const u32 number = blockIdx.x * (blockDim.x / WARP) + warp_in_block(), lane = lane_number();
    if (number >= count) return;
    KltCell &cell = cells[number];
    const KltGroup &group = groups[cell.group];
    const u32 *const coding = (const u32 *)(book + group.coding);
    const i16 *const of = numbers + cell.data;
    const u32 words = 128 + 32 * group.components, total = group.components * cell.tokens;
    RansWriter writer;
    writer.begin(rooms + cell.more, words, seeds[CELL * (u64)number + lane], seeds[CELL * (u64)number + lane + WARP]);
    Walk walk = {cell.tokens, 0, {}, {}};
    u32 escapes = 0;
    for (u32 step = (total + CELL - 1) / CELL; step-- > 0;) {
        const u32 active = total - step * CELL < CELL ? total - step * CELL : CELL;
        walk.seek(step);
        const RansCode &code = own[coding[walk.head] & 255];
        u32 symbols[2] = {0, 0}, low;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const bool on = lane + WARP * h < active;
            if (on) symbols[h] = symbol_of(of[walk.c[h] * CELL + walk.t[h]], coding[walk.c[h]], code, low);
            escapes += __popc(__ballot_sync(EVERYONE, on && symbols[h] == (u32)ESCAPE));
        }
        writer.step(code, active, symbols);
    }
    const u32 first = writer.end();
    if (lane == 0) cell.bytes = total ? 2 * (words - first) : 0, cell.escapes = escapes;
}

// One warp a cell: its body to `out` at places[cell].
extern "C" __global__ void ctx_klt_pack(const KltCell *cells, u32 count, const KltPlane *planes, const KltGroup *groups,
                                        const u8 *book, const RansCode *codes, const i16 *numbers, const u16 *rooms,
                                        const u64 *places, u8 *out) {
    const u32 number = blockIdx.x * (blockDim.x / WARP) + warp_in_block(), lane = lane_number();
    if (number >= count) return;
    const KltCell &cell = cells[number];
    const KltGroup &group = groups[cell.group];
    const KltPlane &plane = planes[cell.plane];
    const u32 *const coding = (const u32 *)(book + group.coding);
    const i16 *const of = numbers + cell.data;
    const u8 *const stream = (const u8 *)(rooms + cell.more + 128 + 32 * group.components) - cell.bytes;
    u8 *body = out + places[number];
    for (u32 i = lane; i < cell.bytes; i += WARP) body[i] = stream[i];
    body += cell.bytes;

    const u32 row = (cell.tokens + 7) / 8, total = group.components * cell.tokens;
    u8 *const listed = body + row * (coding[group.components] >> 16);
    Walk walk = {cell.tokens, 0, {}, {}};
    u32 escaped = 0;
    for (u32 step = 0; step * CELL < total; step++) {
        const u32 active = total - step * CELL < CELL ? total - step * CELL : CELL;
        walk.seek(step);
        const RansCode &code = codes[coding[walk.head] & 255];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const bool on = lane + WARP * h < active;
            const i32 q = on ? of[walk.c[h] * CELL + walk.t[h]] : 0;
            u32 low;
            const bool escape = on && symbol_of(q, coding[walk.c[h]], code, low) == (u32)ESCAPE;
            const u32 escapes = __ballot_sync(EVERYONE, escape);
            if (escape) {
                u8 *const at = listed + 2 * (escaped + __popc(escapes & lanes_below()));
                at[0] = (u8)q, at[1] = (u8)(q >> 8);
            }
            escaped += __popc(escapes);
        }
    }
    // Low bits, component by component: the table in force may be that of the component before.
    for (u32 c = 0; c < group.components; c++) {
        const u32 shift = coding[c] >> 8 & 255;
        u32 low[2] = {0, 0};
        if (!shift) continue;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 t = lane + WARP * h, step = (c * cell.tokens + t) / CELL;
            if (t < cell.tokens)
                symbol_of(of[c * CELL + t], coding[c], codes[coding[step * CELL / cell.tokens] & 255], low[h]);
        }
        for (u32 bit = 0; bit < shift; bit++) {
            const u32 first = __ballot_sync(EVERYONE, low[0] >> bit & 1), second = __ballot_sync(EVERYONE, low[1] >> bit & 1);
            if (lane < row) body[row * ((coding[c] >> 16) + bit) + lane] = (u8)((lane < 4 ? first : second) >> 8 * (lane % 4));
        }
    }
    u8 *rows = listed + 2 * cell.escapes;
    const Run *const runs = (const Run *)(book + group.runs);
    const u32 item = item_bytes(plane.type), size = item_bytes(plane.raw_type);
    for (u32 t = 0; t < cell.tokens; t++) {
        if (!(cell.raw >> t & 1)) continue;
        const i64 place = place_of(plane, cell.first + t);
        for (u32 i = lane; i < 8 * group.blocks * 4; i += WARP) {
            const Run run = runs[i / 8];
            if (run.head == NONE) continue;
            const bool second = i / 4 % 2;
            const u32 channel = (second ? run.channel[1] : run.channel[0]) + i % 4;
            const i64 dim = (second ? run.dim[1] : run.dim[0]) + i % 4;
            const u8 *const from = (const u8 *)plane.memory + (place + run.head * plane.head_stride + dim) * item;
            u32 value = load_item(from, plane.type);
            if (plane.raw_type != plane.type) value = narrow(widen(value, plane.type), plane.raw_type);
            for (u32 byte = 0; byte < size; byte++) rows[(u64)channel * size + byte] = (u8)(value >> 8 * byte);
        }
        rows += (u64)group.channels * size;
    }
}
