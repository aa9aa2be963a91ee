/* core/ctxreuse.h - the native core's whole interface: kernel tables, strided copies, checksums, rotation, pages.
 *
 * The core is C11 without Python. Its global state: the active table, what the processor can do, the tables of lossless
 * packing, made when first used, and the threads of core/pool.h. It keeps no buffer after a call returns.
 * Everything here may be called from any thread at any time.
 *
 * Words
 *   box       a (heads, tokens, dim) array of elements
 *   view      where a box lies: first element, element type, one non-negative stride (in elements) per axis
 *   table     one implementation of every row kernel, compiled for one instruction set
 *
 * Tables
 *   name      needs                          source
 *   avx512    AVX-512 F, BW, DQ, VL, F16C    core/avx512.c
 *   avx2      AVX2, F16C                     core/avx2.c
 *   neon      Advanced SIMD (all aarch64)    core/neon.c
 *   generic   nothing                        core/generic.c   (the reference in tests)
 *
 * Guarantee: every table gives the same bits. Arithmetic is fp32 in a fixed order without contraction into FMA
 * (-ffp-contract=off), narrowing rounds to nearest even, and NaN bits are defined (below).
 *
 * Numbers
 *   - fp32 -> fp16: IEEE binary16; overflow to infinity, subnormals exact, NaN keeps sign and top 10 payload bits, quiet.
 *   - fp32 -> bf16: subnormals kept, NaN keeps sign and top 7 payload bits, quiet.
 *   - fp16 -> fp32: exact; NaN made quiet (what F16C and fcvt do). bf16 -> fp32: exact, NaN bits untouched.
 *   - same type: bytes are copied, whatever they mean.
 *   - rotation: a NaN result is always the positive quiet NaN 0x7fc00000, for instruction sets differ in which one they make.
 *
 * Caveats
 *   - Source and destination that overlap without being the same view give unspecified values (never a fault).
 *   - A thread that switched on flush-to-zero (torch.set_flush_denormal) gets its subnormal products flushed.
 */
#ifndef CTXREUSE_H
#define CTXREUSE_H

#include <stddef.h>
#include <stdint.h>

typedef enum ctx_dtype { CTX_FP32 = 0, CTX_FP16 = 1, CTX_BF16 = 2, CTX_DTYPES = 3 } ctx_dtype;

static inline size_t ctx_dtype_bytes(ctx_dtype dtype) { return dtype == CTX_FP32 ? 4 : 2; }

/* ---- Row kernels: what a table holds. No uint8_t * needs any alignment. ----------------------------------------- */

/* Convert n contiguous elements. dst and src overlap only if they are equal and of the same type. */
typedef void (*ctx_convert_fn)(uint8_t *dst, const uint8_t *src, size_t n);

/* Rotate the first 2*half elements of `rows` rows that lie dst_step and src_step bytes apart:
 *   out1 = x1*cos - x2*sin,  out2 = x2*cos + x1*sin
 * Same view for dst and src is allowed (in place); cos and sin are aligned. Callers pass few rows (4), since
 * each vector of angles is a pass over all of them. */
typedef void (*ctx_rope_fn)(uint8_t *dst, size_t dst_step, const uint8_t *src, size_t src_step, size_t rows,
                            const float *cos, const float *sin, size_t half);

/* dst[j][i] = src[i][j] for i < rows, j < cols; rows of src and of dst are contiguous, `step` bytes apart. */
typedef void (*ctx_transpose_fn)(uint8_t *dst, size_t dst_step, const uint8_t *src, size_t src_step, size_t rows,
                                 size_t cols);

/* Take n stripes of 64 bytes into the accumulators of XXH3; stripe i is mixed with the secret from byte 8*i on:
 *   v = data ^ secret (8 lanes of 64 bits),  acc[i] += low32(v[i]) * high32(v[i]),  acc[i ^ 1] += data[i] */
typedef void (*ctx_stripes_fn)(uint64_t acc[8], const uint8_t *src, const uint8_t *secret, size_t n);

/* The same, and copies the stripes to dst, which is aligned to 64 bytes, past the caches where the machine can. The
 * caller ends a run of such calls with ctx_kernels.fence. */
typedef void (*ctx_copy_stripes_fn)(uint64_t acc[8], uint8_t *dst, const uint8_t *src, const uint8_t *secret, size_t n);

typedef struct ctx_kernels {
    const char *name;
    ctx_convert_fn convert[CTX_DTYPES][CTX_DTYPES];   /* [source type][destination type] */
    ctx_rope_fn rope_half[CTX_DTYPES][CTX_DTYPES];    /* pairs (i, i + half): NeoX, Hugging Face */
    ctx_rope_fn rope_pairs[CTX_DTYPES][CTX_DTYPES];   /* pairs (2i, 2i + 1): GPT-J, llama in GGUF */
    ctx_transpose_fn transpose16, transpose32;        /* 2- and 4-byte elements */
    ctx_stripes_fn stripes;
    ctx_copy_stripes_fn copy_stripes;
    void (*fence)(void);                              /* makes streamed copies visible to other threads */
} ctx_kernels;

/* The i-th of the tables usable on this machine, best first, or NULL behind the last, which is generic. */
const ctx_kernels *ctx_usable(size_t i);

/* The table in use. The first call chooses: the one named by CTXREUSE_KERNELS, else the best usable one. NULL if
 * the variable names no usable table. */
const ctx_kernels *ctx_active(void);

/* Switch to the table `name`; 0, or -1 if it is not usable here. Calls that run already keep their table. */
int ctx_use(const char *name);

/* Every table this library knows on any machine, comma separated, for messages. */
#define CTX_TABLE_NAMES "generic, avx2, avx512, neon"

/* ---- Boxes ------------------------------------------------------------------------------------------------------ */

typedef enum ctx_status { CTX_OK = 0, CTX_OUT_OF_BOUNDS = -1, CTX_ALIASED = -2, CTX_NO_MEMORY = -3 } ctx_status;

typedef struct ctx_view {
    uint8_t *at; /* first element; only read through when the view is a source */
    ctx_dtype dtype;
    size_t strides[3]; /* elements; heads, tokens, dim */
} ctx_view;

/* May a box of `shape` with these strides, starting `offset` bytes into a buffer of `bytes` bytes, be touched?
 * All arguments are hostile: sums and products are checked for overflow. With `distinct`, no two elements may share an
 * address (destinations: otherwise the result would hang on the order of writing). The sufficient test used wants each
 * stride to exceed the reach of all smaller ones, which every layout made by slicing and permuting satisfies. */
ctx_status ctx_view_check(size_t bytes, size_t offset, ctx_dtype dtype, const size_t strides[3], const size_t shape[3],
                          int distinct);

/* Copy a box. Both views must have passed ctx_view_check, dst with `distinct`. */
void ctx_copy3(const ctx_kernels *k, const ctx_view *dst, const ctx_view *src, const size_t shape[3]);

/* XXH3-64 (seed 0) of more than 240 bytes. */
uint64_t ctx_xxh3(const ctx_kernels *k, const uint8_t *at, size_t bytes);

/* Write the planes of consecutive blocks into the box [heads, sum(counts), dim] of `tensor` and compare each one's XXH3-64
 * with sums[i] meanwhile. Plane i is contiguous [heads, counts[i], dim] at planes[i], of 0 or more than 240 bytes.
 * Returns the first plane that differs (it and those before it may have been written), or `blocks`. */
/* Copy `each` spans (byte offset, size of at least 241) of each buffer one behind another; returns the first whose XXH3-64
 * differs, or their number. */
size_t ctx_gather_checked(const ctx_kernels *k, uint8_t *dst, const uint8_t *const *buffers, size_t count,
                          const int64_t (*spans)[2], const uint64_t *sums, size_t each);

size_t ctx_scatter_checked(const ctx_kernels *k, const ctx_view *tensor, uint8_t *const *planes, ctx_dtype plane_dtype,
                           const size_t *counts, const uint64_t *sums, size_t blocks, size_t heads, size_t dim);

/* Rotate every vector of a box by the same angles; elements from 2*half on are copied. cos and sin: `half` floats.
 * Views as for ctx_copy3, or equal (in place); 2*half <= dim. CTX_NO_MEMORY only if dim is strided. */
ctx_status ctx_rope_shift(const ctx_kernels *k, const ctx_view *dst, const ctx_view *src, const size_t shape[3],
                          const float *cos, const float *sin, size_t half, int interleaved);

/* ---- Pages ------------------------------------------------------------------------------------------------------ */

/* Ask for huge pages on the whole 2 MiB pages inside [at, at+bytes) and, with `populate`, fault them in writable.
 * Returns the bytes advised: 0 where there is no such page or no such kernel feature; -1 with errno on failure. */
int64_t ctx_advise_hugepages(void *at, size_t bytes, int populate);

#endif
