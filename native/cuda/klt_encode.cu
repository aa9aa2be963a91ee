// klt_encode.cu - an engine's cache pages to coded planes, in three launches: numbers, streams, bodies.
//
// The sums are those of the CPU: of whole numbers on the tensor cores, in digits of 8 bits; of profiles that have none in
// fp32, channel after channel, product and sum rounded apart. Between the launches the host only adds up sizes.
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

// Sums of |numbers|, with a top bit that stays.
__device__ __forceinline__ u32 add_sizes(u32 a, u32 b) {
    return ((a | b) & 0x80000000) | ((a & 0x7fffffff) + (b & 0x7fffffff));
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

// What a block's threads have in common. z: a cell's vectors; later [components][64] numbers.
struct Desk {
    float inverse[CELL];
    u32 bad[CELL];   // 1: the token must stand raw; 2: it is not there
    u32 sizes[CELL]; // sums of |numbers|
    u32 spare[CELL];
};
static const u32 ACROSS = 68; // floats from channel to channel in shared memory

// 256 threads: vectors of 64 tokens, turned back, less the mean: z[channel][ACROSS].
__device__ __forceinline__ void gather(const KltCell &cell, const KltGroup &group, const KltPlane &plane, const u8 *book, Desk &desk, float *z) {
    const Run *const runs = (const Run *)(book + group.runs);
    const float *const mean = (const float *)(book + group.mean);
    const u32 t = threadIdx.x / 4, item = item_bytes(plane.type);
    const i64 place = t < cell.tokens ? place_of(plane, cell.first + t) : -1;
    if (threadIdx.x % 4 == 0) {
        desk.sizes[t] = 0;
        desk.bad[t] = t < cell.tokens && place < 0 ? 2 : (u32)(cell.raw >> t & 1);
    }
    for (u32 block = 0; block < group.blocks; block++) {
        const Run run = runs[4 * block + threadIdx.x % 4];
        if (run.head == NONE) continue;
        float x[2][4] = {};
        if (place >= 0) {
            const u8 *const row = (const u8 *)plane.memory + (place + run.head * plane.head_stride) * item;
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
                z[channel * ACROSS + t] = t < cell.tokens ? __fsub_rn(x[e][n], mean[channel]) : 0.0f;
            }
    }
}

// The scale of each token: thread t's sums are every fourth channel of token t / 4, in the order that the CPU has.
__device__ __forceinline__ void scale(const KltCell &cell, const KltGroup &group, const u8 *book, Desk &desk, const float *z, u16 *codes) {
    const u32 t = threadIdx.x / 4, part = threadIdx.x % 4;
    float sums[4] = {};
    if (group.unit != 0) { // 16 sums, then by halves
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            for (u32 c = part + 4 * i; c < group.channels; c += 16)
                sums[i] = __fadd_rn(sums[i], __fmul_rn(z[c * ACROSS + t], z[c * ACROSS + t]));
        sums[0] = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(EVERYONE, sums[0], 2));
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(EVERYONE, sums[0], 1));
    } else if (part == 0) {
        for (u32 c = 0; c < group.channels; c++) sums[0] = __fadd_rn(sums[0], __fmul_rn(z[c * ACROSS + t], z[c * ACROSS + t]));
    }
    if (part) return;
    const float energy = sums[0];
    u32 &bad = desk.bad[t];
    i32 code = 0x8000;
    if (!(energy <= 3.4028234663852886e38f)) bad |= 1;
    if (!bad) code = code_of(energy, group.energy, (const double *)(book + 128));
    if (code < 0x8000 - (i32)CODES || code > 0x8000 + (i32)CODES) bad |= 1;
    if (bad) code = 0x8000;
    desk.inverse[t] = scale_of(0x10000 - code, (const float *)book);
    codes[t] = (u16)(t < cell.tokens ? code : 0);
}

// A sum to a number; 0 where the token cannot be coded.
__device__ __forceinline__ i32 number_of(float sum, float quantum, u32 &size, u32 &bad) {
    const float scaled = rintf(__fmul_rn(sum, quantum));
    const bool fits = scaled >= -(float)LIMIT && scaled <= (float)LIMIT;
    const i32 q = fits ? (i32)scaled : 0;
    bad |= !fits, size += (u32)(q < 0 ? -q : q);
    return q;
}

// Sums of floats, in the order of the channels: four tokens and four components a thread.
__device__ __forceinline__ void multiply_floats(const KltGroup &group, const u8 *book, Desk &desk, const float *z, i16 *out) {
    const u32 quad = threadIdx.x % 16, wide = TILE * group.tiles;
    const float *const forward = (const float *)(book + group.forward);
    for (u32 c = threadIdx.x / 16 * 4; c < group.components; c += 64) {
        float y[4][4] = {};
        for (u32 d = 0; d < group.channels; d++) {
            const Floats f = *(const Floats *)(forward + (u64)d * wide + c);
            const Floats of = *(const Floats *)(z + d * ACROSS + 4 * quad);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 k = 0; k < 4; k++) y[i][k] = __fadd_rn(y[i][k], __fmul_rn(f.at[i], of.at[k]));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (c + i >= group.components) break;
            u32 item[4];
            const float quantum = ((const float *)(book + group.quanta))[c + i];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                u32 size = 0, bad = 0;
                item[k] = (u32)number_of(y[i][k], quantum, size, bad) & 0xffff;
                if (bad) atomicOr(&desk.bad[4 * quad + k], 1u);
                atomicAdd(&desk.sizes[4 * quad + k], size);
            }
            *(Pair *)(out + (c + i) * CELL + 4 * quad) = {{item[0] | item[1] << 16, item[2] | item[3] << 16}};
        }
    }
}

// Vectors as whole numbers in two digits, 256 * high + low, low without a sign: bytes [low, high][64 tokens][stride].
__device__ __forceinline__ void part(const KltGroup &group, const Desk &desk, const float *z, u8 *digits, u32 stride) {
    for (u32 i = threadIdx.x; i < CELL * 8 * ((group.channels + TILE - 1) / TILE); i += 256) {
        const u32 quad = i / 8 / CELL * 8 + i % 8, t = i / 8 % CELL;
        if (4 * quad >= group.channels) continue;
        const float factor = __fmul_rn(desk.inverse[t], group.unit);
        u32 whole[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) whole[k] = (u32)(i32)whole_of(z[(4 * quad + k) * ACROSS + t], factor);
#pragma unroll
        for (u32 d = 0; d < 2; d++)
            *(u32 *)(digits + (CELL * d + t) * stride + 4 * quad) =
                __byte_perm(__byte_perm(whole[0], whole[1], d ? 0x0051 : 0x0040), __byte_perm(whole[2], whole[3], d ? 0x0051 : 0x0040), 0x5410);
    }
}

// Sums of whole numbers, exact but for what 32 bits lose: a warp has 32 tokens and every fourth eight components.
__device__ __forceinline__ void multiply_wholes(const KltGroup &group, const u8 *book, Desk &desk, const u8 *digits, u32 stride, i16 *out) {
    const u32 lane = lane_number(), from = warp_in_block() % 2 * 32, steps = (group.channels + TILE - 1) / TILE;
    const u8 *const low = digits + from * stride, *const high = low + CELL * stride;
    u32 size[2][2] = {}, bad[2][2] = {};
    for (u32 c = warp_in_block() / 2 * 8; c < group.components; c += 32) {
        u32 sums[3][2][4] = {}; // by weight: 1, 2^8, 2^16
        const u8 *const basis = book + group.forward + (u64)(c / 8 * steps) * WARP * sizeof(Quad) + lane * sizeof(Quad);
        for (u32 step = 0; step < steps; step++) {
            const Quad b = load_quad(basis + step * WARP * sizeof(Quad));
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                u32 a[2][4];
                load_rows(a[0], low + 16 * m * stride + TILE * step, stride);
                load_rows(a[1], high + 16 * m * stride + TILE * step, stride);
                multiply_add_uu(sums[0][m], a[0], b.at[0], b.at[1]);
                multiply_add_us(sums[1][m], a[0], b.at[2], b.at[3]);
                multiply_add_su(sums[1][m], a[1], b.at[0], b.at[1]);
                multiply_add(sums[2][m], a[1], b.at[2], b.at[3]);
            }
        }
        const u32 own = c + lane % 4 * 2;
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            if (own + e >= group.components) break;
            const float quantum = ((const float *)(book + group.quanta))[own + e];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 m = i / 2, r = i % 2, at = 2 * r + e;
                const i32 sum = (i32)(sums[0][m][at] + (sums[1][m][at] << 8) + (sums[2][m][at] << 16));
                const i32 q = number_of(__int2float_rn(sum), quantum, size[m][r], bad[m][r]);
                out[(own + e) * CELL + from + 16 * m + 8 * r + lane / 4] = (i16)q;
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 all = size[i / 2][i % 2] | bad[i / 2][i % 2] << 31;
        all = add_sizes(all, __shfl_xor_sync(EVERYONE, all, 1)), all = add_sizes(all, __shfl_xor_sync(EVERYONE, all, 2));
        const u32 t = from + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
        if (lane % 4 == 0) atomicAdd(&desk.sizes[t], all & 0x7fffffff);
        if (lane % 4 == 0 && all >> 31) atomicOr(&desk.bad[t], 1u);
    }
}

// Numbers to memory, those of tokens that cannot be coded as 0; nested ones become a base.
__device__ __forceinline__ void hand_over(const KltCell &cell, const KltGroup &group, Desk &desk, const i16 *from, i16 *out) {
    const u32 t = threadIdx.x % 16 * 4;
    bool none[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) none[k] = desk.bad[t + k] || t + k >= cell.tokens;
    for (u32 c = threadIdx.x / 16; c < group.components; c += 16) {
        const Pair two = *(const Pair *)(from + c * CELL + t);
        u32 item[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const i32 q = (i16)(two.at[k / 2] >> 16 * (k % 2));
            item[k] = none[k] ? 0 : (u32)(group.nested ? third(q) : q) & 0xffff;
        }
        *(Pair *)(out + c * CELL + t) = {{item[0] | item[1] << 16, item[2] | item[3] << 16}};
    }
}

// Numbers of a step of 64 symbols: this thread's two, how each is coded, and the table of the step.
struct Step {
    i32 q[2];
    u32 coding[2], table;
};

__device__ __forceinline__ Step step_of(const i16 *numbers, const u32 *coding, u32 tokens, u32 components, u32 step) {
    const u32 lane = lane_number();
    Step out;
    if (tokens == CELL) {
        out.coding[0] = out.coding[1] = coding[step];
        out.q[0] = numbers[step * CELL + lane], out.q[1] = numbers[step * CELL + lane + WARP];
        out.table = out.coding[0] & 255;
        return out;
    }
    out.table = coding[step * CELL / tokens] & 255;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u32 i = step * CELL + lane + WARP * h, c = i / tokens;
        const bool on = c < components;
        out.coding[h] = on ? coding[c] : 0, out.q[h] = on ? numbers[c * CELL + i % tokens] : 0;
    }
    return out;
}

// All threads of a warp: bytes from a stream to any byte.
__device__ __forceinline__ void copy_bytes(u8 *to, const u8 *from, u32 bytes) {
    const u32 lane = lane_number(), first = (u32)(0 - (u64)to) & 3, head = first < bytes ? first : bytes, fours = (bytes - head) / 4;
    if (lane < head) to[lane] = from[lane];
    to += head, from += head;
#pragma unroll 4
    for (u32 i = lane; i < fours; i += WARP) *(u32 *)(to + 4 * i) = four_of(load_around(from + 4 * i, 3), from);
    const u32 rest = 4 * fours + lane;
    if (rest < bytes - head) to[rest] = from[rest];
}

} // namespace

// One block of 256 threads a cell. numbers: i16 [components][64] at cell.data; codes: u16 [cells][64]; cell.raw: in, tokens
// that must stand raw; out, those that do. book: 16 doubles at byte 128. shared: 1024 bytes, 272 a channel, and of whole
// numbers 128 more a channel and 2048 (channels to multiples of 32).
extern "C" __global__ void __launch_bounds__(256, 2) ctx_klt_quantise(KltCell *cells, const KltPlane *planes,
                                                                   const KltGroup *groups, const u8 *book, i16 *numbers,
                                                                   u16 *codes, u32 *status) {
    CTX_SHARED(memory);
    KltCell &cell = cells[blockIdx.x];
    const KltGroup &group = groups[cell.group];
    const u32 channels = (group.channels + TILE - 1) / TILE * TILE, stride = channels + 16;
    Desk &desk = *(Desk *)memory;
    float *const z = (float *)(memory + sizeof(Desk));
    u8 *const digits = (u8 *)(z + channels * ACROSS);
    i16 *const out = numbers + cell.data, *const made = group.unit != 0 ? (i16 *)z : out;
    u16 *const own = codes + CELL * (u64)blockIdx.x;
    gather(cell, group, planes[cell.plane], book, desk, z);
    __syncthreads();
    scale(cell, group, book, desk, z, own);
    __syncthreads();
    if (group.unit != 0) {
        part(group, desk, z, digits, stride);
        __syncthreads();
        multiply_wholes(group, book, desk, digits, stride, made);
    } else {
        for (u32 i = threadIdx.x; i < group.channels * CELL; i += 256) {
            float &x = z[i / CELL * ACROSS + i % CELL];
            x = __fmul_rn(x, desk.inverse[i % CELL]);
        }
        __syncthreads();
        multiply_floats(group, book, desk, z, made);
    }
    __syncthreads();
    if (threadIdx.x < CELL) {
        const u32 t = threadIdx.x;
        if (desk.sizes[t] >= MOST) desk.bad[t] |= 1;
        if (desk.bad[t] && t < cell.tokens) own[t] = 0x8000;
        const bool here = t < cell.tokens;
        const u32 raw = __ballot_sync(EVERYONE, here && desk.bad[t]), lost = __ballot_sync(EVERYONE, here && desk.bad[t] & 2);
        if (t % WARP == 0) desk.spare[t / WARP] = raw, desk.spare[2 + t / WARP] = lost;
    }
    __syncthreads();
    hand_over(cell, group, desk, made, out);
    if (threadIdx.x == 0) {
        cell.raw = desk.spare[0] | (u64)desk.spare[1] << 32;
        status[blockIdx.x] = desk.spare[2] | desk.spare[3] ? BAD_PAGE : OK;
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
    u32 escapes = 0, step = (total + CELL - 1) / CELL;
    Step next = {};
    if (step) next = step_of(of, coding, cell.tokens, group.components, step - 1);
    while (step-- > 0) {
        const u32 active = total - step * CELL < CELL ? total - step * CELL : CELL;
        const Step now = next;
        if (step) next = step_of(of, coding, cell.tokens, group.components, step - 1); // which no step waits for
        const RansCode &code = own[now.table];
        u32 symbols[2] = {0, 0}, low;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const bool on = lane + WARP * h < active;
            if (on) symbols[h] = symbol_of(now.q[h], now.coding[h], code, low);
            escapes += __popc(__ballot_sync(EVERYONE, on && symbols[h] == (u32)ESCAPE));
        }
        writer.step(code, active, symbols);
    }
    const u32 first = writer.end();
    if (lane == 0) cell.bytes = total ? 2 * (words - first) : 0, cell.escapes = escapes;
}

// One warp a cell: its body to `out` at places[cell]. shared: known * 256 bytes.
extern "C" __global__ void ctx_klt_pack(const KltCell *cells, u32 count, const KltPlane *planes, const KltGroup *groups,
                                        const u8 *book, const RansCode *codes, u32 known, const i16 *numbers, const u16 *rooms,
                                        const u64 *places, u8 *out) {
    CTX_SHARED(memory);
    RansCode *const own = (RansCode *)memory;
    copy_words(own, codes, known * (u32)sizeof(RansCode));
    __syncthreads();
    const u32 number = blockIdx.x * (blockDim.x / WARP) + warp_in_block(), lane = lane_number();
    if (number >= count) return;
    const KltCell &cell = cells[number];
    const KltGroup &group = groups[cell.group];
    const KltPlane &plane = planes[cell.plane];
    const u32 *const coding = (const u32 *)(book + group.coding);
    const i16 *const of = numbers + cell.data;
    u8 *body = out + places[number];
    copy_bytes(body, (const u8 *)(rooms + cell.more + 128 + 32 * group.components) - cell.bytes, cell.bytes);
    body += cell.bytes;

    const u32 tokens = cell.tokens, escapes = cell.escapes, row = (tokens + 7) / 8, total = group.components * tokens;
    u8 *const listed = body + row * (coding[group.components] >> 16);
    for (u32 step = 0, escaped = 0; step * CELL < total && escaped < escapes; step++) {
        const Step now = step_of(of, coding, tokens, group.components, step);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 low;
            const bool on = step * CELL + lane + WARP * h < total;
            const bool escape = on && symbol_of(now.q[h], now.coding[h], own[now.table], low) == (u32)ESCAPE;
            const u32 all = __ballot_sync(EVERYONE, escape);
            if (escape) {
                u8 *const at = listed + 2 * (escaped + __popc(all & lanes_below()));
                at[0] = (u8)now.q[h], at[1] = (u8)(now.q[h] >> 8);
            }
            escaped += __popc(all);
        }
    }
    // Low bits, component by component: the table in force may be that of the component before.
    for (u32 c = 0; c < group.components; c++) {
        const u32 shift = coding[c] >> 8 & 255;
        u32 low[2] = {0, 0};
        if (!shift) continue;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 t = lane + WARP * h, at = tokens == CELL ? c : (c * tokens + t) / CELL * CELL / tokens;
            if (t < tokens) symbol_of(of[c * CELL + t], coding[c], own[coding[at] & 255], low[h]);
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
