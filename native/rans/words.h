/* rans/words.h - byte permutes that put the next words of a stream into the lanes that want one, and back.
 *
 * A row for each set m of 8 lanes, of two byte indices a lane (little-endian; those of 128 give 0). EXPAND[m] spreads the
 * first words of 16 bytes over the lanes in m; COMPRESS[m] moves the words of the lanes in m to the end of 16 bytes.
 */
#ifndef CTXREUSE_RANS_WORDS_H
#define CTXREUSE_RANS_WORDS_H

#include <stdint.h>

/* Lanes of m below lane j, or all for j = 8. */
#define RANK(m, j) __builtin_popcount((m) & ((1 << (j)) - 1))
#define WORD(i) (0x0100 + 0x0202 * (i))
#define SPREAD(m, j) ((m) >> (j) & 1 ? WORD(RANK(m, j)) : 0x8080)
#define EXPAND_ROW(m) \
    {SPREAD(m, 0), SPREAD(m, 1), SPREAD(m, 2), SPREAD(m, 3), SPREAD(m, 4), SPREAD(m, 5), SPREAD(m, 6), SPREAD(m, 7)}
/* Lane j's word, if place p is its: the last lane of m goes to place 7. */
#define AT(m, j, p) ((m) >> (j) & 1 && RANK(m, j) - RANK(m, 8) + 8 == (p) ? WORD(j) : 0)
#define GATHER(m, p)                                                                                                  \
    ((p) + RANK(m, 8) < 8 ? 0x8080                                                                                    \
                          : AT(m, 0, p) | AT(m, 1, p) | AT(m, 2, p) | AT(m, 3, p) | AT(m, 4, p) | AT(m, 5, p) |       \
                                AT(m, 6, p) | AT(m, 7, p))
#define COMPRESS_ROW(m) \
    {GATHER(m, 0), GATHER(m, 1), GATHER(m, 2), GATHER(m, 3), GATHER(m, 4), GATHER(m, 5), GATHER(m, 6), GATHER(m, 7)}
#define ROWS4(row, m) row(m), row(m + 1), row(m + 2), row(m + 3)
#define ROWS16(row, m) ROWS4(row, m), ROWS4(row, m + 4), ROWS4(row, m + 8), ROWS4(row, m + 12)
#define ROWS64(row, m) ROWS16(row, m), ROWS16(row, m + 16), ROWS16(row, m + 32), ROWS16(row, m + 48)
#define ROWS256(row) ROWS64(row, 0), ROWS64(row, 64), ROWS64(row, 128), ROWS64(row, 192)

static const uint16_t EXPAND[256][8] = {ROWS256(EXPAND_ROW)};
static const uint16_t COMPRESS[256][8] = {ROWS256(COMPRESS_ROW)};

#endif
