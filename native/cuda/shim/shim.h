// shim.h - enough of CUDA to run the kernels' text on a CPU: a fibre a thread, blocks one after the other.
//
// Every thread of a block is a ucontext fibre on one system thread; a collective (barrier, ballot, shuffle, matrix
// product) parks the fibre until all of its warp or block have come. Between collectives fibres run one by one, in turns
// from the first thread and from the last, so a missing barrier shows as a wrong result and not as a race. Shared memory
// is a heap allocation of the launch's size, filled with 0xa5 for each block: a sanitizer sees every byte beyond it. Warps
// are whole, masks full; a warp whose lanes meet in different collectives, or of which a lane never comes, ends the
// process with a message. The order of memory between threads is stronger than a GPU's: barriers that only order it are
// not missed here.
#ifndef CTX_SHIM_H
#define CTX_SHIM_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

enum Kind { SYNC = 1, BALLOT, SHUFFLE, MULTIPLY, MULTIPLY_16 };
struct Slot {
    unsigned char bytes[24];
};

unsigned char *shared_memory();
void block_barrier();
// Leaves `mine` with the warp and returns all 32, valid until the caller's next collective.
const Slot *meet(unsigned mask, Kind kind, const Slot &mine);
void run(unsigned grid, unsigned block, size_t shared, void (*thread)(const void *), const void *argument);

template <class T> Slot pack(const T &value) {
    static_assert(sizeof(T) <= sizeof(Slot), "fits");
    Slot slot{};
    std::memcpy(slot.bytes, &value, sizeof value);
    return slot;
}

template <class T> T unpack(const Slot &slot) {
    T value;
    std::memcpy(&value, slot.bytes, sizeof value);
    return value;
}

// Calls a kernel with arguments as cuLaunchKernel takes them: a pointer to each.
template <class... A> struct Call {
    void (*kernel)(A...);
    void *const *arguments;

    template <size_t... I> void with(std::index_sequence<I...>) const {
        kernel(*static_cast<std::remove_reference_t<A> *>(arguments[I])...);
    }
    static void thread(const void *self) { static_cast<const Call *>(self)->with(std::index_sequence_for<A...>{}); }
};

template <class... A>
void launch(void (*kernel)(A...), unsigned grid, unsigned block, size_t shared, void *const *arguments) {
    const Call<A...> call{kernel, arguments};
    run(grid, block, shared, &Call<A...>::thread, &call);
}

} // namespace shim

inline void __syncthreads() { shim::block_barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { shim::meet(mask, shim::SYNC, {}); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const shim::Slot *all = shim::meet(mask, shim::BALLOT, shim::pack(predicate != 0));
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= static_cast<unsigned>(shim::unpack<bool>(all[i])) << i;
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }

template <class T> T __shfl_sync(unsigned mask, T value, int from) {
    return shim::unpack<T>(shim::meet(mask, shim::SHUFFLE, shim::pack(value))[from % 32]);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned order) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __fdividef(float a, float b) { return a / b; }
inline long long __double_as_longlong(double x) { return shim::unpack<long long>(shim::pack(x)); }
inline double __longlong_as_double(long long x) { return shim::unpack<double>(shim::pack(x)); }

template <class T> T atomicAdd(T *at, T by) { return std::exchange(*at, *at + by); }
template <class T> T atomicOr(T *at, T bits) { return std::exchange(*at, *at | bits); }

inline unsigned float_bits(float x) { return shim::unpack<unsigned>(shim::pack(x)); }
inline float bits_float(unsigned x) { return shim::unpack<float>(shim::pack(x)); }

inline unsigned half_of(float x) {
    const unsigned bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return sign | 0x7c00;
    if (magnitude < 0x38800000) return sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000);
    return sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

inline float of_half(unsigned half) {
    const unsigned sign = (half & 0x8000) << 16, magnitude = (half & 0x7fff) << 13;
    if (magnitude >= 0x0f800000) return bits_float(sign | magnitude | 0x7f800000);
    if (magnitude >= 0x00800000) return bits_float(sign | (magnitude + (112u << 23)));
    return bits_float(sign | float_bits(bits_float(magnitude + 0x38800000) - 0x1p-14f));
}

// mma.m16n8k32 of int8 with the fragments of the PTX manual: group = lane / 4, part = lane % 4. a: rows group, group + 8
// and columns 4 part .., 16 + 4 part ..; b: rows as a's columns, column group; d: rows as a's, columns 2 part, 2 part + 1.
template <class A, class B> void multiply_add_8(unsigned (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Fragments {
        unsigned a[4], b[2];
    };
    const shim::Slot *all = shim::meet(~0u, shim::MULTIPLY, shim::pack(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}));
    const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    A left[2][32];
    B right[2][32];
    for (unsigned part = 0; part < 4; part++) {
        const Fragments rows = shim::unpack<Fragments>(all[4 * row + part]);
        for (unsigned i = 0; i < 4; i++) std::memcpy(&left[i % 2][16 * (i / 2) + 4 * part], &rows.a[i], 4);
        for (unsigned e = 0; e < 2; e++) {
            const Fragments columns = shim::unpack<Fragments>(all[4 * (column + e) + part]);
            for (unsigned i = 0; i < 2; i++) std::memcpy(&right[e][16 * i + 4 * part], &columns.b[i], 4);
        }
    }
    for (unsigned i = 0; i < 4; i++) {
        int sum = 0;
        for (unsigned k = 0; k < 32; k++) sum += left[i / 2][k] * right[i % 2][k];
        d[i] += static_cast<unsigned>(sum);
    }
}
#define CTX_MULTIPLY_ADD(name, A, B)                                                                                   \
    inline void name(unsigned (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { multiply_add_8<A, B>(d, a, b0, b1); }
CTX_MULTIPLY_ADD(multiply_add, int8_t, int8_t)
CTX_MULTIPLY_ADD(multiply_add_us, uint8_t, int8_t)
CTX_MULTIPLY_ADD(multiply_add_su, int8_t, uint8_t)
CTX_MULTIPLY_ADD(multiply_add_uu, uint8_t, uint8_t)

// mma.m16n8k16 of 16-bit floats: a: rows group, group + 8 and columns 2 part .., 8 + 2 part ..; b and d as above.
inline void multiply_add_16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float (*widened)(unsigned)) {
    struct Fragments {
        unsigned a[4], b[2];
    };
    const shim::Slot *all = shim::meet(~0u, shim::MULTIPLY_16, shim::pack(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}));
    const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    float left[2][16], right[2][16];
    for (unsigned part = 0; part < 4; part++) {
        const Fragments rows = shim::unpack<Fragments>(all[4 * row + part]);
        for (unsigned i = 0; i < 4; i++)
            for (unsigned h = 0; h < 2; h++) left[i % 2][8 * (i / 2) + 2 * part + h] = widened(rows.a[i] >> 16 * h & 0xffff);
        for (unsigned e = 0; e < 2; e++) {
            const Fragments columns = shim::unpack<Fragments>(all[4 * (column + e) + part]);
            for (unsigned i = 0; i < 4; i++) right[e][8 * (i / 2) + 2 * part + i % 2] = widened(columns.b[i / 2] >> 16 * (i % 2) & 0xffff);
        }
    }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 16; k++) d[i] += left[i / 2][k] * right[i % 2][k];
}
inline float of_bfloat(unsigned bits) { return bits_float(bits << 16); }
inline void multiply_add_halves(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_add_16(d, a, b0, b1, of_half);
}
inline void multiply_add_bfloats(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_add_16(d, a, b0, b1, of_bfloat);
}

// Not for NaN, as half_of.
inline unsigned pack_halves(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline unsigned pack_bfloats(float low, float high) {
    const unsigned a = float_bits(low), b = float_bits(high);
    return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000);
}
inline unsigned subtract_halves(unsigned a, unsigned b) {
    return pack_halves(of_half(a & 0xffff) - of_half(b & 0xffff), of_half(a >> 16) - of_half(b >> 16));
}
inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
    const float low = of_half(a & 0xffff) * of_half(b & 0xffff) + of_half(c & 0xffff);
    return pack_halves(low, of_half(a >> 16) * of_half(b >> 16) + of_half(c >> 16));
}
inline float power_of_two(float x) { return x < -126 ? 0 : std::exp2(x); }

#endif
