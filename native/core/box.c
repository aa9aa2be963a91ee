/* core/box.c - strided (heads, tokens, dim) boxes: bounds, copies between layouts, rotation. */
#include "ctxreuse.h"

#include <stdlib.h>

typedef struct axis {
    size_t n, dst, src; /* length; strides in elements */
} axis;

ctx_status ctx_view_check(size_t bytes, size_t offset, ctx_dtype dtype, const size_t strides[3], const size_t shape[3],
                          int distinct) {
    size_t reach = 0, end;
    if (offset > bytes) return CTX_OUT_OF_BOUNDS;
    if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0) return CTX_OK;
    for (int i = 0; i < 3; i++) {
        size_t span;
        if (__builtin_mul_overflow(shape[i] - 1, strides[i], &span) || __builtin_add_overflow(reach, span, &reach))
            return CTX_OUT_OF_BOUNDS;
    }
    if (__builtin_add_overflow(reach, 1, &end) || __builtin_mul_overflow(end, ctx_dtype_bytes(dtype), &end) ||
        end > bytes - offset)
        return CTX_OUT_OF_BOUNDS;
    if (!distinct) return CTX_OK;
    int order[3] = {0, 1, 2};
    for (int i = 1; i < 3; i++)
        for (int j = i; j > 0 && strides[order[j]] < strides[order[j - 1]]; j--) {
            int held = order[j];
            order[j] = order[j - 1];
            order[j - 1] = held;
        }
    reach = 0;
    for (int i = 0; i < 3; i++) {
        if (shape[order[i]] == 1) continue;
        if (strides[order[i]] <= reach) return CTX_ALIASED;
        reach += (shape[order[i]] - 1) * strides[order[i]];
    }
    return CTX_OK;
}

/* Drop axes of length 1, order the rest by falling destination stride, and merge neighbours that are one axis in both
 * layouts: two contiguous boxes become a single row. Returns the number of axes left. */
static int reduce(axis out[3], const size_t dst[3], const size_t src[3], const size_t shape[3]) {
    int count = 0;
    for (int i = 0; i < 3; i++) {
        if (shape[i] == 1) continue;
        int at = count++;
        for (; at > 0 && out[at - 1].dst < dst[i]; at--) out[at] = out[at - 1];
        out[at] = (axis){shape[i], dst[i], src[i]};
    }
    int kept = 0;
    for (int i = 1; i < count; i++) {
        axis *outer = &out[kept], inner = out[i];
        if (outer->dst == inner.n * inner.dst && outer->src == inner.n * inner.src)
            *outer = (axis){outer->n * inner.n, inner.dst, inner.src};
        else
            out[++kept] = inner;
    }
    return count ? kept + 1 : 0;
}

enum { TILE = 64 };

/* One plane whose contiguous axis differs: `across` is contiguous in the source, `along` in the destination. */
static void transpose_plane(const ctx_kernels *k, uint8_t *dst, ctx_dtype dst_dtype, const uint8_t *src,
                            ctx_dtype src_dtype, axis across, axis along) {
    const size_t dst_bytes = ctx_dtype_bytes(dst_dtype), src_bytes = ctx_dtype_bytes(src_dtype);
    ctx_transpose_fn transpose = dst_bytes == 4 ? k->transpose32 : k->transpose16;
    ctx_convert_fn convert = k->convert[src_dtype][dst_dtype];
    uint8_t scratch[TILE * TILE * 4];
    for (size_t j = 0; j < across.n; j += TILE)
        for (size_t i = 0; i < along.n; i += TILE) {
            size_t rows = along.n - i < TILE ? along.n - i : TILE, cols = across.n - j < TILE ? across.n - j : TILE;
            const uint8_t *from = src + (i * along.src + j) * src_bytes;
            uint8_t *to = dst + (j * across.dst + i) * dst_bytes;
            size_t step = along.src * src_bytes;
            if (src_dtype != dst_dtype) {
                for (size_t r = 0; r < rows; r++) convert(scratch + r * TILE * dst_bytes, from + r * step, cols);
                from = scratch;
                step = TILE * dst_bytes;
            }
            transpose(to, across.dst * dst_bytes, from, step, rows, cols);
        }
}

void ctx_copy3(const ctx_kernels *k, const ctx_view *dst, const ctx_view *src, const size_t shape[3]) {
    if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0) return;
    const size_t dst_bytes = ctx_dtype_bytes(dst->dtype), src_bytes = ctx_dtype_bytes(src->dtype);
    const ctx_convert_fn convert = k->convert[src->dtype][dst->dtype];
    axis found[3], axes[3] = {{1, 0, 0}, {1, 0, 0}, {1, 1, 1}};
    int count = reduce(found, dst->strides, src->strides, shape);
    for (int i = 0; i < count; i++) axes[3 - count + i] = found[i];
    axis inner = axes[2];
    /* Where the layouts disagree on the order of the outer axes (heads and tokens, mostly), the longer one goes outside:
     * reading and writing then follow a few streams each, which prefetchers keep up with (10.3 against 5.6 GB/s). */
    if (axes[0].src < axes[1].src && axes[0].n < axes[1].n) {
        axis held = axes[0];
        axes[0] = axes[1];
        axes[1] = held;
    }

    if (inner.dst == 1 && inner.src != 1)
        for (int i = 0; i < 2; i++)
            if (axes[i].n > 1 && axes[i].src == 1) {
                axis rest = axes[1 - i];
                for (size_t r = 0; r < rest.n; r++)
                    transpose_plane(k, dst->at + r * rest.dst * dst_bytes, dst->dtype,
                                    src->at + r * rest.src * src_bytes, src->dtype, axes[i], inner);
                return;
            }
    for (size_t i = 0; i < axes[0].n; i++)
        for (size_t j = 0; j < axes[1].n; j++) {
            uint8_t *to = dst->at + (i * axes[0].dst + j * axes[1].dst) * dst_bytes;
            const uint8_t *from = src->at + (i * axes[0].src + j * axes[1].src) * src_bytes;
            if (inner.dst == 1 && inner.src == 1)
                convert(to, from, inner.n);
            else
                for (size_t e = 0; e < inner.n; e++)
                    convert(to + e * inner.dst * dst_bytes, from + e * inner.src * src_bytes, 1);
        }
}

/* The row kernels go through their rows once per vector of angles. Four rows at a time keep that close to
 * sequential: 64 lost half the speed and more on keys that come from memory (fp32 pairs 2.4 against 16 GB/s), and
 * gained 10% in the cache. */
enum { ROTATED_ROWS = 4 };

/* Rows whose dim is contiguous on both sides. */
static void rotate_rows(const ctx_kernels *k, const ctx_view *dst, const ctx_view *src, size_t tokens, size_t dim,
                        const float *cos, const float *sin, size_t half, ctx_rope_fn rope) {
    const size_t dst_bytes = ctx_dtype_bytes(dst->dtype), src_bytes = ctx_dtype_bytes(src->dtype);
    const size_t rest = dim - 2 * half;
    const int in_place = dst->at == src->at && dst->dtype == src->dtype && dst->strides[1] == src->strides[1];
    for (size_t t = 0; t < tokens; t += ROTATED_ROWS) {
        size_t rows = tokens - t < ROTATED_ROWS ? tokens - t : ROTATED_ROWS;
        uint8_t *to = dst->at + t * dst->strides[1] * dst_bytes;
        const uint8_t *from = src->at + t * src->strides[1] * src_bytes;
        rope(to, dst->strides[1] * dst_bytes, from, src->strides[1] * src_bytes, rows, cos, sin, half);
        if (rest == 0 || in_place) continue;
        const ctx_view tail_dst = {to + 2 * half * dst_bytes, dst->dtype, {0, dst->strides[1], 1}};
        const ctx_view tail_src = {(uint8_t *)from + 2 * half * src_bytes, src->dtype, {0, src->strides[1], 1}};
        const size_t shape[3] = {1, rows, rest};
        ctx_copy3(k, &tail_dst, &tail_src, shape);
    }
}

ctx_status ctx_rope_shift(const ctx_kernels *k, const ctx_view *dst, const ctx_view *src, const size_t shape[3],
                          const float *cos, const float *sin, size_t half, int interleaved) {
    const size_t heads = shape[0], tokens = shape[1], dim = shape[2];
    const size_t dst_bytes = ctx_dtype_bytes(dst->dtype), src_bytes = ctx_dtype_bytes(src->dtype);
    if (heads == 0 || tokens == 0 || dim == 0) return CTX_OK;
    if (half == 0) { /* nothing to rotate: a copy, which needs no scratch where dim is strided */
        ctx_copy3(k, dst, src, shape);
        return CTX_OK;
    }
    const ctx_rope_fn rope = (interleaved ? k->rope_pairs : k->rope_half)[src->dtype][dst->dtype];
    const int strided = dim > 1 && (dst->strides[2] != 1 || src->strides[2] != 1);
    const size_t rows = tokens < TILE ? tokens : TILE;
    uint8_t *scratch = NULL;
    if (strided) {
        /* dim passed the bounds check of a destination of distinct elements: dim * 4 fits, times TILE may not. */
        size_t bytes;
        if (__builtin_mul_overflow(rows * (dst_bytes + src_bytes), dim, &bytes)) return CTX_NO_MEMORY;
        if (!(scratch = malloc(bytes))) return CTX_NO_MEMORY;
    }
    for (size_t h = 0; h < heads; h++) {
        ctx_view to = *dst, from = *src;
        to.at += h * dst->strides[0] * dst_bytes;
        from.at += h * src->strides[0] * src_bytes;
        if (!strided) {
            rotate_rows(k, &to, &from, tokens, dim, cos, sin, half, rope);
            continue;
        }
        const ctx_view held = {scratch, src->dtype, {0, dim, 1}};
        const ctx_view turned = {scratch + rows * dim * src_bytes, dst->dtype, {0, dim, 1}};
        for (size_t t = 0; t < tokens; t += rows) {
            const size_t part[3] = {1, tokens - t < rows ? tokens - t : rows, dim};
            ctx_view tile_to = to, tile_from = from;
            tile_to.at += t * to.strides[1] * dst_bytes;
            tile_from.at += t * from.strides[1] * src_bytes;
            ctx_copy3(k, &held, &tile_from, part);
            rotate_rows(k, &turned, &held, part[1], dim, cos, sin, half, rope);
            ctx_copy3(k, &tile_to, &turned, part);
        }
    }
    free(scratch);
    return CTX_OK;
}
